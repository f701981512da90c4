"""Teachers: loading one, its token layout, its trajectory."""

import torch
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

TEACHER_FAMILIES = ("dinov2", "dinov2_with_registers")


def load_teacher(
    name_or_path: str, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> PreTrainedModel:
    """
    Loads a frozen DINOv2 teacher, with or without registers, in evaluation mode.

    Args:
        name_or_path: a Hub name or a folder. Of a classifier, the backbone is taken.
        dtype: the weights are cast to it, whatever the file holds.
        trust_remote_code: whether code that comes with the model may be run.

    Raises:
        ValueError: if there is no such model, it is of another family, or weights of it are missing.
    """
    load_teacher_config(name_or_path, trust_remote_code)
    try:
        model, info = AutoModel.from_pretrained(
            name_or_path,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except OSError as error:
        raise ValueError(f"Teacher {name_or_path} has no weights in safetensors: give a folder that has.") from error
    missing = sorted(key for key in info["missing_keys"] if not key.endswith("mask_token"))
    if missing:
        raise ValueError(
            f"Teacher {name_or_path} lacks {len(missing)} of its weights, {missing[0]} for one: give a complete one."
        )
    return model.eval().requires_grad_(False)


def load_teacher_config(name_or_path: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """
    The configuration of a teacher, without its weights.

    Raises:
        ValueError: if there is no such model, or it is of another family.
    """
    try:
        config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"Teacher {name_or_path} can't be loaded ({reason}): give a Hub name or a folder.") from error
    if config.model_type not in TEACHER_FAMILIES:
        raise ValueError(
            f"Teacher {name_or_path} is a {config.model_type} model, but a teacher must be one of "
            f"{', '.join(TEACHER_FAMILIES)}."
        )
    return config


def token_slices(config: PretrainedConfig) -> dict[str, slice]:
    """Where each token type lies in a sequence of tokens: `cls`, `register` (if there are any) and `patch`."""
    registers = getattr(config, "num_register_tokens", 0)
    slices = {"cls": slice(0, 1), "register": slice(1, 1 + registers), "patch": slice(1 + registers, None)}
    if not registers:
        del slices["register"]
    return slices


@torch.no_grad()
def trajectory(model: PreTrainedModel, pixel_values: torch.Tensor) -> torch.Tensor:
    """
    The states of a teacher or of a Raptor through depth, before the final LayerNorm (a_0..a_L of arXiv 2512.19941).

    Args:
        pixel_values: (batch, channels, height, width).

    Returns:
        (batch, L + 1, tokens, hidden_size); index 0 holds the embeddings. No gradients are recorded.
    """
    return torch.stack(model(pixel_values, output_hidden_states=True).hidden_states, dim=1)
