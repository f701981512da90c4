"""A Raptor against the DINOv2 model of its width and depth: speed, latency, memory, stored bytes."""

from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

import torch
from timing import check_seconds, compare, machine, mebibytes, peak_memory
from transformers import Dinov2Config, Dinov2Model

from raptor_hf import RaptorModel
from raptor_hf.cost import stored_bytes
from raptor_hf.fidelity import check_same_shape
from raptor_hf.files import write_json
from raptor_hf.parser import ConfigArgumentParser, check_at_least_one
from raptor_hf.summary import table
from raptor_hf.teachers import load_teacher
from raptor_hf.vision_models import load_vision_model


@dataclass
class Arguments:
    """Without a Raptor given, models of random weights: speed doesn't depend on them."""

    model: str | None = field(
        default=None, metadata={"help": "A Raptor to measure, Hub name or folder, in place of one of the sizes below."}
    )
    teacher: str | None = field(default=None, metadata={"help": "Its teacher, given together with it."})
    hidden_size: int = field(default=384, metadata={"help": "Width; heads are 64 wide."})
    num_hidden_layers: int = field(default=12, metadata={"help": "Depth."})
    num_phases: int = field(default=3, metadata={"help": "Blocks of the Raptor, in phases of one size."})
    batch_sizes: list[int] = field(default_factory=lambda: [1, 32], metadata={"help": "Images a forward pass."})
    image_sizes: list[int] = field(default_factory=lambda: [112, 224], metadata={"help": "Pixels."})
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"], metadata={"help": "Precisions."})
    modes: list[str] = field(default_factory=lambda: ["eager", "compiled"], metadata={"help": "Compiled or not."})
    rounds: int = field(default=5, metadata={"help": "Times that each setting is measured, both sides in turn."})
    seconds: float = field(default=2.0, metadata={"help": "Time of one side in one round."})
    memory: bool = field(default=True, metadata={"help": "Whether peak memory is measured, in processes of its own."})
    output_dir: str = field(default="outputs/benchmarks", metadata={"help": "Where inference.json goes."})

    def __post_init__(self):
        if (self.model is None) != (self.teacher is None):
            raise ValueError("model and teacher are measured together: give both, or neither.")
        check_at_least_one(self, "hidden_size", "num_hidden_layers", "num_phases", "rounds")
        check_seconds(self.seconds)
        if min(self.batch_sizes, default=0) < 1:
            raise ValueError(f"batch_sizes must be one or more numbers of at least 1, got {self.batch_sizes}.")
        if self.hidden_size % 64:
            raise ValueError(f"hidden_size must be a multiple of 64, got {self.hidden_size}.")
        if self.num_hidden_layers % self.num_phases:
            raise ValueError(f"{self.num_hidden_layers} layers don't divide into {self.num_phases} equal phases.")
        for size in self.image_sizes:
            if size < 1 or size % 14:
                raise ValueError(f"image_sizes must be multiples of the patch, 14 pixels, got {size}.")
        for name, allowed in (("dtypes", {"float32", "bfloat16", "float16"}), ("modes", {"eager", "compiled"})):
            if not set(getattr(self, name)) <= allowed:
                raise ValueError(f"{name} must be of {', '.join(sorted(allowed))}, got {getattr(self, name)}.")


def build(side: str, args: Arguments, batch_size: int, image_size: int, dtype: str, mode: str):
    """A function that runs one side's forward pass."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = models(args)[side].to(device, getattr(torch, dtype))
    pixel_values = torch.randn(batch_size, 3, image_size, image_size, device=device, dtype=model.dtype)
    forward = torch.compile(model) if mode == "compiled" else model

    @torch.inference_mode()
    def run():
        return forward(pixel_values).last_hidden_state

    return run


def models(args: Arguments) -> dict:
    if args.model:
        raptor, teacher = load_vision_model(args.model), load_teacher(args.teacher)
        if not isinstance(raptor, RaptorModel):
            raise ValueError(f"{args.model} is a {raptor.config.model_type} model: --model must be a Raptor.")
        check_same_shape(raptor.config, teacher.config)
        return {"Dinov2Model": teacher, "RaptorModel": raptor}
    teacher = Dinov2Model(
        Dinov2Config(
            hidden_size=args.hidden_size,
            num_hidden_layers=args.num_hidden_layers,
            num_attention_heads=args.hidden_size // 64,
            image_size=518,
        )
    ).eval()
    sizes = [args.num_hidden_layers // args.num_phases] * args.num_phases
    return {"Dinov2Model": teacher, "RaptorModel": RaptorModel.from_teacher(teacher, sizes)}


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(Arguments, description=__doc__)
    (args,) = parser.parse(argv)
    try:
        sizes = {side: stored_bytes(model) for side, model in models(args).items()}
    except ValueError as error:
        parser.error(str(error))
    results = []
    for setting in product(args.batch_sizes, args.image_sizes, args.dtypes, args.modes):
        names = dict(zip(("batch_size", "image_size", "dtype", "mode"), setting))
        sides = {side: build(side, args, *setting) for side in sizes}
        row = names | compare(sides, args.rounds, args.seconds, " ".join(map(str, setting)))
        if args.memory:
            row["peak_memory"] = {side: peak_memory(build, side, args, *setting) for side in sizes}
        results.append(row)
        # Kept as it goes: the slow settings come last.
        write_json(
            Path(args.output_dir) / "inference.json",
            {
                "arguments": asdict(args),
                "machine": machine(),
                "stored_bytes_float32": sizes,
                "results": results,
            },
        )
    rows = []
    for row in results:
        median = row["median"]
        rows.append(
            [
                *(str(row[name]) for name in ("batch_size", "image_size", "dtype", "mode")),
                f"{row['ratio']['median']:.2f} ({row['ratio']['lowest']:.2f} to {row['ratio']['highest']:.2f})",
                *(f"{row['batch_size'] / median[side]:.1f}" for side in sizes),
                *(f"{1000 * median[side]:.1f}" for side in sizes),
                *(mebibytes(row.get("peak_memory", {}).get(side)) for side in sizes),
            ]
        )
    header = ["batch", "pixels", "dtype", "mode", "Raptor / DINOv2"]
    header += [f"{unit}, {side}" for unit in ("images/s", "latency, ms", "peak MiB") for side in ("DINOv2", "Raptor")]
    print(table(header, rows))
    teacher, raptor = sizes.values()
    print(f"Stored weights: {raptor / 1e6:.1f} of {teacher / 1e6:.1f} MB ({raptor / teacher:.3f})")


if __name__ == "__main__":
    main()
