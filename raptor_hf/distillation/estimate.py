"""What a distillation run will take, told before anything is started."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm
from transformers import AutoModel, PretrainedConfig

from ..configuration_raptor import RaptorConfig, as_pair
from ..modeling_raptor import RaptorModel
from ..parser import check_at_least_one
from ..teachers import trajectory
from .arguments import DistillationArguments
from .module import DistillationModule
from .muon import MuonAdamW, parameter_groups

# Peak dense TFLOP/s as the makers state them: float32 (TF32 tensor cores where there are any), bfloat16.
DEVICES = {
    "t4": (8.1, None),
    "v100": (15.7, None),
    "l4": (60, 121),
    "a10g": (70, 70),
    "rtx3090": (35.6, 71),
    "rtx4090": (82.6, 165),
    "a100": (156, 312),
    "h100": (494, 989),
    "h200": (494, 989),
}


@dataclass
class EstimateArguments:
    """The devices of the planned run."""

    device_kind: str = field(
        default="this",
        metadata={
            "help": "What it will run on. 'this' times a few steps with random weights on this machine.",
            "choices": ["this", *DEVICES],
        },
    )
    num_devices: int = field(default=1, metadata={"help": "How many of them."})
    utilization: float = field(
        default=0.35, metadata={"help": "Share of its peak that a device other than 'this' reaches. Measure yours."}
    )
    num_images: int | None = field(
        default=None, metadata={"help": "Training images. Default: counted, unless --max_steps tells the steps."}
    )

    def __post_init__(self):
        check_at_least_one(self, "num_devices", "num_images")
        if not 0 < self.utilization <= 1:
            raise ValueError(f"utilization is a share of the peak, above 0 and at most 1, got {self.utilization}.")


@dataclass
class Part:
    """Steps of one kind: a stage, with or without teacher forcing, at one image size."""

    steps: int
    image_size: int
    stage: int
    teacher_forcing: float


def parts_of(args: DistillationArguments, max_steps: int, image_size: int) -> list[Part]:
    """The kinds of steps that a run of so many has, in order."""
    parts: list[Part] = []
    for step in range(max_steps):
        early = args.early_image_size is not None and step < args.early_image_ratio * max_steps
        stage = 1 if step < args.stage1_steps(max_steps) else 2
        share = args.teacher_forcing(step, max_steps) if stage == 1 else 0.0
        # What a step costs depends only on whether each of the two losses is there.
        kind = (args.early_image_size if early else image_size, stage, share if share in (0, 1) else 0.5)
        if not parts or kind != (parts[-1].image_size, parts[-1].stage, parts[-1].teacher_forcing):
            parts.append(Part(0, *kind))
        parts[-1].steps += 1
    return parts


def estimate_run(
    teacher_config: PretrainedConfig,
    config: RaptorConfig,
    args: DistillationArguments,
    devices: EstimateArguments,
    max_steps: int,
    image_size: int,
) -> dict:
    """
    FLOPs, hours, memory and disk of a run. Measuring fidelity, reading images and communication are not counted.

    Args:
        teacher_config, config: the teacher's and the Raptor's. No weights are needed.
        args: the run; `per_device_train_batch_size` is each device's.
        devices: what it will run on.
        max_steps: optimizer steps.
        image_size: pixels.

    Returns:
        `images`, `flops` (matrix products and attention, a multiply-add being two), `hours`, `device_hours`,
        `memory_bytes` of each device at its fullest, `disk_bytes` of the output folder, `parts` of the run, each with
        its `seconds_a_step`, and `stored_states_bytes`: what the teacher's states of every image would take on disk,
        of which nothing is stored here.
    """
    images_a_step = args.train_batch_size * args.gradient_accumulation_steps
    parts, seconds, flops, memory = [], 0.0, 0, 0
    for part in tqdm(parts_of(args, max_steps, image_size), desc="Counting", disable=args.disable_tqdm):
        count = _count(teacher_config, config, args, part)
        if devices.device_kind == "this":
            step_seconds = _time(teacher_config, config, args, part)
        else:
            full, half = DEVICES[devices.device_kind]
            peak = half if args.bf16 and half else full
            step_seconds = count["flops"] / (1e12 * peak * devices.utilization)
        step_seconds *= args.gradient_accumulation_steps
        parts.append(asdict(part) | {"seconds_a_step": step_seconds})
        seconds += part.steps * step_seconds
        flops += part.steps * count["flops"] * args.gradient_accumulation_steps * devices.num_devices
        memory = max(memory, count["memory_bytes"])
    images = max_steps * images_a_step * devices.num_devices
    patches = math.prod(image_size // side for side in as_pair(config.patch_size))
    tokens = 1 + config.num_register_tokens + patches
    return {
        "steps": max_steps,
        "images": images,
        "flops": flops,
        "hours": seconds / 3600,
        "device_hours": devices.num_devices * seconds / 3600,
        "memory_bytes": memory,
        # Checkpoints, one more while it is written, and the finished Raptor.
        "disk_bytes": ((args.save_total_limit or 1) + 1) * count["checkpoint_bytes"] + count["raptor_bytes"],
        "stored_states_bytes": images * (config.num_hidden_layers + 1) * tokens * config.hidden_size * 4,
        "parts": parts,
    }


def _step(
    teacher_config: PretrainedConfig, config: RaptorConfig, args: DistillationArguments, part: Part
) -> tuple[Callable, DistillationModule, torch.nn.Module, torch.optim.Optimizer]:
    """A function that does one micro-batch's step on arbitrary weights and images, and what it works on."""
    with torch.device("meta"):
        teacher, student = AutoModel.from_config(teacher_config), RaptorModel(config)
    _give_weights(teacher, args.device)
    _give_weights(student, args.device)
    teacher.eval().requires_grad_(False)
    module = DistillationModule(student, args.loss_settings()).train()
    if args.gradient_checkpointing:
        module.activation_checkpointing_enable()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = parameter_groups(module, config.num_attention_heads)
    optimizer = MuonAdamW(groups, lr=1e-6) if args.muon else torch.optim.AdamW(trained, lr=1e-6)
    size = (args.train_batch_size, config.num_channels, part.image_size, part.image_size)
    pixel_values = torch.randn(size, device=args.device)

    def step():
        half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        with torch.autocast(args.device.type, half) if half else nullcontext():
            states = trajectory(teacher, pixel_values)
            loss = module(states, part.stage, part.teacher_forcing)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, module, teacher, optimizer


def _give_weights(model: torch.nn.Module, device: torch.device):
    """Random weights in place of those on the meta device. `to_empty` can't give such as hold no data."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            weights = 0.02 * torch.randn(parameter.shape, device=device)
            setattr(module, name, torch.nn.Parameter(weights))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))


def _count(teacher_config, config, args: DistillationArguments, part: Part) -> dict[str, int]:
    """FLOPs, memory and file sizes of one micro-batch's step, on tensors that hold no data."""
    with FakeTensorMode():
        step, module, teacher, optimizer = _step(teacher_config, config, args, part)
        # Of a CPU's fused attention the counter knows nothing.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            step()
        saved = {}

        def keep(tensor):
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            step()
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        states = [value for state in optimizer.state.values() for value in state.values()]
        raptor_bytes, optimizer_bytes = _bytes(module.parameters()), _bytes(states)
        return {
            "flops": counter.get_total_flops(),
            # Saved for backward, weights among it; the teacher's, gradients and the optimizer's state beside that.
            "memory_bytes": sum(saved.values()) + _bytes(teacher.parameters()) + _bytes(trained) + optimizer_bytes,
            "raptor_bytes": raptor_bytes,
            "checkpoint_bytes": raptor_bytes + optimizer_bytes,
        }


def _time(teacher_config, config, args: DistillationArguments, part: Part) -> float:
    """Seconds of one micro-batch's step on this machine: the median of three, after a first."""
    step = _step(teacher_config, config, args, part)[0]
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        step()
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[1:])[1]


def _bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
