"""Verdicts on trajectories that are made so that a claim holds, and so that it doesn't."""

import math
import re

import pytest
import torch

from raptor_hf.dynamics import TrajectoryDynamics
from raptor_hf.dynamics.claims import check_claims, early_and_late

SLICES = {"cls": slice(0, 1), "patch": slice(1, None)}


def late_states(images=12, patches=9, width=48):
    """
    Eight layers: cls turns little, then sharply; patches move each their own way, then all along one axis, after which
    little changes any more.
    """
    turns = torch.tensor([0.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 1.2]).cumsum(0)
    plane = torch.linalg.qr(torch.randn(images, width, 2)).Q
    cls = turns.cos().view(1, -1, 1) * plane[:, None, :, 0] + turns.sin().view(1, -1, 1) * plane[:, None, :, 1]
    own = torch.randn(images, 4, patches, width) / math.sqrt(width)
    shared = torch.zeros(images, 4, patches, width)
    shared[..., 0] = torch.tensor([1.0, 1.0, 0.5, 0.3]).view(1, 4, 1)
    updates = torch.cat([own, shared], dim=1)
    start = torch.randn(images, 1, patches, width) / math.sqrt(width)
    return torch.cat([cls.unsqueeze(2), torch.cat([start, start + updates.cumsum(1)], dim=1)], dim=2)


def verdicts(states, phase_sizes=(4, 4), slices=SLICES, labels=None, **more):
    dynamics = TrajectoryDynamics(slices)
    dynamics.update(states, labels)
    return {claim["name"]: claim for claim in check_claims(dynamics.compute(phase_sizes) | more)}


def test_claims_hold_of_trajectories_that_are_made_so():
    claims = verdicts(late_states())
    for name in ("late cls reorientation", "patch coherence", "low-rank late updates"):
        assert claims[name]["verdict"] == "holds", claims[name]
    assert "to 1.00 in the last phase" in claims["patch coherence"]["measured"]
    assert claims["self-correction"]["verdict"] == claims["class-dependent basins"]["verdict"] == "not measured"


def test_claims_do_not_hold_of_the_same_run_backwards():
    claims = verdicts(late_states().flip(1))
    for name in ("late cls reorientation", "patch coherence", "low-rank late updates"):
        assert claims[name]["verdict"] == "does not hold", claims[name]
    assert "Patch coherence falls from 1.00" in claims["patch coherence"]["measured"]


def test_a_claim_holds_in_part():
    # Coherent from the first layer on: strong, but not rising.
    states = late_states()
    states[:, :, 1:] = states[:, :, 1:2]
    claim = verdicts(states)["patch coherence"]
    assert claim["verdict"] == "holds in part"
    assert [(part["holds"], part["threshold"]) for part in claim["parts"]] == [
        (True, "at least 0.5"),
        (False, "at least 0.1"),
    ]


def random_walk(layers=12, images=16, tokens=10, width=64):
    return torch.randn(images, layers + 1, tokens, width).cumsum(1)


@pytest.mark.parametrize("layers, phase_sizes", [(12, (4, 4, 4)), (6, (6,)), (24, (8, 8, 8))])
def test_a_random_walk_holds_nothing(layers, phase_sizes):
    claims = verdicts(random_walk(layers), phase_sizes)
    assert claims["directional convergence"]["verdict"] == "does not hold"
    assert claims["low-rank late updates"]["verdict"] == "does not hold"
    assert claims["late cls reorientation"]["verdict"] == "does not hold"
    assert claims["patch coherence"]["verdict"] == "does not hold"
    assert claims["weak contraction"]["verdict"] == "not measured"
    assert "16 images are too few for so many modes" in claims["weak contraction"]["measured"]
    enough = verdicts(random_walk(layers, images=24), phase_sizes)["weak contraction"]
    assert enough["verdict"] == "not measured" and "explains too little" in enough["measured"]


def test_a_drift_in_a_direction_of_its_own_converges():
    start, drift = torch.randn(2, 6, 1, 5, 32)
    claim = verdicts(start + torch.arange(9).view(1, 9, 1, 1) * drift)["directional convergence"]
    assert claim["verdict"] == "holds", claim


@pytest.mark.parametrize("factor, verdict", [(1.0, "holds"), (1.2, "does not hold")])
def test_weak_contraction_is_that_of_directions(factor, verdict):
    # Pairs of directions turn into one another; one grows beside them, which removed growth can't hide.
    turn = torch.tensor([[math.cos(0.5), -math.sin(0.5)], [math.sin(0.5), math.cos(0.5)]])
    step = torch.block_diag(turn, turn, torch.tensor([[factor]]))
    states = torch.randn(40, 1, 3, 5)
    for _ in range(4):
        states = torch.cat([states, states[:, -1:] @ step], dim=1)
    claim = verdicts(states, (2, 2))["weak contraction"]
    assert {part["holds"] for part in claim["parts"]} == {verdict == "holds"} and claim["verdict"] == verdict


def test_few_images_let_a_map_explain_anything():
    states = torch.randn(8, 13, 1, 64).cumsum(1)
    claim = verdicts(states, (6, 6), {"patch": slice(0, None)})["weak contraction"]
    assert claim["verdict"] == "not measured" and "8 images are too few for so many modes" in claim["measured"]


def test_what_does_not_move_is_not_measured():
    still = torch.randn(4, 1, 5, 16).expand(-1, 9, -1, -1)
    claims = verdicts(still)
    assert claims["late cls reorientation"]["verdict"] == claims["patch coherence"]["verdict"] == "not measured"
    assert "hardly turn" in claims["late cls reorientation"]["measured"]


def test_patches_that_turn_as_sharply_leave_the_reorientation_in_part():
    states = late_states()
    states[:, :, 1:] = states[:, :, :1]
    assert verdicts(states)["late cls reorientation"]["verdict"] == "holds in part"


def entry(start, mean, high, eps=0.01, low=0.0):
    return {"start": start, "eps": eps, "total": {"mean": mean, "low": low, "high": high}}


def test_self_correction_needs_the_band_below_one_at_every_start():
    entries = [entry(0, 0.5, 0.6), entry(3, 0.9, 0.95), entry(3, 2.0, 2.1, eps=0.1)]
    states = late_states()
    claim = verdicts(states, self_correction={"patch": entries})["self-correction"]
    assert claim["verdict"] == "holds" and "for patch 0.50 (from layer 0), 0.90 (from layer 3)" in claim["measured"]
    entries[1] = entry(3, 0.99, 1.01)
    assert verdicts(states, self_correction={"patch": entries})["self-correction"]["verdict"] == "holds in part"


def test_self_correction_is_open_where_bands_include_one_or_are_not_known():
    states = late_states()

    def claim(*entries):
        return verdicts(states, self_correction={"patch": list(entries)})["self-correction"]

    undecided = claim(entry(0, 0.9, 1.2, low=0.7))
    assert undecided["verdict"] == "undecided" and "1 of the 1 bands include 1" in undecided["measured"]
    assert undecided["parts"][0]["threshold"].endswith("which is 0.70 to 1.20")
    assert claim(entry(0, 1.5, 1.8, low=1.2))["verdict"] == "does not hold"
    single = claim(entry(0, 0.5, None, low=None))
    assert single["verdict"] == "not measured" and "no confidence interval" in single["measured"]


def test_jumps_are_at_the_cuts_or_elsewhere():
    turns = torch.tensor([0, 0.1, 0.1, 0.1, 0.5, 0.5, 0.5, 0.5, 0.1, 0.1, 0.1, 0.1]).cumsum(0)
    circle = torch.stack([turns.cos(), turns.sin()], dim=-1).view(1, 12, 1, 2).expand(3, 12, 4, 2)
    claim = verdicts(circle, (3, 4, 4))["jumps at phase boundaries"]
    assert claim["verdict"] == "holds" and claim["parts"][0]["value"] == pytest.approx(1 / 45)
    assert verdicts(circle, (2, 4, 5))["jumps at phase boundaries"]["verdict"] == "does not hold"
    assert verdicts(circle, (11,))["jumps at phase boundaries"]["verdict"] == "not measured"
    few = verdicts(circle[:, :5], (2, 2))["jumps at phase boundaries"]
    assert few["verdict"] == "not measured" and "no p value below 0.33" in few["measured"]


def test_basins_need_labels_and_tell_classes_apart():
    labels = torch.arange(24) % 3
    states = late_states(images=24)
    assert verdicts(states, labels=labels)["class-dependent basins"]["verdict"] != "not measured"
    assert verdicts(states)["class-dependent basins"]["measured"] == "There were no labels."
    one = verdicts(states, labels=[3] * 24)["class-dependent basins"]
    assert (one["verdict"], one["measured"]) == ("not measured", "The images are of one class only.")
    states[:, -1, 0] = torch.eye(48)[labels] + 0.1 * torch.randn(24, 48)
    few = verdicts(states[:23], labels=labels[:23])["class-dependent basins"]
    assert few["verdict"] == "undecided" and "Of 23 images chance alone" in few["measured"]
    claim = verdicts(states, labels=labels)["class-dependent basins"]
    assert claim["verdict"] == "holds" and "between the 3 classes" in claim["measured"]


def test_models_without_a_cls_token_or_with_a_single_patch():
    states = late_states()[:, :, 1:]
    claims = verdicts(states, slices={"patch": slice(0, None)})
    assert claims["late cls reorientation"]["verdict"] == "not measured"
    assert claims["patch coherence"]["verdict"] == "holds"
    single = verdicts(states[:, :, :1], slices={"patch": slice(0, None)})
    assert single["patch coherence"]["verdict"] == "not measured"


def test_of_a_single_phase_thirds_are_compared():
    early, late, *names = early_and_late({"phase_sizes": [9]})
    assert (early, late, names) == (slice(0, 3), slice(6, 9), ["first third", "last third"])


@pytest.mark.parametrize("phase_sizes, depth", [((1,), 1), ((2,), 2), ((4, 4), 8)])
def test_states_that_are_zero_and_models_of_one_layer_are_not_measured(phase_sizes, depth):
    zero = verdicts(torch.zeros(3, depth + 1, 5, 8), phase_sizes)
    assert {claim["verdict"] for claim in zero.values()} == {"not measured"}
    for claim in (*zero.values(), *verdicts(torch.randn(3, depth + 1, 5, 8), phase_sizes).values()):
        assert claim["measured"] and not re.search(r"for \.|nan", claim["measured"]), claim
        assert depth > 1 or claim["verdict"] in ("not measured", "does not hold"), claim


def test_what_hardly_changes_is_not_said_to_rise_or_fall():
    states = late_states()
    states[:, :, 1:] = torch.randn(12, 9, 9, 48).cumsum(1)
    assert "hardly changes, " in verdicts(states)["low-rank late updates"]["measured"]
