"""
Makes a Hub repository of a finished distillation: fp16 weights, and a card of what was measured on them.

Measures the Raptor and its teacher, by the scripts in eval/, on photos, fashion_mnist, stamps and foreground. What was
measured is not measured again, so an interrupted run goes on.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import EvalResult
from transformers import AutoImageProcessor
from transformers.utils import SAFE_WEIGHTS_NAME

from raptor_hf import RaptorModel
from raptor_hf.files import read_json, write_json
from raptor_hf.hub import save_with_card
from raptor_hf.model_card import Comparison
from raptor_hf.parser import ConfigArgumentParser

EVAL, BENCHMARKS, RECIPES = (Path(__file__).parents[1] / name for name in ("eval", "benchmarks", "training/configs"))
SIDES = {"teacher": "Dinov2Model", "raptor": "RaptorModel"}
IMAGE_SIZES = (112, 224)


@dataclass
class Task:
    """A probe of the Raptor and of its teacher: a script's flags, and how a card calls its figure."""

    script: str
    data: str
    flags: dict
    task: str
    dataset: str
    metric: tuple[str, ...]
    task_type: str = "image-classification"

    @property
    def name(self) -> str:
        return "_".join((self.data, self.script, *map(str, self.flags.values())))


FASHION, STAMPS = "Fashion-MNIST, 10,000 to 2,000 images", "180 cut-out pictures, 27 classes, 5 folds"
FOREGROUND = "foreground of pictures"
TASKS = [
    Task("linear_probe", "fashion_mnist", {"image_size": 112}, "linear probe", FASHION, ("accuracy",)),
    Task("knn", "fashion_mnist", {"image_size": 112}, "kNN, k = 20", FASHION, ("k=20", "accuracy")),
    Task("linear_probe", "stamps", {"image_size": 112, "folds": 5}, "linear probe", STAMPS, ("accuracy",)),
    Task("knn", "stamps", {"image_size": 112, "folds": 5}, "kNN, k = 10", STAMPS, ("k=10", "accuracy")),
]
for size in IMAGE_SIZES:
    flags = {"image_size": size, "test_split": "validation", "num_train_epochs": 30}
    of_size = f"linear head on patches, {size} pixels"
    TASKS.append(
        Task("segmentation", "foreground", flags, of_size, FOREGROUND, ("mean_iou",), "image-segmentation"),
    )


@dataclass
class Arguments:
    run: str = field(metadata={"help": "Output folder of training/distill.py."})
    teacher: str = field(metadata={"help": "The teacher: Hub name or folder."})
    data_dir: str = field(metadata={"help": "Folder that holds photos, fashion_mnist, stamps and foreground."})
    output_dir: str = field(metadata={"help": "The repository's folder."})
    teacher_name: str = field(default="facebook/dinov2-small", metadata={"help": "The teacher's name on the Hub."})
    recipes: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Files of training/configs that it was trained by, in order, each in quotes with the flags given "
            "beside it: 'cpu_dinov2_small.yaml --phase_sizes 7 5'."
        },
    )
    dataloader_num_workers: int = field(default=1, metadata={"help": "Processes that decode images."})


def measure(script: str, output_dir: Path, of: Path = EVAL, **flags) -> dict:
    """What a script wrote to its JSON file in a folder, now or before."""
    path = output_dir / f"{script}.json"
    if not path.is_file():
        words = []
        for name, value in flags.items():
            words += [f"--{name}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
        command = [sys.executable, str(of / f"{script}.py"), *words, "--output_dir", str(output_dir)]
        subprocess.run(command, check=True)
    return read_json(path)


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(Arguments, description=__doc__)
    (args,) = parser.parse(argv)
    unknown = [recipe for recipe in args.recipes if not (RECIPES / recipe.split(" ")[0]).is_file()]
    if unknown:
        parser.error(f"--recipes: there is no {unknown[0]} in {RECIPES}.")
    run, repository, data = Path(args.run), Path(args.output_dir), Path(args.data_dir)
    try:
        results = read_json(run / "results.json")
    except (OSError, ValueError) as error:
        parser.error(f"--run {run} holds no finished distillation ({error}).")
    model = RaptorModel.from_pretrained(run, dtype=torch.float16)
    processor = AutoImageProcessor.from_pretrained(run)
    # Measured is what is published: the rounded weights.
    save_with_card(model, processor, results, repository)

    measured, workers = run / "published", args.dataloader_num_workers
    models = {"raptor": repository, "teacher": args.teacher}
    comparisons = []
    for task in TASKS:
        values = {}
        for name, path in models.items():
            flags = {"model": path, "dataset": data / task.data, "dataloader_num_workers": workers} | task.flags
            value = measure(task.script, measured / task.name / name, **flags)["results"]
            for key in task.metric:
                value = value[key]
            values[name] = value
        comparisons.append(
            Comparison(task.task, task.dataset, task.metric[-1].replace("_", " "), task_type=task.task_type, **values)
        )
    both = {"model": repository, "teacher": args.teacher, "dataset": data / "photos"}
    fidelity, further = {}, []
    for size in IMAGE_SIZES:
        fidelity[size] = measure(
            "fidelity", measured / f"fidelity_{size}", **both, image_size=size, dataloader_num_workers=workers
        )["results"]["fidelity"]["closed_loop"]
    # What the run measured itself, at its own size, is measured again on the rounded weights.
    own_size = results["image_size"] if results["image_size"] in IMAGE_SIZES else IMAGE_SIZES[0]
    other_size = next(size for size in IMAGE_SIZES if size != own_size)
    for token, curves in fidelity[other_size].items():
        for name, value in (("last", curves["cosine"][-1]), ("lowest", min(curves["cosine"][1:]))):
            further.append(
                EvalResult(
                    task_type="image-feature-extraction",
                    dataset_type="photos",
                    dataset_name=f"photos, {other_size} pixels",
                    metric_type="cosine_similarity",
                    metric_name=f"{token}: cosine to the teacher, {name} layer",
                    metric_value=round(value, 4),
                )
            )
    speed = {"batch_sizes": [1, 32], "image_sizes": IMAGE_SIZES, "dtypes": ["float32"], "modes": ["eager"]}
    for row in measure("inference", measured / "speed", **speed, memory=False, of=BENCHMARKS)["results"]:
        pace = {name: row["batch_size"] / row["median"][side] for name, side in SIDES.items()}
        what = f"batch {row['batch_size']}, {row['image_size']} pixels, float32"
        comparisons.append(Comparison("speed", what, "images a second", task_type="image-feature-extraction", **pace))
    shown = {"image_size": IMAGE_SIZES[0], "max_samples": 256, "report": True}
    dynamics = measure("dynamics", measured / "dynamics", **both, **shown)
    pictures = measured / "patch_components"
    measure("patch_components", pictures, model=repository, teacher=args.teacher, image_size=448)
    shutil.copyfile(pictures / "patch_components.png", repository / "patch_components.png")
    after = [stage for stage in results["fidelity"] if stage != "before"][-1]
    parameters = results["parameters"]
    facts = results | {
        "teacher": args.teacher_name,
        "float16_bytes": {
            "teacher": 2 * parameters["teacher"],
            "raptor": (repository / SAFE_WEIGHTS_NAME).stat().st_size,
        },
        "fidelity": {"before": results["fidelity"]["before"], after: fidelity[own_size]},
    }
    card = {
        "comparisons": comparisons,
        "eval_results": further,
        "fidelity_at": fidelity,
        "dynamics": dynamics["models"],
        "recipes": args.recipes,
        "picture": "patch_components.png",
    }
    save_with_card(model, processor, facts, repository, **card)
    rows = [{"share": one.raptor / one.teacher} | vars(one) for one in comparisons]
    summary = {"comparisons": rows, "fidelity": fidelity}
    write_json(measured / "summary.json", summary)
    print((repository / "README.md").read_text())


if __name__ == "__main__":
    main()
