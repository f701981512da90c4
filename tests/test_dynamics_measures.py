"""Measures against systems whose answer is known, and against the plain definitions."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import special_ortho_group
from tiny import tiny_teacher

from raptor_hf.dynamics import (
    AngularBasins,
    Moments,
    SecondMoments,
    TrajectoryDynamics,
    angle,
    angular_speed,
    boundary_jumps,
    convergence,
    dmd,
    dmd_of_depth,
    effective_rank,
    image_directions,
    mean_field_alignment,
    norms,
    orthogonal_convergence,
    stable_rank,
    update_coherence,
    update_singular_values,
)
from raptor_hf.dynamics.rank import gram_singular_values
from raptor_hf.phases import layer_similarity
from raptor_hf.vision_models import token_slices, trajectory


def linear_trajectory(matrix, layers=6, images=3, tokens=4, dtype=torch.float64):
    """x_(l+1) = A x_l from random states: (images, layers + 1, tokens, D)."""
    states = [torch.randn(images, tokens, len(matrix), dtype=torch.float64)]
    for _ in range(layers):
        states.append(states[-1] @ matrix.T)
    return torch.stack(states, dim=1).to(dtype)


def block_rotation(*angles):
    turns = [[[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]] for a in angles]
    return torch.block_diag(*torch.tensor(turns, dtype=torch.float64))


def test_a_rotation_turns_by_its_angle_at_constant_length():
    states = linear_trajectory(block_rotation(0.3, 0.3, 0.3))
    torch.testing.assert_close(angular_speed(states), torch.full((3, 6, 4), 0.3, dtype=torch.float64))
    torch.testing.assert_close(norms(states), norms(states)[:, :1].expand(-1, 7, -1))
    turned = torch.arange(6, -1, -1) * 0.3
    torch.testing.assert_close(convergence(states), turned.double().cos().view(1, 7, 1).expand(3, 7, 4))


@pytest.mark.parametrize("theta", [1e-9, 1e-4, 1.0, math.pi - 1e-9])
def test_angles_keep_their_digits_near_0_and_pi(theta):
    x, y = torch.tensor([2.0, 0.0]).double(), 5 * torch.tensor([math.cos(theta), math.sin(theta)]).double()
    assert angle(x, y).item() == pytest.approx(theta, rel=1e-7)


def test_orthogonal_steps_converge_as_their_baseline_and_aligned_ones_beyond_it():
    steps = torch.eye(8).double() * torch.arange(1, 9)
    orthogonal = steps.cumsum(0).view(1, 8, 1, 8)
    torch.testing.assert_close(convergence(orthogonal), orthogonal_convergence(orthogonal))
    aligned = torch.arange(1, 9).double().view(1, 8, 1, 1) * torch.ones(8).double()
    torch.testing.assert_close(convergence(aligned), torch.ones(1, 8, 1).double())
    assert (orthogonal_convergence(aligned)[:, :-1] < 0.9).all()


def test_identical_tokens_are_coherent_and_isotropic_ones_about_one_over_root_n():
    path = torch.randn(3, 5, 1, 16)
    same = path.expand(-1, -1, 9, -1)
    torch.testing.assert_close(update_coherence(same), torch.ones(3, 4).double())
    torch.testing.assert_close(mean_field_alignment(same), torch.ones(3, 5, 9).double())
    isotropic = torch.randn(20, 5, 100, 64).cumsum(1)
    torch.testing.assert_close(update_coherence(isotropic).mean(), torch.tensor(0.1).double(), atol=0.005, rtol=0)


def test_mean_field_alignment_averages_to_the_length_of_the_mean_direction():
    states = torch.randn(2, 4, 5, 8) + 1
    mean = torch.nn.functional.normalize(states.double(), dim=-1).mean(2).norm(dim=-1)
    torch.testing.assert_close(mean_field_alignment(states).mean(2), mean)


def test_updates_of_rank_r_have_at_most_that_rank():
    basis = torch.linalg.qr(torch.randn(32, 3).double()).Q
    states = (torch.randn(4, 6, 10, 3).double() @ basis.T).cumsum(1)
    values = update_singular_values(states)
    assert values.shape == (5, 32)
    for rank in (stable_rank(values), effective_rank(values)):
        assert (rank > 1).all() and (rank <= 3 + 1e-6).all()


def test_ranks_of_known_singular_values():
    values = torch.tensor([[2.0, 2.0, 2.0, 0.0], [3.0, 0.0, 0.0, 0.0], [2.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert stable_rank(values).tolist() == [3, 1, 1.5, 0]
    entropy = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    assert effective_rank(values).tolist() == pytest.approx([3, 1, math.exp(entropy), 0])


def random_stable_matrix():
    """Eigenvalues 0.95 e^(+-0.4i), 0.9, 0.5, in a basis that isn't orthogonal."""
    matrix = torch.block_diag(0.95 * block_rotation(0.4), torch.diag(torch.tensor([0.9, 0.5]).double()))
    basis = torch.randn(4, 4).double() + 3 * torch.eye(4).double()
    return basis @ matrix @ torch.linalg.inv(basis)


def sorted_complex(values):
    return sorted(np.asarray(values).tolist(), key=lambda z: (round(abs(z), 6), round(z.imag, 6)))


def test_a_linear_map_gives_its_eigenvalues():
    matrix = random_stable_matrix()
    moments = SecondMoments()
    for _ in range(2):
        moments.update(linear_trajectory(matrix))
    expected = sorted_complex(torch.linalg.eigvals(matrix))
    for start, end in ((0, 6), (0, 2), (3, 6)):
        result = dmd_of_depth(moments, start, end, num_modes=10)
        assert sorted_complex(result.eigenvalues) == pytest.approx(expected, abs=1e-5)
        assert result.energy == pytest.approx(1) and result.explained == pytest.approx(1)


def test_what_one_factor_for_all_directions_explains():
    x = torch.randn(200, 2).double()
    assert dmd(x, 0.7 * x, 2).by_one_factor == pytest.approx(1)
    quarter = dmd(x, x @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]]).double(), 2)
    assert quarter.explained == pytest.approx(1) and quarter.by_one_factor < 0.05


def test_growth_that_is_removed_leaves_the_moduli_of_directions():
    moments = SecondMoments()
    moments.update(linear_trajectory(1.3 * block_rotation(0.2, 0.7)))
    with_growth, without = (dmd_of_depth(moments, 0, 6, 4, remove_growth=flag) for flag in (False, True))
    assert with_growth.eigenvalues.abs().tolist() == pytest.approx([1.3] * 4)
    assert without.eigenvalues.abs().tolist() == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("num_modes", [2, 5, 8])
def test_modes_equal_those_of_pydmd(num_modes):
    pydmd = pytest.importorskip("pydmd", reason="PyDMD comes with the extra `dynamics`")
    states = linear_trajectory(torch.randn(8, 8).double() / 3) + 0.1 * torch.randn(3, 7, 4, 8).double()
    x, y = states[:, :-1].reshape(-1, 8), states[:, 1:].reshape(-1, 8)
    expected = pydmd.DMD(svd_rank=num_modes).fit(x.T.numpy(), y.T.numpy()).eigs
    moments = SecondMoments()
    for image in states.split(1):
        moments.update(image)
    for result in (dmd(x, y, num_modes), dmd_of_depth(moments, 0, 6, num_modes)):
        assert sorted_complex(result.eigenvalues) == pytest.approx(sorted_complex(expected), abs=1e-8)


def test_states_that_start_as_zero_have_no_mode_there():
    moments = SecondMoments()
    moments.update(torch.cat([torch.zeros(3, 1, 4, 4), torch.ones(3, 2, 4, 4)], dim=1))
    for remove_growth in (False, True):
        assert dmd_of_depth(moments, 0, 1, 2, remove_growth).eigenvalues.shape == (0,)
        assert dmd_of_depth(moments, 0, 2, 2, remove_growth).eigenvalues.abs().tolist() == pytest.approx([1])


def test_what_a_map_explains_is_one_minus_its_squared_error():
    x = torch.randn(200, 6).double()
    y = x @ torch.randn(6, 6).double() + torch.randn(200, 6).double()
    solution = torch.linalg.lstsq(x, y).solution
    share = 1 - (y - x @ solution).square().sum() / y.square().sum()
    assert dmd(x, y, 6).explained == pytest.approx(share.item())
    values = torch.linalg.svdvals(x).square()
    assert dmd(x, y, 2).energy == pytest.approx((values[:2].sum() / values.sum()).item())


def test_jumps_at_the_cuts_are_told_from_jumps_elsewhere():
    curve = [1, 1.1, 1, 1.1, 3, 3.1, 3, 3.1, 6, 6.1, 6, 6.1]
    aligned = boundary_jumps(curve, [4, 4, 4])
    assert aligned["at_cuts"] == pytest.approx(2.4) and aligned["elsewhere"] == pytest.approx(0.1)
    # Of the 55 ways to choose 2 of 11 places, one is as good.
    assert aligned["p_value"] == aligned["smallest_p_value"] == pytest.approx(1 / 55)
    assert boundary_jumps(curve, [2, 4, 6])["p_value"] > 0.5
    assert boundary_jumps(curve, [12])["p_value"] is None
    with pytest.raises(ValueError, match="must sum to the 12 layers"):
        boundary_jumps(curve, [4, 4])


def test_classes_in_cones_of_their_own_are_basins():
    centres = torch.tensor(special_ortho_group.rvs(16, random_state=0)[:4])
    labels = torch.arange(40) % 4
    start, end = torch.randn(40, 16).double(), centres[labels] + 0.05 * torch.randn(40, 16).double()
    states = torch.stack([start, start + end, end], dim=1).unsqueeze(2)
    directions = image_directions(states)
    basins = AngularBasins(num_kept=7)
    for part in (slice(0, 25), slice(25, 40)):
        basins.update(directions[part], labels[part])
    result = basins.compute()
    cosines = torch.einsum("bld,cld->lbc", directions, directions)
    same = labels[:, None] == labels
    for layer in range(3):
        within = cosines[layer][same & ~torch.eye(40, dtype=bool)].mean().item()
        assert result["within"][layer] == pytest.approx(within)
        assert result["between"][layer] == pytest.approx(cosines[layer][~same].mean().item())
    assert result["within"][-1] > 0.9 > 0.2 > abs(result["between"][-1]) and abs(result["within"][0]) < 0.3
    projection = basins.projection()
    assert np.shape(projection["paths"]) == (7, 3, 2) and projection["labels"] == labels[:7].tolist()
    assert np.shape(projection["class_means"]["3"]) == (3, 2)
    final = directions[:, -1] - directions[:, -1].mean(0)
    variances = torch.linalg.svdvals(final).square()
    assert projection["share"] == pytest.approx((variances[:2].sum() / variances.sum()).item())


def test_without_labels_there_is_one_class():
    basins = AngularBasins()
    basins.update(image_directions(torch.randn(5, 3, 2, 8)))
    assert basins.compute()["between"] is basins.compute()["classes"] is None and len(basins.compute()["within"]) == 3
    with pytest.raises(ValueError, match="with all images or with none"):
        basins.update(image_directions(torch.randn(5, 3, 2, 8)), torch.arange(5))


def test_labels_may_be_a_list_of_whole_numbers():
    states = torch.randn(4, 3, 2, 8)
    first, second = TrajectoryDynamics({"patch": slice(0, None)}), TrajectoryDynamics({"patch": slice(0, None)})
    first.update(states, [0, 0, 1, 1])
    second.update(states, torch.tensor([0, 0, 1, 1]))
    assert first.compute([2]) == second.compute([2])
    for labels in ([0.0, 1.0, 0.0, 1.0], ["a", "b", "a", "b"], [0, 1], [[0]] * 4, [None] * 4):
        with pytest.raises(ValueError, match="whole number for each of the 4 images"):
            first.update(states, labels)


def test_moments_of_parts_are_those_of_the_whole():
    values = torch.randn(50, 3) + 1000
    moments = Moments()
    for part in values.split([1, 20, 29]):
        moments.update(part)
    torch.testing.assert_close(moments.mean, values.double().mean(0))
    half_width = 2.0096 * values.double().std(0) / 50**0.5
    torch.testing.assert_close(moments.half_width(), half_width, rtol=1e-4, atol=0)
    single = Moments()
    single.update(values[:1])
    assert single.band()["low"] is None and single.band()["mean"] == values[0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streaming_equals_the_pure_functions_on_all_images_at_once(dtype, monkeypatch):
    monkeypatch.setattr("raptor_hf.dynamics.trajectory_dynamics.CHUNK", 1000)
    states = (torch.randn(7, 5, 6, 12).cumsum(1) + 1).to(dtype)
    slices = {"cls": slice(0, 1), "register": slice(1, 3), "patch": slice(3, None)}
    dynamics = TrajectoryDynamics(slices)
    for part in (states[:3], states[3:]):
        dynamics.update(part)
    result = dynamics.compute([2, 2], num_modes=3)
    assert result["images"] == 7
    for name, where in slices.items():
        tokens, measured = states[:, :, where], result["tokens"][name]
        for key, function in (("convergence", convergence), ("norm", norms), ("angular_speed", angular_speed)):
            assert measured[key]["mean"] == pytest.approx(function(tokens).mean((0, 2)).tolist())
        values = update_singular_values(tokens)
        assert measured["stable_rank"] == pytest.approx(stable_rank(values).tolist())
        assert measured["effective_rank"] == pytest.approx(effective_rank(values).tolist(), rel=1e-4)
        assert measured["largest_rank"] == min(12, 7 * tokens.shape[2])
        x, y = (s.reshape(-1, 12) for s in (tokens[:, 2:4], tokens[:, 3:5]))
        expected = dmd(x, y, 3).eigenvalues.abs().tolist()
        assert measured["dmd_with_growth"]["phases"][1]["moduli"] == pytest.approx(expected)
        assert set(measured["boundaries"]) >= {"angular_speed", "norm", "convergence", "stable_rank"}
    assert "coherence" not in result["tokens"]["cls"]
    coherence = update_coherence(states[:, :, 3:]).mean(0).tolist()
    assert result["tokens"]["patch"]["coherence"]["mean"] == pytest.approx(coherence)


def held(measured) -> int:
    """Bytes behind all tensors of an object, those out of a view's sight too."""
    if isinstance(measured, torch.Tensor):
        return measured.untyped_storage().nbytes()
    if hasattr(measured, "__dict__"):
        measured = vars(measured)
    parts = measured.values() if isinstance(measured, dict) else measured if isinstance(measured, list) else ()
    return sum(held(part) for part in parts)


def test_what_is_held_does_not_grow_with_the_images():
    dynamics = TrajectoryDynamics({"cls": slice(0, 1), "patch": slice(1, None)})
    sizes = []
    for _ in range(8):
        dynamics.update(torch.randn(8, 4, 5, 6), torch.arange(8) % 3)
        sizes.append(held(dynamics))
    # Three batches hold the 24 images that are kept to be drawn.
    assert sizes[0] > 8 * 10 * 6 * 6 and sizes[2] == sizes[-1]


def test_ranks_by_way_of_the_gram_matrix():
    matrix = torch.randn(50, 8).double()
    torch.testing.assert_close(gram_singular_values(matrix.T @ matrix), torch.linalg.svdvals(matrix))


def test_similarity_is_that_of_the_phases():
    teacher = tiny_teacher(registers=2)
    batches = [torch.randn(2, 3, 28, 28) for _ in range(2)]
    dynamics = TrajectoryDynamics(token_slices(teacher.config))
    for batch in batches:
        dynamics.update(trajectory(teacher, batch))
    torch.testing.assert_close(dynamics.similarity, layer_similarity(teacher, batches), atol=1e-6, rtol=0)


def test_refuses_what_cannot_be_measured():
    dynamics = TrajectoryDynamics({"patch": slice(0, None)})
    with pytest.raises(ValueError, match="at least one image"):
        dynamics.compute([3])
    with pytest.raises(ValueError, match="infinities or NaN"):
        dynamics.update(torch.full((1, 3, 2, 4), float("inf")))
    dynamics.update(torch.randn(1, 4, 2, 4))
    with pytest.raises(ValueError, match="sum to the 3 layers"):
        dynamics.compute([3, 1])
    with pytest.raises(ValueError, match="num_modes"):
        dynamics.compute([3], num_modes=0)
    with pytest.raises(ValueError, match=r"Layers 3\.\.2"):
        dmd_of_depth(dynamics.tokens["patch"].products, 2, 2, 1)
