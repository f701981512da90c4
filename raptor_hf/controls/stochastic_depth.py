"""Does stochastic depth make layers alike, and a Raptor fit better? (arXiv 2512.19941, Figure 4)"""

from dataclasses import dataclass, field
from pathlib import Path

from ..files import read_json
from ..phase_structure_callback import PHASE_STRUCTURE_NAME, mean_off_diagonal
from ..summary import table
from .experiment import ControlArguments, Experiment
from .plots import plot_stochastic_depth as plot  # noqa: F401
from .statistics import correlation


@dataclass
class Arguments(ControlArguments):
    rates: list[float] = field(
        default_factory=lambda: [0.0, 0.2, 0.4, 0.6], metadata={"help": "Stochastic depth rates of the teachers."}
    )
    teacher_seeds: list[int] = field(
        default_factory=lambda: [42], metadata={"help": "Train a teacher of each rate with each of these seeds."}
    )

    def __post_init__(self):
        if not self.rates or not all(0 <= rate < 1 for rate in self.rates):
            raise ValueError(f"rates must be one or more probabilities below 1, got {self.rates}.")
        if not self.teacher_seeds:
            raise ValueError("teacher_seeds must be one or more seeds.")


def measure(experiment: Experiment) -> dict:
    """
    Trains a teacher by the recipe for each rate and seed, and distils a Raptor of each. What is there is found again.

    Returns:
        `members`: name to `rate`, `seed`, `teacher_accuracy`, `similarity` (L, L), `mean_similarity` of two different
        layers, `during_training` (what [`PhaseStructureCallback`] logged, if the recipe asks for it) and the
        Raptor's measures. `correlation`: of `mean_similarity` and the Raptor's `r2`, with a 95 % interval.

    Raises:
        ValueError: if there is no recipe.
    """
    own = experiment.own
    if own.teacher_recipe is None:
        raise ValueError("the teachers are trained by --teacher_recipe FILE.yaml: give one.")
    members = {}
    for seed in own.teacher_seeds:
        for rate in own.rates:
            name = f"rate-{rate:g}-seed-{seed}"
            folder = experiment.output_dir / "teachers" / name
            experiment.train_teacher(folder, drop_path_rate=rate, seed=seed)
            members[name] = {"rate": rate, "seed": seed, "folder": folder}
    results = {}
    for name, member in members.items():
        output_dir = experiment.output_dir / name
        one = experiment.changed(teacher=str(member["folder"]), teacher_recipe=None, output_dir=str(output_dir))
        similarity = one.similarity()
        found = one.judge.measure(one.series({"raptor": {}})["raptor"])
        results[name] = {
            "rate": member["rate"],
            "seed": member["seed"],
            "teacher_accuracy": one.judge.teacher_accuracy(),
            "mean_similarity": mean_off_diagonal(similarity),
            "similarity": similarity.tolist(),
            "during_training": _during_training(member["folder"]),
        } | found
    found = results.values()
    return {
        "members": results,
        "correlation": correlation([m["mean_similarity"] for m in found], [m["r2"] for m in found]),
    }


def _during_training(folder: Path) -> list[dict]:
    path = folder / PHASE_STRUCTURE_NAME
    measured = read_json(path, list) if path.is_file() else []
    return [{name: value for name, value in entry.items() if name != "similarity"} for entry in measured]


def summary(results: dict) -> str:
    rows = [
        [
            f"{m['rate']:g}",
            str(m["seed"]),
            f"{m['mean_similarity']:.4f}",
            f"{m['r2']:.4f}",
            f"{m['final_cosine']:.4f}",
            f"{m['teacher_accuracy']:.2%}",
            f"{m['accuracy']:.2%}",
        ]
        for m in results["members"].values()
    ]
    header = ["rate", "seed", "layer similarity", "Raptor's R²", "cosine at the last layer", "teacher", "Raptor"]
    found = results["correlation"]
    line = f"Too few different points for a correlation: {found['n']}."
    if found["r"] is not None:
        line = (
            f"Correlation of similarity and R²: {found['r']:.3f}, 95 % interval {found['low']:.3f} to "
            f"{found['high']:.3f} (n = {found['n']}, p = {found['p']:.3f})"
        )
        if found["n"] < 10:
            line += f". With {found['n']} points the interval is wide, whatever the correlation is."
    return table(header, rows) + "\n" + line
