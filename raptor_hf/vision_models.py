"""Vision Transformers of any family: loading one, its token layout, its trajectory (arXiv 2512.19941)."""

import inspect
import math
from collections.abc import Sequence

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file

from .configuration_raptor import MAX_LAYERS, as_pair
from .modeling_raptor import check_shards

# Each family's tokens in order. A count that isn't given is the configuration's `num_register_tokens`, or 1.
TOKEN_LAYOUTS = {
    "raptor": ("cls", "register", "patch"),
    "dinov2": ("cls", "patch"),
    "dinov2_with_registers": ("cls", "register", "patch"),
    "dinov3_vit": ("cls", "register", "patch"),
    "vit": ("cls", "patch"),
    # The distillation token is no patch and isn't the one that is probed, so it counts as a register.
    "deit": ("cls", "register=1", "patch"),
    "vit_mae": ("cls", "patch"),
    "beit": ("cls", "patch"),
    "clip_vision_model": ("cls", "patch"),
    "siglip_vision_model": ("patch",),
    "siglip2_vision_model": ("patch",),
    "ijepa": ("patch",),
}
# Of these models of two towers, the vision tower is taken.
TWO_TOWERS = ("clip", "siglip", "siglip2")


def load_vision_model(
    name_or_path: str,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    token_layout: Sequence[str] | None = None,
) -> PreTrainedModel:
    """
    Loads a frozen Vision Transformer in evaluation mode: a Raptor, DINOv2 (with or without registers), DINOv3, ViT,
    DeiT, MAE, BEiT, I-JEPA, or the vision tower of CLIP, SigLIP or SigLIP 2. Of a classifier, the backbone is taken.

    Whatever its family, the model is called as DINOv2 is: `model(pixel_values)` with pixel values (batch, channels,
    height, width) of any size, for which position embeddings are interpolated. MAE sees all patches in their order.

    Args:
        name_or_path: a Hub name or a folder; the weights must be in safetensors.
        dtype: the weights are cast to it, whatever the file holds.
        trust_remote_code: whether code that comes with the model may be run.
        token_layout: for a model of another family, its token types in order, as [`token_slices`] takes them. Its
            `hidden_states` must be the L + 1 states of the residual stream: check that the last is not normalised.

    Raises:
        ValueError: if there is no such model, its token layout isn't known, or weights of it are missing.
    """
    config = read_config(name_or_path, trust_remote_code)
    if config.model_type in TWO_TOWERS:
        config = config.vision_config
    if token_layout is not None:
        config.token_layout = list(token_layout)
    token_slices(config)
    if config.model_type == "vit_mae":
        # Nothing is hidden; the patches would still be shuffled, were it not for `_keep_patch_order`.
        config.mask_ratio = 0.0
    return load_frozen(name_or_path, config, dtype, trust_remote_code)


def read_config(name_or_path: str, trust_remote_code: bool = False, role: str = "Model") -> PretrainedConfig:
    """A model's configuration. Raises ValueError, which calls the model by its role, if there is none."""
    try:
        if find_adapter_config_file(name_or_path) is not None:
            # Transformers would load the base model, from wherever the adapter says.
            raise ValueError("it holds a PEFT adapter, not yet merged into its base model")
        # Looked at first: making a configuration of endless depth takes all memory.
        stated, _ = PretrainedConfig.get_config_dict(name_or_path)
        depth = (stated.get("vision_config") or stated).get("num_hidden_layers", 1)
        if not isinstance(depth, int) or not 1 <= depth <= MAX_LAYERS:
            raise ValueError(f"its num_hidden_layers is {depth}, not one from 1 to {MAX_LAYERS}")
        config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    # A damaged file leads the library to errors of any kind.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise ValueError(f"{role} {name_or_path} can't be loaded ({reason}): give a Hub name or a folder.") from error
    # A kernel for attention would be code from the Hub: which one is used isn't for the model's file to say.
    config._attn_implementation = None
    return config


def load_frozen(
    name_or_path: str, config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool, role: str = "Model"
) -> PreTrainedModel:
    """The model of a configuration with the weights of `name_or_path`, as [`load_vision_model`] gives it."""
    check_shards(name_or_path)
    try:
        model, info = AutoModel.from_pretrained(
            name_or_path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except OSError as error:
        raise ValueError(f"{role} {name_or_path} has no weights in safetensors: give a folder that has.") from error
    except (SafetensorError, ArithmeticError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{role} {name_or_path} has weights that can't be read, or don't fit its configuration ({reason}): get it "
            "anew."
        ) from error
    missing = {key for key in info["missing_keys"] if not key.endswith("mask_token")}
    pooler = {key for key in missing if key.startswith("pooler.")}
    if pooler:
        # Classifiers bring none, and a random one is of no use.
        model.pooler = None
    missing = sorted(missing - pooler)
    if missing:
        raise ValueError(
            f"{role} {name_or_path} lacks {len(missing)} of its weights, {missing[0]} for one: give a complete one."
        )
    # Of parts that the model has: heads and other towers are left out on purpose.
    parts = {name for name, _ in model.named_children()}
    weights = (key for key in info["unexpected_keys"] if key.endswith((".weight", ".bias")))
    extra = sorted(key for key in weights if key.split(".")[0] in parts)
    if extra:
        raise ValueError(
            f"{role} {name_or_path} has {len(extra)} weights that its configuration has no place for, {extra[0]} for "
            "one: give a configuration that fits."
        )
    bad = next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None)
    if bad is not None:
        raise ValueError(f"{role} {name_or_path} has weights that aren't finite, {bad} for one: give a sound one.")
    for hook in _input_hooks(model):
        model.register_forward_pre_hook(hook, with_kwargs=True)
    return model.eval().requires_grad_(False)


def token_slices(config: PretrainedConfig) -> dict[str, slice]:
    """
    Where each token type lies in a sequence of tokens: `cls`, `register` and `patch`, those that the model has. DeiT's
    distillation token counts as a register.

    The layout of other families than those of [`load_vision_model`] is stated as `config.token_layout`: the types in
    order, patches last, with their count if it isn't 1: `["cls", "register=4", "patch"]`.

    Raises:
        ValueError: if the family is unknown and states no layout, or a layout that can't be.
    """
    layout = getattr(config, "token_layout", None) or TOKEN_LAYOUTS.get(config.model_type)
    if layout is None:
        raise ValueError(
            f"The token layout of {config.model_type} models is not known, only that of "
            f"{', '.join(TOKEN_LAYOUTS)}. Of another Vision Transformer state it, for instance "
            "--token_layout cls register=4 patch, or token_layout=['cls', 'register=4', 'patch']."
        )
    if not isinstance(layout, (list, tuple)) or not all(isinstance(part, str) for part in layout):
        raise ValueError(f"A token layout must be a list of words such as cls, register=4 and patch, got {layout!r}.")
    counts = dict(part.partition("=")[::2] for part in layout)
    sound = set(counts) <= {"cls", "register", "patch"} and all(not n or n.isdigit() for n in counts.values())
    if not sound or len(counts) < len(layout) or layout[-1] != "patch":
        raise ValueError(
            "A token layout must be of cls, register (or register=COUNT) and patch, each at most once and patch last, "
            f"got {' '.join(layout)}."
        )
    slices, start = {}, 0
    for name, count in counts.items():
        default = getattr(config, "num_register_tokens", 1) if name == "register" else 1
        stop = None if name == "patch" else start + int(count or default)
        if stop != start:
            slices[name] = slice(start, stop)
        start = stop
    return slices


@torch.no_grad()
def trajectory(model: PreTrainedModel, pixel_values: torch.Tensor) -> torch.Tensor:
    """
    The states of a model through depth, before the final LayerNorm (a_0..a_L of arXiv 2512.19941).

    Args:
        model: a teacher, a Raptor, or what [`load_vision_model`] gave.
        pixel_values: (batch, channels, height, width).

    Returns:
        (batch, L + 1, tokens, hidden_size); index 0 holds the embeddings. No gradients are recorded.

    Raises:
        ValueError: if the model gives other states than one for each layer and each token of its layout.
    """
    states = model(pixel_values, output_hidden_states=True).hidden_states
    config = model.config
    depth, shapes = config.num_hidden_layers, {tuple(state.shape) for state in states}
    if len(states) != depth + 1 or len(shapes) > 1 or states[0].ndim != 3:
        raise ValueError(
            f"A {config.model_type} model of {depth} layers gave {len(states)} hidden states of shapes "
            f"{sorted(shapes)}: a trajectory needs {depth + 1} of one shape (batch, tokens, hidden_size)."
        )
    specials, patches = token_slices(config)["patch"].start, math.prod(_patch_grid(config, pixel_values))
    if states[0].shape[1] != specials + patches:
        raise ValueError(
            f"A {config.model_type} model gave {states[0].shape[1]} tokens where its token layout has {specials} and "
            f"{patches} patches: state the right layout (token_layout), and load MAE by load_vision_model."
        )
    return torch.stack(states, dim=1)


def _input_hooks(model: PreTrainedModel) -> list:
    """What lets a model of another family be called as DINOv2 is: forward pre-hooks."""
    hooks = []
    if "interpolate_pos_encoding" in inspect.signature(model.forward).parameters:
        hooks.append(_interpolate_positions)
    if model.config.model_type == "vit_mae":
        hooks.append(_keep_patch_order)
    if model.config.model_type == "siglip2_vision_model":
        hooks.append(_cut_into_patches)
    return hooks


def _interpolate_positions(model, args, kwargs):
    size = tuple(_pixel_values(args, kwargs).shape[-2:])
    # Not at the trained size: some families can interpolate only from square grids.
    return args, {"interpolate_pos_encoding": size != as_pair(model.config.image_size), **kwargs}


def _keep_patch_order(model, args, kwargs):
    """MAE keeps patches in the order of this noise, which is random by default."""
    pixel_values = _pixel_values(args, kwargs)
    grid = _patch_grid(model.config, pixel_values)
    noise = torch.arange(math.prod(grid), device=pixel_values.device).expand(len(pixel_values), -1)
    return args, {"noise": noise, **kwargs}


def _cut_into_patches(model, args, kwargs):
    """SigLIP 2 takes (batch, patches, patch height * patch width * channels) and the patch grid of each image."""
    pixel_values = _pixel_values(args, kwargs)
    if pixel_values.ndim != 4:
        return args, kwargs
    height, width = _patch_grid(model.config, pixel_values)
    patch_height, patch_width = as_pair(model.config.patch_size)
    pixel_values = pixel_values[..., : height * patch_height, : width * patch_width]
    patches = pixel_values.unflatten(3, (width, patch_width)).unflatten(2, (height, patch_height))
    patches = patches.permute(0, 2, 4, 3, 5, 1).reshape(len(patches), height * width, -1)
    return (), kwargs | {
        "pixel_values": patches,
        "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.long, device=patches.device),
        "spatial_shapes": torch.tensor([[height, width]] * len(patches), device=patches.device),
    }


def _pixel_values(args, kwargs) -> torch.Tensor:
    return args[0] if args else kwargs["pixel_values"]


def _patch_grid(config: PretrainedConfig, pixel_values: torch.Tensor) -> tuple[int, int]:
    """Patches along height and width."""
    patch_height, patch_width = as_pair(config.patch_size)
    return pixel_values.shape[-2] // patch_height, pixel_values.shape[-1] // patch_width
