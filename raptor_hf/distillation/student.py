"""The Raptor that a run starts from."""

from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from ..configuration_raptor import RaptorConfig, as_pair
from ..files import read_json
from ..modeling_raptor import RaptorModel, raptor_config_of_teacher
from ..vision_models import load_frozen, read_config
from .arguments import ModelArguments
from .run_folder import RESULTS_NAME


def student_config(
    model_args: ModelArguments, teacher_config: PretrainedConfig, phase_sizes: list[int] | None
) -> RaptorConfig:
    """
    The configuration of the Raptor that `model_args` ask for; no weights are loaded for it.

    Args:
        phase_sizes: layers of each block, given or found. A Raptor whose training goes on has its own.

    Raises:
        ValueError: if what is asked for doesn't fit the teacher.
    """
    if model_args.init_raptor is None:
        return raptor_config_of_teacher(
            teacher_config, init=model_args.init, phase_sizes=phase_sizes, **model_args.block_settings()
        )
    config = read_config(model_args.init_raptor, role="Raptor")
    if config.model_type != RaptorConfig.model_type:
        raise ValueError(
            f"init {model_args.init_raptor} is a {config.model_type} model: give teacher, random, or a Raptor's Hub "
            "name or folder."
        )
    check_fit(config, teacher_config)
    expected = raptor_config_of_teacher(teacher_config, block_assignment=config.layer_blocks)
    for name, of_name in (("image_size", as_pair), ("use_mask_token", bool)):
        own, other = (of_name(getattr(one, name)) for one in (config, expected))
        if own != other:
            raise ValueError(
                f"The Raptor {model_args.init_raptor} has a {name} of {own}, its teacher one of {other}: give a "
                "Raptor of this teacher."
            )
    if config.phase_iterations is not None:
        raise ValueError(
            f"The Raptor {model_args.init_raptor} applies its blocks another number of times than it was trained for: "
            "take phase_iterations out of its configuration."
        )
    return config


def load_student(model_args: ModelArguments, teacher: PreTrainedModel, phase_sizes: list[int] | None) -> RaptorModel:
    """
    The Raptor of [`student_config`], with the teacher's embeddings and final LayerNorm.

    Raises:
        ValueError: as [`student_config`], or if the weights of the Raptor to go on with can't be had.
    """
    if model_args.init_raptor is None:
        return RaptorModel.from_teacher(
            teacher,
            phase_sizes,
            init=model_args.init,
            source_layers=model_args.source_layers,
            **model_args.block_settings(),
        )
    config = student_config(model_args, teacher.config, phase_sizes)
    student = load_frozen(model_args.init_raptor, config, teacher.dtype, trust_remote_code=False, role="Raptor")
    # Of a Raptor that was saved in half precision they are rounded.
    student.take_ends(teacher)
    return student.requires_grad_(True).to(teacher.device)


def earlier_training(init: str | None) -> dict | None:
    """What the Raptor that a run goes on from had cost before, where its folder says so."""
    if init is None or not (Path(init) / RESULTS_NAME).is_file():
        return None
    results = read_json(Path(init) / RESULTS_NAME)
    before, spent = results.get("earlier_training") or {}, {}
    for name in ("images_seen", "wall_time_seconds"):
        counts = [part.get(name, 0) for part in (before, results)] if isinstance(before, dict) else [None]
        if not all(isinstance(count, (int, float)) and count >= 0 for count in counts):
            raise ValueError(f"{Path(init) / RESULTS_NAME} is damaged (its {name} is no number): mend or remove it.")
        spent[name] = sum(counts)
    return spent


def check_fit(student: RaptorConfig, teacher: PretrainedConfig):
    """Raises ValueError unless a Raptor has its teacher's depth, width, patch size, channels and registers."""
    sizes = {
        "depth": (sum(student.phase_sizes), teacher.num_hidden_layers),
        "hidden_size": (student.hidden_size, teacher.hidden_size),
        "patch_size": (as_pair(student.patch_size), as_pair(teacher.patch_size)),
        "num_channels": (student.num_channels, teacher.num_channels),
        "num_register_tokens": (student.num_register_tokens, getattr(teacher, "num_register_tokens", 0)),
    }
    for name, (own, other) in sizes.items():
        if own != other:
            raise ValueError(
                f"The Raptor has a {name} of {own}, but its teacher one of {other}: make it by "
                "RaptorModel.from_teacher."
            )
