import pytest

from raptor_hf.controls.partitions import compare, distinct
from raptor_hf.phases import random_phases, shuffled_assignment


def test_draws_are_distinct_and_not_the_best():
    drawn = distinct(lambda seed: random_phases(8, 3, 2, seed), 10, {(4, 2, 2)})
    # All ways to cut 8 layers in 3 parts of at least 2, but for the one that is taken.
    assert sorted(drawn) == [[2, 2, 4], [2, 3, 3], [2, 4, 2], [3, 2, 3], [3, 3, 2]]
    drawn = distinct(lambda seed: shuffled_assignment([2, 2, 2], seed), 7, set())
    assert len({tuple(assignment) for assignment in drawn}) == 7


def test_the_best_is_compared_with_each_group_of_baselines():
    def member(group, accuracy, cosine):
        return {"group": group, "accuracy": accuracy, "final_cosine": cosine}

    members = {
        "mean-0": member("mean", 0.8, 0.5),
        "mean-1": member("mean", 0.9, 0.7),
        **{f"random-{i}": member("random", 0.1 * i, 0.9) for i in range(10)},
        "shuffled-0": member("shuffled", 0.2, 0.1),
    }
    best = {objective: {"trained_as": "mean"} for objective in ("mean", "cut")}
    found = compare(members, best)["max_cut"]
    assert found["accuracy"]["cut"] == found["accuracy"]["mean"]
    assert found["accuracy"]["mean"]["mean"] == pytest.approx(0.85)
    against = found["accuracy"]["mean"]["random"]
    assert against["difference"] == pytest.approx(0.4)
    assert (against["better_than"], against["of"], against["p"]) == (9, 10, pytest.approx(2 / 11))
    assert found["final_cosine"]["mean"]["random"]["p"] == 1
    without_head = {name: member | {"accuracy": None} for name, member in members.items()}
    assert set(compare(without_head, best)["groups"]) == {"final_cosine"}
