"""What each part of the method is worth: one change at a time from a base run (arXiv 2512.19941, Table 2)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ..files import read_json, write_json
from ..summary import table
from .experiment import ControlArguments, Experiment
from .plots import plot_ablations as plot  # noqa: F401
from .starts import best_layers, mean_of_layers

STEPS_NAME = "steps.json"
PAPER_WEIGHTS = {"last_phase_weights": [0.34, 0.33, 0.33], "stage2_weights": [0.45, 0.1, 0.45]}
PLAIN_WEIGHTS = {"stage1_weights": None, "last_phase_weights": None, "stage2_weights": None}
RANDOM_BLOCKS = {"init": "random", "source_layers": None}
SWIGLU_4D = RANDOM_BLOCKS | {"hidden_act": "swiglu", "intermediate_size": (4, 1)}
# As configs/paper_k3.yaml, but for batch size and steps, and for the LayerScales, which start where the base run's do.
AUTHORS = SWIGLU_4D | PLAIN_WEIGHTS | PAPER_WEIGHTS | {"layer_norm_eps": 1e-5, "crop": "center"}
AUTHORS |= {"learning_rate": 3e-4, "adam_beta2": 0.999, "weight_decay": 1e-4, "max_grad_norm": 1.0}
AUTHORS |= {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}}
AUTHORS |= {"muon": False, "normalize_loss": False, "training_mode": "two_stage", "stage1_ratio": 0.5}
AUTHORS |= {"teacher_forcing_ratio": 0.25, "restart_schedule": True, "early_image_size": None}
# Name: what it is of, and the arguments it sets, or a function that tells them of an experiment. MLPs other than the
# teacher's need blocks that start at random.
CHANGES = {
    "teacher_forcing_only": ("loss mode", {"training_mode": "teacher_forcing"}),
    "autoregressive_only": ("loss mode", {"training_mode": "autoregressive"}),
    "output_only": ("loss mode", {"training_mode": "output_only"}),
    "no_stage2": ("stages", {"training_mode": "two_stage", "stage1_ratio": 1.0}),
    "no_stage1": ("stages", {"training_mode": "two_stage", "stage1_ratio": 0.0}),
    "half_in_stage1": ("stages", {"training_mode": "two_stage", "stage1_ratio": 0.5}),
    "no_depth_scaling": ("depth scaling", {"depth_scaling": False}),
    "plain_token_weights": ("token weights", PLAIN_WEIGHTS),
    "paper_token_weights": ("token weights", PAPER_WEIGHTS),
    "loss_not_normalized": ("loss", {"normalize_loss": False}),
    "cosine_added": ("loss", {"cosine_weight": 1.0}),
    "half_learning_rate": ("learning rate", lambda experiment: {"learning_rate": experiment.run.learning_rate / 2}),
    "double_learning_rate": ("learning rate", lambda experiment: {"learning_rate": experiment.run.learning_rate * 2}),
    "adamw": ("optimizer", {"muon": False}),
    "blocks_from_teacher": ("block start", {"init": "teacher", "hidden_act": None, "intermediate_size": None}),
    "blocks_from_best_layer": ("block start", best_layers),
    "blocks_from_mean": ("block start", mean_of_layers),
    "random_blocks_gelu": ("block start", RANDOM_BLOCKS | {"hidden_act": "gelu", "intermediate_size": (4, 1)}),
    "random_blocks_swiglu_4d": ("MLP", SWIGLU_4D),
    "random_blocks_swiglu_8_3d": ("MLP", RANDOM_BLOCKS | {"hidden_act": "swiglu", "intermediate_size": (8, 3)}),
    "authors": ("everything", AUTHORS),
}
# What a change of the MLP is compared with: blocks that also start at random.
REFERENCES = {"random_blocks_swiglu_4d": "random_blocks_gelu", "random_blocks_swiglu_8_3d": "random_blocks_gelu"}


@dataclass
class Arguments(ControlArguments):
    ablations: list[str] = field(
        default_factory=lambda: list(CHANGES), metadata={"help": f"Which ones, of {', '.join(CHANGES)}."}
    )
    seconds: float | None = field(
        default=None,
        metadata={
            "help": "Train each run for so many seconds, by the time that a few of its steps take here, in place of "
            "--max_steps. Keep the machine free of other work."
        },
    )

    def __post_init__(self):
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds must be a positive number, got {self.seconds}.")
        unknown = [name for name in self.ablations if name not in CHANGES]
        if unknown:
            raise ValueError(f"unknown ablation {unknown[0]}: choose of {', '.join(CHANGES)}.")


def measure(experiment: Experiment) -> dict:
    """
    Distils the base run and one Raptor for each change.

    Returns:
        `members`: name to `of` (what was changed), `changes`, `reference` (what it is compared with), `same_as_base`
        (then it was not trained again) and the measures, also as differences from the reference.
    """
    judge = experiment.judge
    if experiment.model.phases_to_find:
        # One change at a time: all have the same phases.
        sizes = experiment.phases(experiment.model.phases_to_find)
        experiment = experiment.changed(num_phases=None, phase_sizes=sizes)
    wanted = list(experiment.own.ablations)
    wanted += [REFERENCES[name] for name in wanted if name in REFERENCES and REFERENCES[name] not in wanted]
    members = {"base": {}}
    same = []
    for name in wanted:
        changes = resolve(CHANGES[name][1], experiment)
        if is_base(experiment, changes):
            same.append(name)
        else:
            members[name] = changes
    if experiment.own.seconds is not None:
        members = in_equal_time(experiment, members)
    runs = experiment.series(members)
    measured = {name: judge.measure(run) for name, run in runs.items()} | dict.fromkeys(same)
    results = {}
    for name in ("base", *wanted):
        reference = REFERENCES.get(name, "base") if name != "base" else None
        found = measured[name] or measured["base"]
        results[name] = {
            "of": CHANGES[name][0] if name != "base" else None,
            "changes": members.get(name, {}),
            "reference": reference,
            "same_as_base": name in same,
        } | found
        if reference is not None:
            compared = measured[reference] or measured["base"]
            for metric in ("accuracy", "final_cosine"):
                if found[metric] is not None:
                    results[name][f"{metric}_difference"] = found[metric] - compared[metric]
    return {"members": results, "teacher_accuracy": judge.teacher_accuracy()}


def resolve(changes: dict | Callable[[Experiment], dict], experiment: Experiment) -> dict:
    """In numbers. An inner width may be given as a fraction of the hidden size: it becomes a multiple of 8."""
    changes = changes(experiment) if callable(changes) else changes
    size = changes.get("intermediate_size")
    if size is None:
        return dict(changes)
    width = experiment.teacher_config.hidden_size
    return changes | {"intermediate_size": (round(width * size[0] / size[1]) + 7) // 8 * 8}


def in_equal_time(experiment: Experiment, members: dict[str, dict]) -> dict[str, dict]:
    """The members with each its number of steps; measured once, then kept, as they decide what the runs are."""
    path, seconds = experiment.output_dir / STEPS_NAME, experiment.own.seconds
    with experiment.run.main_process_first(local=False):
        goes_on = path.is_file() and not experiment.run.overwrite_output_dir
        kept = read_json(path) if goes_on else {"seconds": seconds, "steps": {}}
        if kept["seconds"] != seconds:
            raise ValueError(f"{path} is of {kept['seconds']} seconds, not {seconds}: give another --output_dir.")
        for name, changes in members.items():
            if name not in kept["steps"]:
                kept["steps"][name] = experiment.changed(**changes).steps_in(seconds)
        if experiment.run.process_index == 0:
            write_json(path, kept)
    return {name: changes | {"max_steps": kept["steps"][name]} for name, changes in members.items()}


def is_base(experiment: Experiment, changes: dict) -> bool:
    """Whether the base run has all of these arguments already."""
    base = vars(experiment.model) | vars(experiment.data) | vars(experiment.run)
    return all(base[name] == value for name, value in changes.items())


def summary(results: dict) -> str:
    rows = []
    for name, found in results["members"].items():
        row = [name.replace("_", " "), found["of"] or ""]
        for metric in ("accuracy", "final_cosine"):
            if found[metric] is None:
                row.append("")
                continue
            row.append(f"{found[metric]:.4f}")
            if f"{metric}_difference" in found:
                row[-1] += f" ({found[f'{metric}_difference']:+.4f})"
        row += [f"{found['parameters']:,}", (found["reference"] or "").replace("_", " ")]
        rows.append(row)
    header = ["run", "change of", "accuracy", "cosine at the last layer", "parameters", "compared with"]
    return table(header, rows)
