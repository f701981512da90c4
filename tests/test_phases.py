import itertools
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_teacher
from torch.nn.functional import cosine_similarity
from transformers import IJepaConfig, IJepaModel

from raptor_hf.phases import (
    find_phases,
    layer_similarity,
    partition_objective,
    random_phases,
    shuffled_assignment,
)
from raptor_hf.teachers import trajectory

PUBLISHED = Path(__file__).parents[2] / "shared" / "data" / "dinov2_base_reg_layer_dissimilarity.csv"


def random_similarity(num_layers, seed):
    x = np.random.default_rng(seed).normal(size=(num_layers, 4))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x @ x.T


def compositions(total, parts, min_size):
    """All ways to cut `total` layers into `parts` contiguous phases."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        sizes = np.diff([0, *cuts, total])
        if sizes.min() >= min_size:
            yield sizes.tolist()


def plain_objective(similarity, sizes, objective):
    """The two objectives of the paper, written out as they are defined."""
    blocks = np.repeat(np.arange(len(sizes)), sizes)
    pairs = list(itertools.product(range(len(blocks)), repeat=2))
    if objective == "mean":
        return sum(similarity[i, j] / sizes[blocks[i]] for i, j in pairs if blocks[i] == blocks[j])
    return sum(1 - similarity[i, j] for i, j in pairs if i < j and blocks[i] != blocks[j])


@pytest.mark.skipif(not PUBLISHED.is_file(), reason="the published similarity matrix is not here")
@pytest.mark.parametrize(
    ("objective", "sizes"),
    [
        ("mean", {2: [7, 5], 3: [7, 3, 2], 4: [4, 3, 3, 2]}),
        ("cut", {2: [7, 5], 3: [5, 4, 3], 4: [4, 3, 3, 2]}),
    ],
)
def test_published_matrix_gives_the_published_partitions(objective, sizes):
    similarity = 1 - np.loadtxt(PUBLISHED, delimiter=",")
    for num_phases, expected in sizes.items():
        assert find_phases(similarity, num_phases, min_size=2, objective=objective) == expected


@pytest.mark.parametrize("objective", ["mean", "cut"])
@pytest.mark.parametrize("min_size", [1, 2, 3])
@pytest.mark.parametrize("num_phases", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_exhaustive_search(objective, min_size, num_phases, seed):
    similarity = random_similarity(10, seed)
    best = max(compositions(10, num_phases, min_size), key=lambda s: plain_objective(similarity, s, objective))
    assert find_phases(torch.tensor(similarity), num_phases, min_size, objective) == best


@pytest.mark.parametrize("objective", ["mean", "cut"])
def test_partition_objective_ranks_as_the_definition(objective):
    similarity = random_similarity(9, 3)
    both = [
        (plain_objective(similarity, s, objective), partition_objective(similarity, np.repeat(range(3), s), objective))
        for s in compositions(9, 3, 1)
    ]
    plain, ours = np.array(both).T
    np.testing.assert_allclose(plain - plain[0], ours - ours[0], atol=1e-9)


def test_forty_layers_take_milliseconds():
    similarity = random_similarity(40, 0)
    find_phases(similarity, 6)
    start = time.process_time()
    find_phases(similarity, 6)
    assert time.process_time() - start < 0.05


@pytest.mark.parametrize(
    ("similarity", "num_phases", "min_size", "message"),
    [
        (np.eye(4), 3, 2, "4 layers can't be cut into 3 phases of at least 2"),
        (np.eye(4), 0, 1, "can't be cut into 0 phases"),
        (np.ones((3, 4)), 1, 1, "square"),
        (np.full((3, 3), np.nan), 1, 1, "finite"),
        (1 - np.eye(3), 1, 1, "diagonal must be 1"),
    ],
)
def test_refuses_what_can_not_be_cut(similarity, num_phases, min_size, message):
    with pytest.raises(ValueError, match=message):
        find_phases(similarity, num_phases, min_size)


def test_refuses_an_unknown_objective():
    with pytest.raises(ValueError, match="objective must be one of mean, cut"):
        find_phases(np.eye(4), 2, objective="median")


@pytest.mark.parametrize("registers", [0, 4])
def test_layer_similarity_is_its_definition_and_streams(registers):
    teacher = tiny_teacher(registers)
    images = torch.randn(5, 3, 28, 42)
    states = trajectory(teacher, images)[:, 1:].double()
    cls, patches = states[:, :, 0], states[:, :, 1 + registers :].mean(2)
    expected = sum(cosine_similarity(x[:, :, None], x[:, None], dim=-1).mean(0) / 2 for x in (cls, patches))
    whole = layer_similarity(teacher, [images])
    assert whole.shape == (6, 6) and whole.dtype == torch.float64
    torch.testing.assert_close(whole, expected, atol=1e-6, rtol=0)
    streamed = layer_similarity(teacher, [{"pixel_values": images[:2]}, images[2:]])
    torch.testing.assert_close(streamed, whole, atol=1e-6, rtol=0)


def test_layer_similarity_without_cls_is_that_of_patches():
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
    model = IJepaModel(IJepaConfig(**sizes, image_size=28, patch_size=14, initializer_range=0.2)).eval()
    images = torch.randn(5, 3, 28, 28)
    patches = trajectory(model, images)[:, 1:].double().mean(2)
    expected = cosine_similarity(patches[:, :, None], patches[:, None], dim=-1).mean(0)
    assert expected.min() < 0.99
    torch.testing.assert_close(layer_similarity(model, [images]), expected, atol=1e-6, rtol=0)


def test_layer_similarity_needs_images():
    with pytest.raises(ValueError, match="at least one image"):
        layer_similarity(tiny_teacher(), [])


def test_random_phases_are_seeded_and_uniform():
    assert random_phases(12, 3, 2, seed=7) == random_phases(12, 3, 2, seed=7)
    drawn = [tuple(random_phases(7, 3, 1, seed=seed)) for seed in range(3000)]
    everything = {tuple(sizes) for sizes in compositions(7, 3, 1)}
    assert set(drawn) == everything
    counts = np.array([drawn.count(sizes) for sizes in everything])
    assert counts.min() > 0.7 * counts.mean() and counts.max() < 1.3 * counts.mean()


def test_shuffled_assignment_keeps_sizes_and_is_not_contiguous():
    for seed in range(20):
        blocks = shuffled_assignment([2, 1, 3], seed=seed)
        assert [blocks.count(b) for b in range(3)] == [2, 1, 3]
        assert np.count_nonzero(np.diff(blocks)) > 2
    assert shuffled_assignment([6, 4, 2], 3) == shuffled_assignment([6, 4, 2], 3)
    with pytest.raises(ValueError, match="none to shuffle"):
        shuffled_assignment([1, 1, 1])
