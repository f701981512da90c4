"""How accuracy grows with the number of blocks (arXiv 2512.19941, Figure 7)."""

from dataclasses import dataclass, field

from ..summary import table
from ..teachers import load_teacher
from .experiment import ControlArguments, Experiment
from .plots import plot_scaling as plot  # noqa: F401


@dataclass
class Arguments(ControlArguments):
    num_blocks: list[int] | None = field(
        default=None,
        metadata={"help": "Numbers of blocks. Default: 1, 2, 3, 4 and as many as the teacher has layers."},
    )

    def __post_init__(self):
        if self.num_blocks is not None and min(self.num_blocks, default=0) < 1:
            raise ValueError(f"num_blocks must be one or more numbers of at least 1, got {self.num_blocks}.")


def measure(experiment: Experiment) -> dict:
    """
    Distils a Raptor for each number of blocks, its phases found from the teacher's layer similarity.

    Returns:
        `members`: number of blocks to the measures. `teacher`: its `accuracy` (or None) and `parameters`.

    Raises:
        ValueError: if phases are given, or there are more blocks than layers.
    """
    model = experiment.model
    if model.phase_sizes is not None or model.block_assignment is not None or model.num_phases is not None:
        raise ValueError("phase_sizes, num_phases and block_assignment are what this control varies: leave them out.")
    layers = experiment.num_layers
    counts = sorted(set(experiment.own.num_blocks or [min(count, layers) for count in (1, 2, 3, 4, layers)]))
    judge = experiment.judge
    runs = experiment.series({f"k{count}": {"phase_sizes": experiment.phases(count)} for count in counts})
    teacher = {
        "accuracy": judge.teacher_accuracy(),
        "parameters": load_teacher(experiment.teacher).num_parameters(),
    }
    members = {str(count): judge.measure(run) for count, run in zip(counts, runs.values())}
    return {"members": members, "teacher": teacher}


def summary(results: dict) -> str:
    teacher = results["teacher"]
    rows = []
    for count, found in results["members"].items():
        accuracy = share = ""
        if found["accuracy"] is not None:
            accuracy, share = f"{found['accuracy']:.2%}", f"{found['accuracy'] / teacher['accuracy']:.1%}"
        sizes = " ".join(map(str, found["phase_sizes"]))
        rows.append([count, sizes, f"{found['parameters']:,}", accuracy, share, f"{found['final_cosine']:.4f}"])
    accuracy = "" if teacher["accuracy"] is None else f"{teacher['accuracy']:.2%}"
    rows.append(["teacher", "", f"{teacher['parameters']:,}", accuracy, "", ""])
    return table(["blocks", "phases", "parameters", "accuracy", "of teacher", "cosine at the last layer"], rows)
