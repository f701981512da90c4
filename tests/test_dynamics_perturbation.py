"""Running on from a layer, self-correction and the recurrence, on models whose dynamics are known."""

import math

import pytest
import torch
from tiny import tiny_teacher
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from raptor_hf import RaptorConfig, RaptorModel
from raptor_hf.dynamics import (
    ModelDynamics,
    RecordedLayers,
    Recurrence,
    SelfCorrection,
    angle,
    classify_orbit,
    deviation,
    iterate,
    perturb,
    step_sizes,
)
from raptor_hf.modeling_raptor import RaptorBlock
from raptor_hf.vision_models import token_slices, trajectory


def tiny_raptor(phase_sizes=(3, 1, 2), **kwargs):
    torch.manual_seed(0)
    config = RaptorConfig(
        phase_sizes=list(phase_sizes), hidden_size=16, num_attention_heads=2, image_size=28, patch_size=14, **kwargs
    )
    model = RaptorModel(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tiny_clip():
    torch.manual_seed(0)
    settings = dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
    return CLIPVisionModel(CLIPVisionConfig(**settings, image_size=28, patch_size=14)).eval().requires_grad_(False)


class KnownBlock(RaptorBlock):
    """A block that does to states what a function of them and of the depth step says."""

    def __init__(self, function):
        nn.Module.__init__(self)
        self.function = function

    def forward(self, hidden_states, depth_step, *args, **kwargs):
        return self.function(hidden_states, depth_step)


def raptor_of(function, phase_sizes=(4, 2)):
    model = tiny_raptor(phase_sizes)
    for phase in range(len(phase_sizes)):
        model.blocks[phase] = KnownBlock(function)
    return model


@pytest.mark.parametrize("make", [tiny_teacher, lambda: tiny_teacher(registers=2), tiny_raptor, tiny_clip])
def test_running_on_from_clean_states_is_the_trajectory(make):
    model = make()
    images = torch.randn(2, 3, 28, 28)
    layers = RecordedLayers(model, images)
    states = trajectory(model, images)
    assert torch.equal(layers.states, states)
    for start in range(states.shape[1]):
        torch.testing.assert_close(layers(states[:, start], start), states[:, start:])
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_running_on_uses_each_layers_own_depth_step():
    model = raptor_of(lambda x, step: x + step)
    layers = RecordedLayers(model, torch.randn(1, 3, 28, 28))
    changes = layers(torch.zeros(1, 5, 16), 2).diff(dim=1)[0, :, 0, 0]
    assert changes.tolist() == [3, 4, 5, 6]


def test_says_where_a_model_cannot_be_run_on():
    model = tiny_teacher()
    model.more = nn.ModuleList(nn.Identity() for _ in range(6))
    with pytest.raises(ValueError, match=r"dinov2 model can't be run on from a layer: 2 of its module lists"):
        RecordedLayers(model, torch.randn(1, 3, 28, 28))
    dynamics = ModelDynamics(model)
    dynamics.update(torch.randn(1, 3, 28, 28))
    result = dynamics.compute([6])
    assert "self_correction" not in result and "can't be run on" in result["not_run_on"]
    claim = next(claim for claim in result["claims"] if claim["name"] == "self-correction")
    assert claim["verdict"] == "not measured" and "can't be run on" in claim["measured"]


@pytest.mark.parametrize("eps", [1e-3, 0.3])
def test_pushes_have_their_size_and_stand_at_right_angles(eps):
    states = torch.randn(3, 5, 16)
    push = perturb(states, eps) - states
    torch.testing.assert_close(push.norm(dim=-1) / states.norm(dim=-1), torch.full((3, 5), eps), rtol=1e-3, atol=0)
    assert torch.cosine_similarity(push, states, dim=-1).abs().max() < 1e-3
    turned = angle(perturb(states, eps), states)
    torch.testing.assert_close(turned, torch.full_like(turned, math.atan(eps)), rtol=1e-3, atol=0)


def contraction(factor):
    """All tokens drawn to one point: deviations from any trajectory shrink by the factor."""
    centre = torch.linspace(1, 2, 16)
    return lambda x, step: centre + factor * (x - centre)


def test_a_contraction_gives_its_factor():
    model = raptor_of(contraction(0.5), phase_sizes=(2, 4))
    slices = token_slices(model.config)
    correction = SelfCorrection(slices, starts=[0, 2, 3], epsilons=[1e-3, 1e-2])
    for _ in range(2):
        layers = RecordedLayers(model, torch.randn(4, 3, 28, 28))
        # In float64, and from the centre, where lengths stay as they are and so angles shrink as distances do.
        layers.states = torch.linspace(1, 2, 16).double().expand(4, 7, 5, 16)
        correction.update(layers)
    for entries in correction.compute([2, 4]).values():
        assert len(entries) == 6
        for entry in entries:
            depth = 6 - entry["start"]
            assert entry["contraction"]["mean"] == pytest.approx([0.5] * depth, rel=1e-3)
            assert entry["total"]["mean"] == pytest.approx(0.5**depth, rel=1e-3)
            assert entry["angle"]["mean"][0] == pytest.approx(math.atan(entry["eps"]))
            assert entry["phases"][1]["mean"] == pytest.approx(0.5, rel=1e-3)
            assert (entry["phases"][0] is None) == (entry["start"] >= 2)
            assert entry["total"]["low"] <= entry["total"]["mean"] <= entry["total"]["high"]


def test_a_rotation_neither_corrects_nor_magnifies():
    turn = torch.linalg.qr(torch.randn(16, 16)).Q
    model = raptor_of(lambda x, step: x @ turn)
    angles = deviation(RecordedLayers(model, torch.randn(2, 3, 28, 28)), 1, 0.1)
    assert angles.shape == (2, 6, 5)
    torch.testing.assert_close(angles, torch.full_like(angles, math.atan(0.1)), rtol=1e-4, atol=0)


def test_tokens_of_no_length_cannot_be_pushed():
    model = tiny_teacher(registers=2)
    slices = token_slices(model.config)
    assert not trajectory(model, torch.zeros(1, 3, 28, 28))[:, 0, slices["register"]].any()
    correction = SelfCorrection(slices, starts=[0, 3], epsilons=[0.1])
    correction.update(RecordedLayers(model, torch.randn(2, 3, 28, 28)))
    starts = {name: [entry["start"] for entry in entries] for name, entries in correction.compute([6]).items()}
    assert starts == {"cls": [0, 3], "register": [3], "patch": [0, 3]}


def test_pushes_depend_on_the_seed_but_not_on_batches_or_on_other_pushes():
    model, images = tiny_teacher(), torch.randn(5, 3, 28, 28)

    def means(batch_size, seed=1, starts=(0, 2), epsilons=(0.1, 0.3)):
        correction = SelfCorrection(token_slices(model.config), starts, epsilons, seed)
        for batch in images.split(batch_size):
            correction.update(RecordedLayers(model, batch))
        entries = correction.compute([6])["patch"]
        return {(entry["start"], entry["eps"]): entry["total"]["mean"] for entry in entries}

    whole = means(5)
    assert means(2) == pytest.approx(whole, rel=1e-4)
    assert means(1, starts=(2, 2), epsilons=(0.3,)) == pytest.approx({(2, 0.3): whole[2, 0.3]}, rel=1e-4)
    assert means(5, seed=2) != pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize(
    "starts, epsilons, message",
    [([], [0.1], "Start layers"), ([0], [0.0], "must be positive"), ([0], [math.nan], "and finite")],
)
def test_refuses_pushes_that_cannot_be(starts, epsilons, message):
    with pytest.raises(ValueError, match=message):
        SelfCorrection({"patch": slice(0, None)}, starts, epsilons)


def test_start_layers_must_be_below_the_depth():
    with pytest.raises(ValueError, match="below the model's 6 layers"):
        ModelDynamics(tiny_teacher(), starts=[6])


def test_the_first_iterations_are_the_models_own():
    model = tiny_raptor()
    states = trajectory(model, torch.randn(2, 3, 28, 28))
    for phase, start, size in ((0, 0, 3), (1, 3, 1), (2, 4, 2)):
        for depth_step in ("held", "moved"):
            orbit = iterate(model, states[:, start], phase, size + 2, depth_step)
            torch.testing.assert_close(orbit[:, : size + 1], states[:, start : start + size + 1])


def test_the_depth_step_is_held_or_moved():
    model = raptor_of(lambda x, step: x + step)
    for depth_step, steps in (("held", [5, 6, 6, 6]), ("moved", [5, 6, 7, 8])):
        orbit = iterate(model, torch.zeros(1, 5, 16), 1, 4, depth_step)
        assert orbit.diff(dim=1)[0, :, 0, 0].tolist() == steps


def rotation(theta, factor=1.0):
    cos, sin = factor * math.cos(theta), factor * math.sin(theta)
    matrix = torch.block_diag(*[torch.tensor([[cos, sin], [-sin, cos]])] * 8)
    return lambda x, step: x @ matrix


KNOWN = {
    "contraction": (contraction(0.7), ("fixed point", 1)),
    "contraction to nothing": (lambda x, step: 0.5 * x, ("fixed point", 1)),
    "identity": (lambda x, step: x, ("fixed point", 1)),
    "spiral into a point": (rotation(1.0, 0.8), ("fixed point", 1)),
    "reflection": (lambda x, step: -x, ("period", 2)),
    "rotation by a third": (rotation(2 * math.pi / 3), ("period", 3)),
    "rotation by an eighth": (rotation(math.pi / 4), ("period", 8)),
    "irrational rotation": (rotation(1.0), ("undecided", None)),
    "slow contraction": (contraction(0.99), ("undecided", None)),
    "expansion": (lambda x, step: 1.1 * x, ("divergence", None)),
    "steady drift": (lambda x, step: x + 1, ("divergence", None)),
    "overflow": (lambda x, step: x * 1e20, ("divergence", None)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_blocks_of_known_behaviour_are_classified(name):
    function, expected = KNOWN[name]
    torch.manual_seed(1)
    orbit = iterate(raptor_of(function), torch.randn(3, 5, 16), 0, 48)
    assert classify_orbit(orbit) == [expected] * 3


@pytest.mark.parametrize("drift", [2e-5, 7e-5, 8e-5, 1e-4, 3e-4, 2e-3])
def test_a_drift_has_no_period(drift):
    orbit = torch.ones(1, 48, 1, 16) + drift * torch.arange(48.0).view(1, -1, 1, 1) * torch.randn(16)
    assert classify_orbit(orbit)[0][0] in ("fixed point", "undecided")


def test_step_sizes_are_relative_to_the_state():
    orbit = torch.tensor([1.0, 2.0, 4.0, 4.0]).view(1, 4, 1, 1).expand(2, 4, 3, 5)
    torch.testing.assert_close(step_sizes(orbit), torch.tensor([[0.5, 0.5, 0.0]] * 2).double())


def test_recurrence_counts_outcomes_of_each_phase():
    model = tiny_raptor((4, 2))
    model.blocks[0], model.blocks[1] = (
        KnownBlock(contraction(0.5)),
        KnownBlock(lambda x, step: x * (1.2 if step > 6 else 1.0)),
    )
    recurrence = Recurrence(model, {"cls": slice(0, 1), "patch": slice(1, None)}, 48)
    for size in (2, 3):
        recurrence.update(trajectory(model, torch.randn(size, 3, 28, 28)))
    outcomes = {(o["phase"], o["depth_step"], o["token"]): o["outcomes"] for o in recurrence.compute()}
    assert outcomes[0, "held", "cls"] == outcomes[0, "moved", "patch"] == {"fixed point": 5}
    assert outcomes[1, "held", "patch"] == {"fixed point": 5} and outcomes[1, "moved", "patch"] == {"divergence": 5}
    assert len(recurrence.compute()[0]["step_size"]) == 48
    # Only lengths grow there.
    directions = {(o["phase"], o["depth_step"], o["token"]): o["directions"] for o in recurrence.compute()}
    assert directions[1, "moved", "patch"] == {"fixed point": 5}


def test_refuses_to_iterate_what_has_no_phases():
    states = torch.randn(1, 5, 16)
    with pytest.raises(ValueError, match="Only the phases of a Raptor"):
        iterate(tiny_teacher(), states, 0, 4)
    with pytest.raises(ValueError, match="phases 0 to 2, got 3"):
        iterate(tiny_raptor(), states, 3, 4)
    with pytest.raises(ValueError, match="depth_step must be one of held, moved"):
        iterate(tiny_raptor(), states, 0, 4, "still")
