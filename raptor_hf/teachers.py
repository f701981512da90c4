"""Teachers: the models that can be distilled."""

import torch
from transformers import PretrainedConfig, PreTrainedModel

from .configuration_raptor import as_pair
from .vision_models import load_frozen, load_vision_model, read_config, token_slices, trajectory

TEACHER_FAMILIES = ("dinov2", "dinov2_with_registers")

__all__ = [
    "TEACHER_FAMILIES",
    "load_teacher",
    "load_teacher_config",
    "load_vision_model",
    "token_slices",
    "trajectory",
]


def load_teacher(
    name_or_path: str, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> PreTrainedModel:
    """
    Loads a frozen DINOv2 teacher, with or without registers, in evaluation mode. Models of other families, to study
    them, are loaded by [`load_vision_model`].

    Args:
        name_or_path: a Hub name or a folder. Of a classifier, the backbone is taken.
        dtype: the weights are cast to it, whatever the file holds.
        trust_remote_code: whether code that comes with the model may be run.

    Raises:
        ValueError: if there is no such model, it is of another family, or weights of it are missing.
    """
    config = load_teacher_config(name_or_path, trust_remote_code)
    return load_frozen(name_or_path, config, dtype, trust_remote_code, role="Teacher")


def load_teacher_config(name_or_path: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """
    The configuration of a teacher, without its weights.

    Raises:
        ValueError: if there is no such model, or it is of another family.
    """
    config = read_config(name_or_path, trust_remote_code, role="Teacher")
    if config.model_type not in TEACHER_FAMILIES:
        raise ValueError(
            f"Teacher {name_or_path} is a {config.model_type} model, but a teacher must be one of "
            f"{', '.join(TEACHER_FAMILIES)}."
        )
    if min(as_pair(config.patch_size)) < 1:
        raise ValueError(f"Teacher {name_or_path} has a patch_size of {config.patch_size}: give a sound one.")
    return config
