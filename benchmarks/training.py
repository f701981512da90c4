"""Images a second of a training step, teacher included, against a plain recipe that reads stored activations."""

from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from reference import ReferenceBlock, stage1_step, stage2_step
from timing import check_seconds, compare, machine, mebibytes, peak_memory
from transformers import Dinov2Config, Dinov2Model

from raptor_hf import RaptorModel
from raptor_hf.distillation.module import DistillationModule, LossSettings
from raptor_hf.distillation.muon import MuonAdamW, parameter_groups
from raptor_hf.files import write_json
from raptor_hf.parser import ConfigArgumentParser, check_at_least_one
from raptor_hf.summary import table
from raptor_hf.teachers import trajectory


@dataclass
class Arguments:
    """Weights and images are random: speed doesn't depend on them."""

    hidden_size: int = field(default=384, metadata={"help": "Width; heads are 64 wide."})
    phase_sizes: list[int] = field(default_factory=lambda: [4, 4, 4], metadata={"help": "Layers of each phase."})
    image_size: int = field(default=112, metadata={"help": "Pixels."})
    batch_size: int = field(default=16, metadata={"help": "Images a step."})
    bf16: bool = field(default=False, metadata={"help": "Whether our side runs in bfloat16 autocast."})
    muon: bool = field(default=True, metadata={"help": "Whether our side has Muon for its matrices, or AdamW alone."})
    teacher_forcing: list[float] = field(
        default_factory=lambda: [0.5, 0.0],
        metadata={"help": "Stage 1: shares of teacher forcing. Between 0 and 1 both losses are computed."},
    )
    compile: bool = field(default=False, metadata={"help": "Whether our side is compiled."})
    rounds: int = field(default=5, metadata={"help": "Times that each side is measured, in turn."})
    seconds: float = field(default=5.0, metadata={"help": "Time of one side in one round."})
    memory: bool = field(default=True, metadata={"help": "Whether peak memory is measured, in processes of its own."})
    output_dir: str = field(default="outputs/benchmarks", metadata={"help": "Where training.json goes."})

    def __post_init__(self):
        check_at_least_one(self, "hidden_size", "image_size", "batch_size", "rounds")
        check_seconds(self.seconds)
        if min(self.phase_sizes, default=0) < 1:
            raise ValueError(f"phase_sizes must be one or more sizes of at least 1, got {self.phase_sizes}.")
        if not all(0 <= share <= 1 for share in self.teacher_forcing):
            raise ValueError(f"teacher_forcing is of shares from 0 to 1, got {self.teacher_forcing}.")
        if self.hidden_size % 64 or self.image_size % 14:
            raise ValueError(
                f"hidden_size must be a multiple of 64 and image_size of 14, got {self.hidden_size} and "
                f"{self.image_size}."
            )


def build(side: str, args: Arguments, stage: int, teacher_forcing: float):
    """A function that does one training step."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = _teacher(args).to(device)
    pixel_values = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    if side == "reference":
        blocks = [ReferenceBlock(args.hidden_size, args.hidden_size // 64).to(device) for _ in args.phase_sizes]
        states = trajectory(teacher, pixel_values)
        if stage == 1:
            optimizers = [torch.optim.AdamW(block.parameters(), lr=1e-6) for block in blocks]
            return lambda: stage1_step(blocks, optimizers, states, args.phase_sizes, teacher_forcing)
        optimizer = torch.optim.AdamW([p for block in blocks for p in block.parameters()], lr=1e-6)
        return lambda: stage2_step(blocks, optimizer, states, args.phase_sizes)

    student = RaptorModel.from_teacher(teacher, args.phase_sizes).train()
    module = DistillationModule(student, LossSettings(normalize=True))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = parameter_groups(module, student.config.num_attention_heads)
    optimizer = MuonAdamW(groups, lr=1e-6) if args.muon else torch.optim.AdamW(trained, lr=1e-6)
    forward = torch.compile(module) if args.compile else module

    def step():
        with torch.autocast(device, torch.bfloat16) if args.bf16 else nullcontext():
            loss = forward(trajectory(teacher, pixel_values), stage=stage, teacher_forcing=teacher_forcing)["loss"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    return step


def _teacher(args: Arguments) -> Dinov2Model:
    config = Dinov2Config(
        hidden_size=args.hidden_size,
        num_hidden_layers=sum(args.phase_sizes),
        num_attention_heads=args.hidden_size // 64,
        image_size=args.image_size,
    )
    return Dinov2Model(config).eval().requires_grad_(False)


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(Arguments, description=__doc__)
    (args,) = parser.parse(argv)
    settings = [(1, share) for share in args.teacher_forcing] + [(2, 0.0)]
    results = []
    for stage, share in settings:
        sides = {side: build(side, args, stage, share) for side in ("reference", "raptor_hf")}
        row = {"stage": stage, "teacher_forcing": share}
        row |= compare(sides, args.rounds, args.seconds, f"stage {stage}, teacher forcing {share:g}")
        if args.memory:
            row["peak_memory"] = {side: peak_memory(build, side, args, stage, share) for side in sides}
        results.append(row)
        write_json(
            Path(args.output_dir) / "training.json",
            {
                "arguments": asdict(args),
                "machine": machine(),
                "results": results,
            },
        )
    rows = [
        [
            f"{row['stage']}, teacher forcing {row['teacher_forcing']:g}" if row["stage"] == 1 else "2",
            f"{row['ratio']['median']:.2f} ({row['ratio']['lowest']:.2f} to {row['ratio']['highest']:.2f})",
            *(f"{args.batch_size / seconds:.1f}" for seconds in row["median"].values()),
            *(mebibytes(row.get("peak_memory", {}).get(side)) for side in row["median"]),
        ]
        for row in results
    ]
    header = ["stage", "raptor_hf / reference"]
    header += [f"{unit}, {side}" for unit in ("images/s", "peak MiB") for side in ("reference", "raptor_hf")]
    print(table(header, rows))


if __name__ == "__main__":
    main()
