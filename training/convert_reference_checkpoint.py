"""Turns a state dict of the paper's published code, and its DINOv2 teacher, into a RaptorModel folder.

    python training/convert_reference_checkpoint.py --state_dict raptor3.pt \
        --teacher facebook/dinov2-with-registers-base --phase_sizes 7 3 2 --output_dir raptor-k3
"""

import argparse
import re
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from transformers import AutoImageProcessor, PreTrainedModel

from raptor_hf import RaptorModel
from raptor_hf.hub import save_with_card
from raptor_hf.teachers import load_teacher

# A block's parameters: the published code's names and Raptor's.
BLOCK_KEYS = {
    f"{theirs}{kind}": f"{ours}{kind}"
    for theirs, ours in {
        "norm1.": "norm1.",
        "attn.in_proj_": "attention.qkv.",
        "attn.out_proj.": "attention.o_proj.",
        "norm2.": "norm2.",
        "mlp.0.": "mlp.fc1.",
        "mlp.2.": "mlp.fc2.",
        "t_proj.0.": "depth_scaling.fc1.",
        "t_proj.2.": "depth_scaling.fc2.",
    }.items()
    for kind in ("weight", "bias")
} | {"ls1.gamma": "layer_scale1", "ls2.gamma": "layer_scale2"}
LAYER_NORM_EPS = 1e-5


def read_checkpoint(path: str) -> tuple[dict[str, torch.Tensor], list[int] | None]:
    """
    A state dict, and the layers that its phases but the last end with, where the file tells them (`thresholds`).

    Nothing in the file is run: it is loaded with `weights_only=True`.

    Raises:
        ValueError: if there is no such file, or it holds no state dict.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file: give the path of a saved state dict.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    # What a damaged file makes torch raise is of any kind.
    except Exception as error:
        raise ValueError(
            f"{path} is damaged, or holds something else than tensors, such as a whole pickled module, which isn't "
            "loaded because that can run code: give a file that torch.save wrote of a state_dict()."
        ) from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{path} holds a {type(checkpoint).__name__}: give a file that holds a state dict.")
    state = checkpoint.get("state_dict", checkpoint)
    state = dict(state) if isinstance(state, dict) else {"state_dict": state}
    thresholds = checkpoint.get("thresholds", state.pop("thresholds", None))
    for key, value in state.items():
        sound = isinstance(key, str) and isinstance(value, torch.Tensor) and value.layout == torch.strided
        if not sound or not value.is_floating_point() or not value.isfinite().all():
            raise ValueError(f"{path} holds no plain state dict: {key} is no tensor of finite real numbers.")
    consume_prefix_in_state_dict_if_present(state, "module.")
    if thresholds is not None:
        try:
            thresholds = [int(layer) for layer in thresholds]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} has thresholds {thresholds!r}, which are no list of layers.") from error
    return state, thresholds


def convert(
    state: dict[str, torch.Tensor],
    teacher: PreTrainedModel,
    phase_sizes: list[int],
    thresholds: list[int] | None = None,
) -> RaptorModel:
    """
    A Raptor with the blocks of the published code and its teacher's embeddings and final LayerNorm.

    Args:
        state: `blocks.{j}.{name}`, with the names of `BLOCK_KEYS`; without any `t_proj`, depth scaling is off.
        phase_sizes: layers of each block.
        thresholds: the layers that the phases but the last end with, to check `phase_sizes` against.

    Raises:
        ValueError: if the state dict, the phase sizes and the teacher don't fit each other.
    """
    depth_scaling = any(".t_proj." in key for key in state)
    names = [name for name in BLOCK_KEYS if depth_scaling or not name.startswith("t_proj.")]
    indices = {int(match[1]) for key in state if (match := re.match(r"blocks\.(\d+)\.", key))}
    if not indices:
        raise ValueError("The state dict has no blocks.0, blocks.1, ...: give a state dict of a whole Raptor.")
    if thresholds is not None and thresholds != list(accumulate(phase_sizes))[:-1]:
        sizes = [end - start for start, end in pairwise([0, *thresholds, teacher.config.num_hidden_layers])]
        advice = f"use --phase_sizes {' '.join(map(str, sizes))}" if min(sizes) > 0 else "give its own teacher"
        raise ValueError(
            f"Phase sizes {phase_sizes} don't fit the checkpoint, whose phases but the last end after layers "
            f"{thresholds}: {advice}."
        )
    if len(indices) != len(phase_sizes):
        raise ValueError(
            f"The state dict has {len(indices)} blocks, but there are {len(phase_sizes)} phase sizes: give one for "
            "each block."
        )
    mapping = {f"blocks.{j}.{name}": f"blocks.{j}.{BLOCK_KEYS[name]}" for j in range(len(indices)) for name in names}
    for verb, keys in (("lacks", mapping.keys() - state), ("has unknown", state.keys() - mapping)):
        if keys:
            raise ValueError(
                f"The state dict {verb} {', '.join(sorted(keys)[:3])} ({len(keys)} in all): give one of the published "
                "code's Raptor."
            )
    for name in ("mlp.0.weight", "mlp.2.weight", "t_proj.0.bias")[: 3 if depth_scaling else 2]:
        dimensions = state[f"blocks.0.{name}"].ndim
        if dimensions != (1 if name.endswith("bias") else 2):
            raise ValueError(f"blocks.0.{name} has {dimensions} dimensions: give one of the published code's Raptor.")
    width, inner = state["blocks.0.mlp.2.weight"].shape
    rows = len(state["blocks.0.mlp.0.weight"])
    if width != teacher.config.hidden_size:
        raise ValueError(
            f"The blocks are of width {width}, but the teacher's is {teacher.config.hidden_size}: give the teacher "
            "that they were trained with."
        )
    if rows not in (inner, 2 * inner):
        raise ValueError(
            f"mlp.0 makes {rows} features of which mlp.2 takes {inner}: neither a GELU MLP (as many) nor a SwiGLU "
            "(twice as many). Only these can be converted."
        )
    model = RaptorModel.from_teacher(
        teacher,
        phase_sizes,
        init="random",
        hidden_act="gelu" if rows == inner else "swiglu",
        intermediate_size=inner,
        qkv_bias=True,
        layer_norm_eps=LAYER_NORM_EPS,
        depth_scaling=depth_scaling,
        depth_scaling_width=len(state["blocks.0.t_proj.0.bias"]) if depth_scaling else 16,
    )
    parameters = model.state_dict()
    for theirs, ours in mapping.items():
        if state[theirs].shape != parameters[ours].shape:
            raise ValueError(
                f"{theirs} is of shape {tuple(state[theirs].shape)}, not {tuple(parameters[ours].shape)}: give the "
                "teacher that the blocks were trained with."
            )
        parameters[ours].copy_(state[theirs])
    return model


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(prog=Path(__file__).name, description=__doc__.split("\n")[0])
    parser.add_argument("--state_dict", required=True, help="file with the published code's state dict")
    parser.add_argument("--teacher", required=True, help="the DINOv2 teacher: a Hub name or a folder")
    parser.add_argument("--phase_sizes", required=True, type=int, nargs="+", help="layers of each block, as 7 3 2")
    parser.add_argument("--output_dir", required=True, help="folder for the Raptor")
    args = parser.parse_args(arguments)
    try:
        if Path(args.output_dir).is_file():
            raise ValueError(f"--output_dir {args.output_dir} is a file: give a folder.")
        state, thresholds = read_checkpoint(args.state_dict)
        teacher = load_teacher(args.teacher)
        model = convert(state, teacher, args.phase_sizes, thresholds)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {' '.join(str(error).split())}\n")
    try:
        image_processor = AutoImageProcessor.from_pretrained(args.teacher)
    except OSError:
        image_processor = None
    parameters = {"teacher": teacher.num_parameters(), "raptor": model.num_parameters()}
    save_with_card(model, image_processor, {"teacher": args.teacher, "parameters": parameters}, args.output_dir)


if __name__ == "__main__":
    main()
