"""Finds the phases of a Vision Transformer: writes its layer similarity and phase sizes as JSON, and the figures."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from raptor_hf.digits import digits_teacher
from raptor_hf.files import check_writable, write_json
from raptor_hf.images import (
    CenterCrop,
    PixelValues,
    count_bad_images,
    crop_size,
    draw_images,
    load_image_dataset,
    load_image_processor,
)
from raptor_hf.parser import ConfigArgumentParser, check_at_least_one
from raptor_hf.phases import OBJECTIVES, check_partition, find_phases, layer_similarity, partition_objective
from raptor_hf.plots import plot_similarity, save_figure
from raptor_hf.probes.features import check_image_size
from raptor_hf.vision_models import load_vision_model, read_config


@dataclass
class PhaseArguments:
    teacher: str = field(
        default="digits",
        metadata={
            "help": "Hub name or folder of a Raptor or of a DINOv2, DINOv3, ViT, DeiT, MAE, BEiT, I-JEPA, CLIP or "
            "SigLIP model, or 'digits'."
        },
    )
    token_layout: list[str] | None = field(
        default=None,
        metadata={"help": "Of a model of another family, its token types in order, such as: cls register=4 patch."},
    )
    dataset: str = field(default="digits", metadata={"help": "Images: Hub name, folder, parquet file, or 'digits'."})
    split: str = field(default="train", metadata={"help": "Split of the data set."})
    image_column: str | None = field(default=None, metadata={"help": "Column of the images; found if there is one."})
    similarity: str | None = field(
        default=None, metadata={"help": "CSV file of a similarity matrix (L x L), in place of a teacher and images."}
    )
    dissimilarity: str | None = field(default=None, metadata={"help": "The same, of one minus the similarity."})
    num_phases: list[int] = field(default_factory=lambda: [2, 3, 4], metadata={"help": "Numbers of phases to find."})
    min_size: int = field(default=2, metadata={"help": "Layers that a phase has at least."})
    objective: str = field(default="mean", metadata={"help": "What is maximised.", "choices": list(OBJECTIVES)})
    image_size: int | None = field(default=None, metadata={"help": "Pixels. Default: the image processor's."})
    max_samples: int = field(default=512, metadata={"help": "Images to use; the paper uses 10,000."})
    batch_size: int = field(default=32, metadata={"help": "Images a batch."})
    seed: int = field(default=42, metadata={"help": "Seed of the choice of images."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Whether the teacher's own code may be run."})
    output_dir: str = field(default="outputs/phases", metadata={"help": "Where the results go."})

    def __post_init__(self):
        if self.similarity is not None and self.dissimilarity is not None:
            raise ValueError("--similarity and --dissimilarity are both given: leave one out.")
        check_at_least_one(self, "max_samples", "batch_size", "min_size", "image_size")


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(PhaseArguments, description=__doc__)
    (args,) = parser.parse(argv)
    try:
        bad_images = []
        if args.similarity is not None:
            similarity = read_matrix("similarity", args.similarity)
        elif args.dissimilarity is not None:
            similarity = 1 - read_matrix("dissimilarity", args.dissimilarity)
        else:
            similarity, bad_images = measure(args)
        check_writable(args.output_dir, [f"phases_k{k}.{kind}" for k in args.num_phases for kind in ("png", "svg")])
        sizes = {k: find_phases(similarity, k, args.min_size, args.objective) for k in args.num_phases}
    except (ValueError, OSError) as error:
        parser.error(str(error))
    output_dir = Path(args.output_dir)
    phases = {}
    for k, phase_sizes in sizes.items():
        assignment = np.repeat(np.arange(k), phase_sizes)
        value = partition_objective(similarity, assignment, args.objective)
        phases[str(k)] = {"phase_sizes": phase_sizes, "objective": value}
        save_figure(
            plot_similarity(similarity, phase_sizes, f"{k} phase{'s' if k > 1 else ''}"), output_dir / f"phases_k{k}"
        )
        print(f"k = {k}: phase sizes {' '.join(map(str, phase_sizes))}, {args.objective} objective {value:.4f}")
    matrix = np.asarray(similarity).tolist()
    results = {"phases": phases, "similarity": matrix, "bad_images": count_bad_images({args.split: bad_images})}
    write_json(output_dir / "find_phases.json", {"arguments": vars(args)} | results)
    print(f"Saved to {output_dir}")


def read_matrix(flag: str, path: str) -> np.ndarray:
    try:
        return np.loadtxt(path, delimiter=",", ndmin=2)
    except (ValueError, OSError) as error:
        raise ValueError(f"--{flag} {path} can't be read ({error}): give a CSV file of L x L numbers.") from error


def measure(args: PhaseArguments):
    teacher_name = str(digits_teacher()) if args.teacher == "digits" else args.teacher
    processor = load_image_processor(teacher_name, args.image_size)
    config = read_config(teacher_name, args.trust_remote_code)
    check_image_size(getattr(config, "vision_config", config), crop_size(processor))
    teacher = load_vision_model(teacher_name, trust_remote_code=args.trust_remote_code, token_layout=args.token_layout)
    for k in args.num_phases:
        check_partition(teacher.config.num_hidden_layers, k, args.min_size)
    teacher.to("cuda" if torch.cuda.is_available() else "cpu")
    dataset = load_image_dataset(args.dataset, args.split, image_column=args.image_column)
    images, bad_images = draw_images(dataset, args.max_samples, args.seed)
    loader = DataLoader(PixelValues(images, CenterCrop(processor)), args.batch_size)
    return layer_similarity(teacher, loader, progress=True), bad_images


if __name__ == "__main__":
    main()
