"""
Makes a Hub repository of a finished distillation: fp16 weights, and a card of what was measured on them.

Measures the Raptor and its teacher, by the scripts in eval/ and benchmarks/, on photos, fashion_mnist, stamps and
foreground. What was measured of the same weights is not measured again, so an interrupted run goes on.
"""

import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import AutoImageProcessor
from transformers.utils import SAFE_WEIGHTS_NAME

from raptor_hf import RaptorModel
from raptor_hf.files import read_json, weights_sha256, write_json
from raptor_hf.hub import save_with_card
from raptor_hf.model_card import Comparison
from raptor_hf.parser import ConfigArgumentParser
from raptor_hf.teachers import load_teacher

EVAL, BENCHMARKS, RECIPES = (Path(__file__).parents[1] / name for name in ("eval", "benchmarks", "training/configs"))
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
    teacher_name: str = field(metadata={"help": "The teacher's name on the Hub, which the card links to."})
    recipes: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Files of training/configs that it was trained by, in order, each in quotes with the flags given "
            "beside it: 'cpu_dinov2_small.yaml --phase_sizes 7 5'."
        },
    )
    dataloader_num_workers: int = field(default=1, metadata={"help": "Processes that decode images."})


def measure(script: str, output_dir: Path, of: Path = EVAL, **flags) -> dict:
    """What a script wrote to its JSON file in a folder, which is there once the script is done; now or before."""
    if not output_dir.is_dir():
        words = []
        for name, value in flags.items():
            words += [f"--{name}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
        unfinished = output_dir.with_name(output_dir.name + ".unfinished")
        command = [sys.executable, str(of / f"{script}.py"), *words, "--output_dir", str(unfinished)]
        subprocess.run(command, check=True)
        unfinished.rename(output_dir)
    return read_json(output_dir / f"{script}.json")


def compare(task: Task, models: dict[str, str | Path], folders: dict[str, Path], args: Arguments) -> Comparison:
    """A task's figure of both models, each measured into its own folder."""
    values, errors = {}, []
    for name, model in models.items():
        flags = {"model": model, "dataset": Path(args.data_dir) / task.data, **task.flags}
        flags["dataloader_num_workers"] = args.dataloader_num_workers
        measured = measure(task.script, folders[name] / task.name, **flags)["results"]
        for key in task.metric[:-1]:
            measured = measured[key]
        values[name] = measured[task.metric[-1]]
        errors.append(measured.get("standard_error"))
    return Comparison(
        task.task,
        task.dataset,
        task.metric[-1].replace("_", " "),
        task_type=task.task_type,
        errors=None if None in errors else tuple(errors),
        **values,
    )


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(Arguments, description=__doc__)
    (args,) = parser.parse(argv)
    unknown = [recipe for recipe in args.recipes if not (RECIPES / recipe.split(" ")[0]).is_file()]
    if unknown:
        parser.error(f"--recipes: there is no {unknown[0]} in {RECIPES}.")
    run, repository, photos = Path(args.run), Path(args.output_dir), Path(args.data_dir) / "photos"
    try:
        results = read_json(run / "results.json")
        teacher_sha256 = weights_sha256(load_teacher(args.teacher))
        noted = read_json(run / "arguments.json").get("weights_sha256", {})
        if noted.get("teacher", teacher_sha256) != teacher_sha256:
            raise ValueError(f"--teacher {args.teacher} isn't the one that {run} was distilled from.")
    except OSError as error:
        parser.error(f"--run {run} holds no finished distillation ({error}).")
    except ValueError as error:
        parser.error(str(error))
    model = RaptorModel.from_pretrained(run, dtype=torch.float16)
    processor = AutoImageProcessor.from_pretrained(run)
    # Measured is what is published: the rounded weights.
    save_with_card(model, processor, results, repository)

    models = {"teacher": args.teacher, "raptor": repository}
    checksums = {"teacher": teacher_sha256, "raptor": weights_sha256(model)}
    folders = {name: run / "published" / f"{name}-{checksum[:12]}" for name, checksum in checksums.items()}
    comparisons = [compare(task, models, folders, args) for task in TASKS]
    measured, both = folders["raptor"], {"model": repository, "teacher": args.teacher}
    on_photos = both | {"dataset": photos, "dataloader_num_workers": args.dataloader_num_workers}
    fidelity = {}
    for size in sorted({*IMAGE_SIZES, results["image_size"]}):
        at_size = measure("fidelity", measured / f"fidelity_{size}", **on_photos, image_size=size)["results"]
        fidelity[size] = at_size["fidelity"]["closed_loop"]
    speed = {"batch_sizes": [1, 32], "image_sizes": IMAGE_SIZES, "dtypes": ["float32"], "modes": ["eager"]}
    speed = measure("inference", measured / "speed", **both, **speed, memory=False, of=BENCHMARKS)
    shown = {"image_size": IMAGE_SIZES[0], "max_samples": 256, "report": True}
    dynamics = measure("dynamics", measured / "dynamics", **on_photos, **shown)
    pictures = measured / "patch_components"
    measure("patch_components", pictures, **both, image_size=448)
    shutil.copyfile(pictures / "patch_components.png", repository / "patch_components.png")
    parameters = results["parameters"]
    facts = results | {
        "teacher": args.teacher_name,
        "arguments": results["arguments"] | {"validation_dataset": str(photos)},
        "float16_bytes": {
            "teacher": 2 * parameters["teacher"],
            "raptor": (repository / SAFE_WEIGHTS_NAME).stat().st_size,
        },
    }
    card = {
        "comparisons": comparisons,
        "fidelity_at": fidelity,
        "speed": speed,
        "dynamics": dynamics["models"],
        "recipes": args.recipes,
        "picture": "patch_components.png",
    }
    save_with_card(model, processor, facts, repository, **card)
    rows = [{"share": one.raptor / one.teacher} | asdict(one) for one in comparisons]
    write_json(measured / "summary.json", {"comparisons": rows, "fidelity": fidelity})
    print((repository / "README.md").read_text())


if __name__ == "__main__":
    main()
