import copy

import numpy as np
import pytest
import torch
from labelled import tiny_classifier
from tiny import tiny_teacher
from torch.nn.functional import cosine_similarity

from raptor_hf.controls.head import head_accuracy
from raptor_hf.controls.layer_swap import layer_order, layer_swap, phase_contrast
from raptor_hf.teachers import trajectory


def test_swap_exchanges_and_replace_repeats():
    assert layer_order(4, 1, 3) == [0, 3, 2, 1]
    assert layer_order(4, 3, 1, "replace") == [0, 1, 2, 1]
    with pytest.raises(ValueError, match="swap, replace"):
        layer_order(4, 0, 1, "drop")


@pytest.mark.parametrize("operation", ["swap", "replace"])
def test_each_entry_is_the_teacher_with_its_layers_so_ordered(operation):
    teacher, pixel_values = tiny_teacher(registers=2, layers=4), torch.randn(3, 3, 28, 28)
    batches = [{"pixel_values": pixel_values[:2]}, {"pixel_values": pixel_values[2:]}]
    found = layer_swap(teacher, batches, operation=operation)["final_cosine"]
    last = trajectory(teacher, pixel_values)[:, -1]
    for i, j in [(0, 3), (2, 1), (2, 2)]:
        changed = copy.deepcopy(teacher)
        order = layer_order(4, i, j, operation)
        changed.encoder.layer = torch.nn.ModuleList(teacher.encoder.layer[layer] for layer in order)
        similar = cosine_similarity(trajectory(changed, pixel_values)[:, -1], last, dim=-1)
        expected = (similar[:, 0].mean() + similar[:, 3:].mean()) / 2
        assert found[i, j] == pytest.approx(expected.item(), abs=1e-5)
    assert np.allclose(found, found.T) == (operation == "swap")


def test_swapping_identical_layers_changes_nothing():
    teacher = tiny_teacher(layers=4)
    teacher.encoder.layer[2].load_state_dict(teacher.encoder.layer[1].state_dict())
    found = layer_swap(teacher, [{"pixel_values": torch.randn(2, 3, 28, 28)}])["final_cosine"]
    assert found[1, 2] == pytest.approx(1, abs=1e-6) and found[0, 1] < 0.999
    assert np.diagonal(found) == pytest.approx(np.ones(4), abs=1e-6)


def test_the_untouched_teachers_accuracy_is_on_the_diagonal():
    model = tiny_classifier()
    pixel_values = torch.randn(9, 3, 28, 28)
    # Right but for the last two.
    labels = model(pixel_values).logits.argmax(-1)
    labels[-2:] = (labels[-2:] + 1) % 3
    batches = [{"pixel_values": pixel_values[:5], "labels": labels[:5]}]
    batches += [{"pixel_values": pixel_values[5:], "labels": labels[5:]}]
    found = layer_swap(model.dinov2, batches, model.classifier)["accuracy"]
    assert np.diagonal(found) == pytest.approx(np.full(4, 7 / 9))
    rows = [{"pixel_values": p, "labels": label} for p, label in zip(pixel_values, labels)]
    assert head_accuracy(model.dinov2, model.classifier, rows, batch_size=4) == pytest.approx(7 / 9)


def test_contrast_of_a_matrix_of_clean_phases():
    blocks = np.repeat([0, 1, 2], [4, 4, 4])
    matrix = (blocks[:, None] == blocks[None, :]).astype(float)
    found = phase_contrast(matrix, [4, 4, 4], num_shuffles=200)
    assert found["difference"] == 1 and found["at_equal_distance"] == 1
    assert (found["intra"]["mean"], found["inter"]["mean"]) == (1, 0)
    assert found["shuffled"]["p"] == 1 / 201 and found["contiguous"]["p"] == 1 / (1 + found["contiguous"]["n"])
    # Contiguous ways to cut 12 layers in 3 parts of at least 2, without this one.
    assert found["contiguous"]["n"] == 27


def test_the_pairs_of_a_symmetric_matrix_count_once():
    matrix = np.add.outer(np.arange(4.0), np.arange(4.0))
    found = phase_contrast(matrix, [2, 2], num_shuffles=10)
    assert (found["intra"]["n"], found["inter"]["n"]) == (2, 4)
    matrix[0, 3] += 1
    found = phase_contrast(matrix, [2, 2], num_shuffles=10)
    assert (found["intra"]["n"], found["inter"]["n"]) == (4, 8)


def test_what_only_distance_explains_is_no_contrast_at_equal_distance():
    distance = np.abs(np.subtract.outer(np.arange(9), np.arange(9)))
    found = phase_contrast(1.0 - distance / 9, [3, 3, 3], num_shuffles=200)
    assert found["difference"] > 0.2 and found["at_equal_distance"] == pytest.approx(0)


def test_one_phase_or_single_layers_have_no_contrast():
    assert phase_contrast(np.eye(4), [4])["difference"] is None
    assert phase_contrast(np.eye(4), [1, 1, 1, 1])["difference"] is None
