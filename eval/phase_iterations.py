"""Compute as a dial: what a Raptor keeps of its teacher when its blocks are applied fewer or more times."""

import math
import statistics
import time
from dataclasses import dataclass, field

import torch
from torch.nn.functional import cosine_similarity
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from raptor_hf import RaptorModel
from raptor_hf.fidelity import check_same_shape
from raptor_hf.images import CenterCrop, PixelValues
from raptor_hf.parser import ConfigArgumentParser, check_at_least_one
from raptor_hf.probes import EvalArguments
from raptor_hf.summary import table
from raptor_hf.teachers import load_teacher, load_teacher_config, token_slices


@dataclass(kw_only=True)
class Arguments(EvalArguments):
    teacher: str = field(metadata={"help": "Its teacher: Hub name or folder."})
    test_split: str = field(default="validation", metadata={"help": "Split of the data set.", "aliases": ["--split"]})
    scales: list[float] = field(
        default_factory=lambda: [0.5, 0.75, 1.0, 1.25, 1.5, 2.0],
        metadata={"help": "Applications of each block, as multiples of its phase's size."},
    )
    max_samples: int | None = field(default=128, metadata={"help": "Images to use, drawn at random."})
    rounds: int = field(default=5, metadata={"help": "Times that the speed is measured, all settings in turn."})
    output_dir: str = field(default="outputs/phase_iterations", metadata={"help": "Where the results go."})

    def __post_init__(self):
        super().__post_init__()
        check_at_least_one(self, "rounds")
        if not self.scales or not all(0 < scale <= 100 for scale in self.scales):
            raise ValueError(
                f"scales must be multiples of the phases' sizes, above 0 and at most 100, got {self.scales}."
            )


@torch.no_grad()
def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(Arguments, description=__doc__)
    (args,) = parser.parse(argv)
    try:
        model, processor = args.load_model()
        if not isinstance(model, RaptorModel):
            raise ValueError(f"{args.model} is a {model.config.model_type} model: --model must be a Raptor.")
        check_same_shape(model.config, load_teacher_config(args.teacher))
        images = PixelValues(args.load_test(), CenterCrop(processor))
        teacher = load_teacher(args.teacher).to(model.device)
    except ValueError as error:
        parser.error(str(error))
    loader = DataLoader(images, args.batch_size, num_workers=args.dataloader_num_workers)
    batches = [batch["pixel_values"].to(model.device) for batch in loader]

    sizes = model.config.phase_sizes
    settings = {scale: [max(1, math.floor(scale * size + 0.5)) for size in sizes] for scale in args.scales}
    slices = token_slices(model.config)
    cosines = {scale: dict.fromkeys(slices, 0.0) for scale in settings}
    for batch in tqdm(batches, desc="Fidelity"):
        target = teacher(batch).last_hidden_state
        for scale, iterations in settings.items():
            states = model(batch, phase_iterations=iterations).last_hidden_state
            for name, where in slices.items():
                cosine = cosine_similarity(states[:, where], target[:, where], dim=-1).mean(dim=1)
                cosines[scale][name] += cosine.sum().item() / len(images)
    seconds = {scale: [] for scale in settings}
    for _ in tqdm(range(args.rounds), desc="Speed"):
        for scale, iterations in settings.items():
            start = time.perf_counter()
            model(batches[0], phase_iterations=iterations)
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[scale].append((time.perf_counter() - start) / len(batches[0]))
    results = [
        {
            "scale": scale,
            "phase_iterations": iterations,
            "block_applications": sum(iterations),
            "milliseconds_per_image": 1000 * statistics.median(seconds[scale]),
            "cosine": cosines[scale],
        }
        for scale, iterations in settings.items()
    ]
    args.write_results("phase_iterations", results)
    rows = [
        [
            " ".join(map(str, row["phase_iterations"])),
            f"{row['milliseconds_per_image']:.1f}",
            *(f"{value:.3f}" for value in row["cosine"].values()),
        ]
        for row in results
    ]
    print(table(["applications of each block", "ms an image", *(f"cosine, {name}" for name in slices)], rows))


if __name__ == "__main__":
    main()
