"""Depth as a dynamical system: every measure of a teacher, of a Raptor, or of both side by side, and what they say."""

import itertools
import json
import math
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from raptor_hf.cost import flops, parameters
from raptor_hf.dynamics import ModelDynamics
from raptor_hf.dynamics.report import claims_table, draw_figures, write_report
from raptor_hf.fidelity import LayerFidelity, epsilon_brh
from raptor_hf.files import write_json
from raptor_hf.images import (
    CenterCrop,
    PixelValues,
    count_bad_images,
    crop_size,
    draw_images,
    load_image_dataset,
    load_image_processor,
    split_names,
)
from raptor_hf.parser import ConfigArgumentParser, check_at_least_one
from raptor_hf.phases import check_partition, find_phases
from raptor_hf.probes.features import check_image_size
from raptor_hf.vision_models import load_vision_model, token_slices


@dataclass
class Arguments:
    model: list[str] = field(metadata={"help": "Raptor, teacher or other vision model, or several: names or folders."})
    dataset: str = field(metadata={"help": "Images: Hub name, folder, parquet file, or 'digits'."})
    teacher: str | None = field(default=None, metadata={"help": "Measured beside them: Hub name or folder."})
    split: str | None = field(
        default=None, metadata={"help": "Split; validation+train takes two. Default: validation, or the only one."}
    )
    image_column: str | None = field(default=None, metadata={"help": "Column of the images; found if there is one."})
    label_column: str | None = field(default=None, metadata={"help": "Column of classes, for angular basins."})
    image_size: int | None = field(
        default=None, metadata={"help": "Pixels, of all models. Default: the first Raptor's, or the first model's."}
    )
    max_samples: int = field(default=512, metadata={"help": "Images to use, drawn at random."})
    batch_size: int = field(default=32, metadata={"help": "Images a batch."})
    dataloader_num_workers: int = field(default=0, metadata={"help": "Processes that decode images."})
    phase_sizes: list[int] | None = field(
        default=None,
        metadata={"help": "Phases of models that aren't Raptors. Default: a Raptor's beside them, or found."},
    )
    num_phases: int = field(default=3, metadata={"help": "Phases to find where none are given."})
    num_modes: int = field(default=10, metadata={"help": "Leading modes of the dynamic mode decompositions."})
    epsilons: list[float] = field(
        default_factory=lambda: [0.01, 0.03, 0.1],
        metadata={"help": "Sizes of the pushes, relative to a token's length."},
    )
    start_layers: list[int] | None = field(
        default=None, metadata={"help": "Layers after which states are pushed, from 0. Default: four, evenly spread."}
    )
    perturbed_samples: int = field(default=32, metadata={"help": "Images whose states are pushed; 0 for none."})
    iterations: int | None = field(
        default=None,
        metadata={"help": "Applications of each block of a Raptor. Default: 4 times the longest phase, or 48."},
    )
    token_layout: list[str] | None = field(
        default=None, metadata={"help": "Token types in order, of a family that is not known: cls register=4 patch."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Whether code that comes with models may be run."}
    )
    seed: int = field(default=42, metadata={"help": "Seed of the choice of images and of the pushes."})
    report: bool = field(
        default=False, metadata={"help": "Whether to write report.html, a page that needs no other file."}
    )
    output_dir: str = field(default="outputs/dynamics", metadata={"help": "Where the results go."})

    def __post_init__(self):
        check_at_least_one(self, "max_samples", "batch_size", "num_modes", "iterations")
        if self.perturbed_samples < 0:
            raise ValueError(f"perturbed_samples must be at least 0, got {self.perturbed_samples}.")
        # Smaller pushes drown in rounding; much larger ones are no longer pushes.
        if not self.epsilons or not all(1e-4 <= eps <= 10 for eps in self.epsilons):
            raise ValueError(f"epsilons must be numbers from 1e-4 to 10, got {self.epsilons}.")


class Subject:
    """A model, what is measured of it, and how its images are made."""

    def __init__(self, args: Arguments, path: str):
        self.path = path
        self.model = load_vision_model(path, trust_remote_code=args.trust_remote_code, token_layout=args.token_layout)
        self.config = self.model.config
        self.set_image_size(args.image_size)
        self.dynamics = ModelDynamics(
            self.model.to("cuda" if torch.cuda.is_available() else "cpu"),
            epsilons=args.epsilons,
            starts=args.start_layers,
            num_perturbed=args.perturbed_samples,
            num_iterations=args.iterations,
            seed=args.seed,
        )
        self.phase_sizes, self.phases_from = args.phase_sizes, "as given"
        if self.is_raptor:
            runs = itertools.groupby(block for block, _ in self.config.schedule())
            self.phase_sizes, self.phases_from = [len(list(run)) for _, run in runs], "its own"
        elif self.phase_sizes is None:
            check_partition(self.config.num_hidden_layers, args.num_phases, 1)
        elif sum(self.phase_sizes) != self.config.num_hidden_layers or min(self.phase_sizes) < 1:
            raise ValueError(
                f"phase_sizes {self.phase_sizes} must be positive and sum to the "
                f"{self.config.num_hidden_layers} layers of {path}."
            )

    def set_image_size(self, image_size: int | None):
        self.processor = load_image_processor(self.path, image_size)
        check_image_size(self.config, crop_size(self.processor))
        self.pixels = json.dumps(self.processor.to_dict(), sort_keys=True, default=str)

    @property
    def is_raptor(self) -> bool:
        return self.config.model_type == "raptor"

    @property
    def shape(self) -> tuple:
        """What must be the same for states to be compared."""
        sizes = ("num_hidden_layers", "hidden_size", "patch_size")
        return self.pixels, str(token_slices(self.config)), *(getattr(self.config, name) for name in sizes)

    def find_phases(self, args: Arguments, others: list["Subject"]):
        """Where they aren't known: those of a Raptor of the same depth, or those of the layer similarity."""
        depth = self.config.num_hidden_layers
        raptors = [s for s in others if s.is_raptor and s.config.num_hidden_layers == depth]
        if self.phase_sizes is None and raptors:
            self.phase_sizes, self.phases_from = raptors[0].phase_sizes, "those of the Raptor"
        elif self.phase_sizes is None:
            min_size = 2 if 2 * args.num_phases <= depth else 1
            self.phase_sizes = find_phases(self.dynamics.dynamics.similarity, args.num_phases, min_size)
            self.phases_from = "found on its layer similarity"

    def results(self, args: Arguments, name: str) -> dict:
        image_size = crop_size(self.processor)
        return {
            "name": name,
            "family": self.config.model_type,
            "image_size": image_size,
            "parameters": parameters(self.model),
            "gflops_per_image": flops(self.model, image_size) / 1e9,
            "phases_from": self.phases_from,
        } | self.dynamics.compute(self.phase_sizes, args.num_modes)


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(Arguments, description=__doc__)
    (args,) = parser.parse(argv)
    try:
        args.split = args.split or default_split(args.dataset)
        dataset = load_image_dataset(args.dataset, args.split, image_column=args.image_column)
        dataset, bad_images = draw_images(dataset, args.max_samples, args.seed)
        labels = read_labels(dataset, args.label_column)
        paths = ([args.teacher] if args.teacher else []) + args.model
        subjects = [Subject(args, path) for path in paths]
        share_image_size(args, subjects)
        fidelities = pair_with_teachers(subjects)
        measure(args, subjects, dataset, labels, fidelities)
    except ValueError as error:
        parser.error(str(error))
    for subject in subjects:
        subject.find_phases(args, subjects)
    names = short_names(paths)
    models = [
        subject.results(args, name) | {"slug": slug} for subject, name, slug in zip(subjects, names, slugs(names))
    ]
    results = {
        "arguments": asdict(args),
        "bad_images": count_bad_images({args.split: bad_images}),
        "models": models,
        "comparisons": compare(fidelities, names),
    }
    output_dir = Path(args.output_dir)
    write_json(output_dir / "dynamics.json", finite(results))
    figures = draw_figures(models, output_dir)
    if args.report:
        write_report(output_dir / "report.html", results, figures)
    print(claims_table(models))
    for model in models:
        print(f"\n{model['name']}")
        for claim in model["claims"]:
            print(f"- {claim['name']}: {claim['verdict']}. {claim['measured']}")
    print(f"\nSaved to {output_dir}")


def measure(args: Arguments, subjects: list[Subject], dataset, labels: torch.Tensor | None, fidelities: dict):
    """Brings all images through all models, batch by batch."""
    loaders = {}
    for subject in subjects:
        # Once for all models that take the same pixels.
        if subject.pixels not in loaders:
            images = PixelValues(dataset, CenterCrop(subject.processor))
            loaders[subject.pixels] = DataLoader(images, args.batch_size, num_workers=args.dataloader_num_workers)
    parts = [None] * len(dataset) if labels is None else labels.split(args.batch_size)
    total = -(-len(dataset) // args.batch_size)
    for batches, part in tqdm(zip(zip(*loaders.values()), parts), desc="Dynamics", total=total):
        pixel_values = {key: batch["pixel_values"] for key, batch in zip(loaders, batches)}
        states = [subject.dynamics.update(pixel_values[subject.pixels], part) for subject in subjects]
        for (teacher, raptor), fidelity in fidelities.items():
            fidelity.update(states[raptor], states[teacher])


def default_split(dataset: str) -> str:
    names = split_names(dataset)
    if "validation" not in names and len(names) > 1:
        raise ValueError(f"Data set {dataset} has no split validation: --split must name one of {', '.join(names)}.")
    return "validation" if "validation" in names else names[0]


def share_image_size(args: Arguments, subjects: list[Subject]):
    """Where none is given, all models are measured at one size: the first Raptor's, or the first model's."""
    first = next((subject for subject in subjects if subject.is_raptor), subjects[0])
    args.image_size = crop_size(first.processor)
    for subject in subjects:
        if crop_size(subject.processor) != args.image_size:
            print(f"{subject.path} is measured at {args.image_size} pixels, the size of {first.path}.")
            subject.set_image_size(args.image_size)


def pair_with_teachers(subjects: list[Subject]) -> dict[tuple[int, int], LayerFidelity]:
    """By index, each Raptor with the first other model of its shape, and what is to be measured between them."""
    pairs = {}
    for raptor, subject in enumerate(subjects):
        same = (i for i, other in enumerate(subjects) if not other.is_raptor and other.shape == subject.shape)
        teacher = next(same, None) if subject.is_raptor else None
        if teacher is not None:
            pairs[teacher, raptor] = LayerFidelity(token_slices(subject.config) | {"all": slice(None)})
    return pairs


def read_labels(dataset, column: str | None) -> torch.Tensor | None:
    """Classes as numbers from 0, (images,)."""
    if column is None:
        return None
    if column not in dataset.column_names:
        names = ", ".join(dataset.column_names)
        raise ValueError(f"The data set has no column {column}: --label_column must be one of {names}.")
    if not isinstance(dataset.features[column], (datasets.Value, datasets.ClassLabel)):
        raise ValueError(f"Column {column} holds no classes: --label_column must have one number or word an image.")
    labels = dataset[column][:]
    # NaN is not even itself.
    if missing := sum(label is None or label != label for label in labels):
        raise ValueError(
            f"Column {column} lacks {missing} of {len(labels)} labels: fill them, or leave out --label_column."
        )
    return torch.from_numpy(np.unique(np.asarray(labels), return_inverse=True)[1])


def short_names(paths: list[str]) -> list[str]:
    """The last part of each path, with a number where two are the same."""
    names = [Path(path).name or path for path in paths]
    counts = Counter(names)
    return [f"{name} ({i})" if counts[name] > 1 else name for i, name in enumerate(names, start=1)]


def slugs(names: list[str]) -> list[str]:
    """What the models' files begin with: the names' letters and digits, with a number where two are the same."""
    found = []
    for name in names:
        base = re.sub(r"\W+", "_", name)
        tries = itertools.chain([base], (f"{base}_{i}" for i in itertools.count(2)))
        found.append(next(slug for slug in tries if slug not in found))
    return found


def compare(fidelities: dict[tuple[int, int], LayerFidelity], names: list[str]) -> list[dict]:
    """How far each Raptor strays from its teacher, for each token type and for all tokens alike."""
    return [
        {
            "target": names[teacher],
            "model": names[raptor],
            "epsilon": {name: epsilon_brh(curves["relative_error"]) for name, curves in fidelity.compute().items()},
        }
        for (teacher, raptor), fidelity in fidelities.items()
    ]


def finite(value):
    """None for infinities and NaN, which JSON doesn't know."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
