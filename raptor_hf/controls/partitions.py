"""Are the phases that the layer similarity suggests better than others? (arXiv 2512.19941, Figure 3)"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..distillation.run import MIN_PHASE_SIZE
from ..parser import check_at_least_one
from ..phases import OBJECTIVES, random_phases, shuffled_assignment
from ..summary import table
from .experiment import ControlArguments, Experiment
from .plots import plot_partitions as plot  # noqa: F401
from .statistics import describe, permutation_p_value

METRICS = {"accuracy": "accuracy of the teacher's head", "final_cosine": "cosine at the last layer"}
GROUPS = ("random", "shuffled")


@dataclass
class Arguments(ControlArguments):
    num_random: int = field(default=10, metadata={"help": "Random contiguous partitions."})
    num_shuffled: int = field(default=10, metadata={"help": "Random assignments that are not contiguous."})
    num_seeds: int = field(
        default=1, metadata={"help": "Train the max-cut partitions with so many seeds, to see training's own noise."}
    )

    def __post_init__(self):
        check_at_least_one(self, "num_random", "num_shuffled", "num_seeds")


def measure(experiment: Experiment) -> dict:
    """
    Distils one Raptor for each partition with the same arguments: the best by both objectives of [`find_phases`],
    random contiguous ones with phases of at least 2 layers, and shuffled assignments with the sizes of the best.

    Returns:
        `members`: name to its group, assignment and measures. `groups`: for each metric and group its spread.
        `max_cut`: for each metric and objective the mean over seeds, and against each group of baselines its
        difference from their mean and a permutation p value, one-sided.

    Raises:
        ValueError: if phases are given, which are this control's own to choose.
    """
    model, own, seed = experiment.model, experiment.own, experiment.run.seed
    if model.phase_sizes is not None or model.block_assignment is not None:
        raise ValueError("phase_sizes and block_assignment are what this control varies: give --num_phases alone.")
    judge, num_layers, k = experiment.judge, experiment.num_layers, model.num_phases or 3
    best = {objective: experiment.phases(k, objective) for objective in OBJECTIVES}

    members, groups = {}, {}
    objective_of = {tuple(sizes): objective for objective, sizes in reversed(best.items())}
    for sizes, objective in objective_of.items():
        for i in range(own.num_seeds):
            members[f"{objective}-{i}"] = {"num_phases": None, "phase_sizes": list(sizes), "seed": seed + i}
            groups[f"{objective}-{i}"] = objective
    taken = set(objective_of)
    draws = {
        "random": (lambda s: random_phases(num_layers, k, MIN_PHASE_SIZE, s), "phase_sizes", own.num_random),
        "shuffled": (lambda s: shuffled_assignment(best["mean"], s), "block_assignment", own.num_shuffled),
    }
    for group, (draw, name, count) in draws.items():
        for i, drawn in enumerate(distinct(draw, count, taken if group == "random" else set())):
            members[f"{group}-{i}"] = {"num_phases": None, name: drawn}
            groups[f"{group}-{i}"] = group
    runs = experiment.series(members)

    measured = {}
    for name, run in runs.items():
        assignment = members[name].get("block_assignment")
        assignment = assignment or [b for b, size in enumerate(run["phase_sizes"]) for _ in range(size)]
        measured[name] = {"group": groups[name], "block_assignment": assignment} | judge.measure(run)
    best = {o: {"phase_sizes": sizes, "trained_as": objective_of[tuple(sizes)]} for o, sizes in best.items()}
    results = {"best": best, "members": measured, "teacher_accuracy": judge.teacher_accuracy()}
    return results | compare(measured, best)


def distinct(draw: Callable[[int], list[int]], count: int, taken: set[tuple[int, ...]]) -> list[list[int]]:
    """Up to `count` different draws that aren't taken; fewer where there seem to be no more."""
    found, taken = [], set(taken)
    for seed in range(100 * count):
        drawn = draw(seed)
        if len(found) < count and tuple(drawn) not in taken:
            taken.add(tuple(drawn))
            found.append(drawn)
    return found


def compare(members: dict[str, dict], best: dict[str, dict]) -> dict:
    """`groups` and `max_cut` of [`measure`]."""
    groups, max_cut = {}, {}
    for metric in METRICS:
        values = {}
        for member in members.values():
            if member[metric] is not None:
                values.setdefault(member["group"], []).append(member[metric])
        if not values:
            continue
        groups[metric] = {group: describe(found) for group, found in values.items()}
        max_cut[metric] = {}
        for objective, found in best.items():
            mean = float(np.mean(values[found["trained_as"]]))
            max_cut[metric][objective] = {"mean": mean}
            for group in GROUPS:
                null = values.get(group, [])
                if null:
                    max_cut[metric][objective][group] = {
                        "difference": mean - float(np.mean(null)),
                        "better_than": int(np.count_nonzero(np.array(null) < mean)),
                        "of": len(null),
                        "p": permutation_p_value(mean, null),
                    }
    return {"groups": groups, "max_cut": max_cut}


def summary(results: dict) -> str:
    rows = []
    for metric, groups in results["groups"].items():
        for group, found in groups.items():
            std = "" if found["std"] is None else f" ± {found['std']:.4f}"
            spread = f"{found['min']:.4f} to {found['max']:.4f}"
            rows.append([METRICS[metric], group, str(found["n"]), f"{found['mean']:.4f}{std}", spread])
    lines = [table(["metric", "partitions", "n", "mean ± std", "range"], rows)]
    for metric, objectives in results["max_cut"].items():
        for objective, found in objectives.items():
            sizes = " ".join(map(str, results["best"][objective]["phase_sizes"]))
            against = "; ".join(
                f"above {found[g]['better_than']} of {found[g]['of']} {g} (p = {found[g]['p']:.3f})"
                for g in GROUPS
                if g in found
            )
            lines.append(f"{METRICS[metric]}, best by {objective} ({sizes}): {found['mean']:.4f}, {against}")
    return "\n".join(lines)
