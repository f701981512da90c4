"""Raptor model configuration."""

import math
from collections import Counter

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneConfigMixin
from transformers.utils import logging

logger = logging.get_logger(__name__)
MAX_LAYERS = 10_000
# Fields that a saved configuration may have or not.
OPTIONAL_FIELDS = {
    *("auto_map", "num_hidden_layers", "num_labels", "torch_dtype", "_name_or_path"),
    # What Transformers itself may leave there: of its Trainer, of quantisation, of earlier versions.
    *("use_cache", "quantization_config", "_attn_implementation", "attn_implementation", "pruned_heads"),
}


@strict
class RaptorConfig(BackboneConfigMixin, PreTrainedConfig):
    r"""
    Configuration of a [`RaptorModel`]: a Vision Transformer whose `num_hidden_layers` layers are `len(phase_sizes)`
    weight-tied blocks, each applied several times in a row (arXiv 2512.19941). The defaults describe a Raptor of
    DINOv2 ViT-B/14.

    Args:
        phase_sizes (`list[int]`, *optional*, defaults to `[7, 3, 2]`):
            How many layers each block stands for, in order of depth. Their sum is `num_hidden_layers`.
        block_assignment (`list[int]`, *optional*):
            The block of each layer, for assignments that are not contiguous. Block `j` must occur `phase_sizes[j]`
            times; `phase_sizes` may be left out. By default block 0 stands for the first `phase_sizes[0]` layers, and
            so on.
        phase_iterations (`list[int]`, *optional*):
            How many times each block is applied, if not `phase_sizes` times. The depth steps are then spread evenly
            over the phase's range. An experiment: the block was trained for `phase_sizes` applications.
        hidden_size (`int`, *optional*, defaults to 768):
            Width of the hidden states.
        num_attention_heads (`int`, *optional*, defaults to 12):
            Attention heads of each block; must divide `hidden_size`.
        hidden_act (`str`, *optional*, defaults to `"gelu"`):
            Activation of the MLP. `"swiglu"` makes it a gated MLP with SiLU.
        intermediate_size (`int`, *optional*):
            Inner width of the MLP (of each of the two halves if gated). Defaults to `4 * hidden_size`.
        hidden_dropout_prob (`float`, *optional*, defaults to 0.0):
            Dropout on the embeddings.
        attention_probs_dropout_prob (`float`, *optional*, defaults to 0.0):
            Dropout on the attention probabilities.
        initializer_range (`float`, *optional*, defaults to 0.02):
            Standard deviation of the weights at random start.
        layer_norm_eps (`float`, *optional*, defaults to 1e-06):
            Epsilon of every LayerNorm.
        qkv_bias (`bool`, *optional*, defaults to `True`):
            Whether queries, keys and values have a bias.
        layerscale_value (`float`, *optional*, defaults to 1e-05):
            LayerScale at random start.
        drop_path_rate (`float`, *optional*, defaults to 0.0):
            Stochastic depth rate, the same for every layer, per sample.
        depth_scaling (`bool`, *optional*, defaults to `True`):
            Whether a block sees the depth step, through three scaling vectors that a small MLP makes of it. Without,
            the recurrence is autonomous.
        depth_scaling_width (`int`, *optional*, defaults to 16):
            Hidden width of that small MLP.
        image_size (`int` or `list[int]`, *optional*, defaults to 224):
            Image height and width that the position embeddings are stored for, in pixels.
        patch_size (`int` or `list[int]`, *optional*, defaults to 14):
            Patch height and width in pixels.
        num_channels (`int`, *optional*, defaults to 3):
            Channels of the images.
        num_register_tokens (`int`, *optional*, defaults to 0):
            Register tokens, placed between cls and patches.
        use_mask_token (`bool`, *optional*, defaults to `True`):
            Whether there is a mask token for `bool_masked_pos`.
        interpolate_antialias (`bool`, *optional*, defaults to `False`):
            Whether bicubic interpolation of the position embeddings is antialiased (DINOv2 with registers: yes).
        apply_layernorm (`bool`, *optional*, defaults to `True`):
            Backbone only: whether feature maps pass through the final LayerNorm.
        reshape_hidden_states (`bool`, *optional*, defaults to `True`):
            Backbone only: whether feature maps are `(batch_size, hidden_size, height, width)`.
        out_features (`list[str]`, *optional*):
            Backbone only: the stages to return, of `"stem"`, `"stage1"`, ... `"stage{num_hidden_layers}"`.
        out_indices (`list[int]`, *optional*):
            Backbone only: the same by index.

    Raises:
        ValueError: if fields contradict each other; the message names the field and the reason.

    Example:

    ```python
    >>> from raptor_hf import RaptorConfig
    >>> RaptorConfig(phase_sizes=[7, 3, 2]).num_hidden_layers
    12
    ```
    """

    model_type = "raptor"

    phase_sizes: list[int] | tuple[int, ...] | None = None
    block_assignment: list[int] | tuple[int, ...] | None = None
    phase_iterations: list[int] | tuple[int, ...] | None = None
    hidden_size: int = 768
    num_attention_heads: int = 12
    hidden_act: str = "gelu"
    intermediate_size: int | None = None
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-6
    qkv_bias: bool = True
    layerscale_value: float | int = 1e-5
    drop_path_rate: float | int = 0.0
    depth_scaling: bool = True
    depth_scaling_width: int = 16
    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 14
    num_channels: int = 3
    num_register_tokens: int = 0
    use_mask_token: bool = True
    interpolate_antialias: bool = False
    apply_layernorm: bool = True
    reshape_hidden_states: bool = True
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs):
        if self.phase_sizes is None:
            if self.block_assignment is None:
                self.phase_sizes = [7, 3, 2]
            else:
                counts = Counter(self.block_assignment)
                blocks = min(max(counts, default=-1) + 1, len(self.block_assignment))
                self.phase_sizes = [counts[j] for j in range(blocks)]
        self.phase_sizes = list(self.phase_sizes)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        self._check_recurrence()
        self._check_sizes()
        num_hidden_layers = kwargs.pop("num_hidden_layers", None)
        if num_hidden_layers not in (None, self.num_hidden_layers):
            raise ValueError(
                f"num_hidden_layers is the sum of the phase sizes, {self.num_hidden_layers}, not {num_hidden_layers}: "
                "set phase_sizes instead."
            )
        kwargs.pop("stage_names", None)
        self.set_output_features_output_indices(
            out_indices=kwargs.pop("out_indices", None), out_features=kwargs.pop("out_features", None)
        )
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        # Transformers would set overrides on the finished configuration, where nothing checks that they fit.
        overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in cls.__annotations__}
        unknown = sorted(set(config_dict) - set(cls().to_dict()) - OPTIONAL_FIELDS)
        if unknown:
            logger.warning(
                f"Fields that this version of Raptor doesn't know and doesn't use: {', '.join(unknown)}. Was the "
                "model saved by a later one?"
            )
        return super().from_dict(config_dict | overrides, **kwargs)

    def to_dict(self):
        output = super().to_dict()
        if output["out_features"] == self.stage_names[-1:]:
            # Not stored: the default, the last stage, follows the depth.
            output["out_features"] = output["out_indices"] = None
        return output

    @property
    def num_hidden_layers(self) -> int:
        """Depth: how many times blocks are applied in all."""
        return sum(self.phase_iterations or self.phase_sizes)

    @num_hidden_layers.setter
    def num_hidden_layers(self, value):
        # NotImplementedError is what Transformers expects of a derived attribute.
        if value != self.num_hidden_layers:
            raise NotImplementedError(
                f"num_hidden_layers is {self.num_hidden_layers}, the sum of the phase sizes, and can't be set to "
                f"{value}: set phase_sizes instead."
            )

    @property
    def stage_names(self) -> list[str]:
        return ["stem"] + [f"stage{layer}" for layer in range(1, self.num_hidden_layers + 1)]

    def schedule(self, phase_iterations: list[int] | None = None) -> list[tuple[int, float]]:
        """
        The recurrence written out: `(block index, depth step)` of each block application, in order.

        Depth steps are the 1-based layer numbers. A phase over layers s+1..e that is applied another number of times
        than e-s spreads its steps evenly from s+1 to e (the middle, if applied once).

        Args:
            phase_iterations (`list[int]`, *optional*): applications of each block, at least 1 each. Defaults to the
                configuration's.

        Raises:
            ValueError: if `phase_iterations` doesn't fit the phases.
        """
        iterations = phase_iterations if phase_iterations is not None else self.phase_iterations
        if iterations is None:
            return [(block, float(layer)) for layer, block in enumerate(self.layer_blocks, start=1)]
        self._check_iterations(iterations)
        schedule, start = [], 0
        for block, (size, count) in enumerate(zip(self.phase_sizes, iterations)):
            first, last = start + 1, start + size
            for i in range(count):
                fraction = i / (count - 1) if count > 1 else 0.5
                schedule.append((block, first + fraction * (last - first)))
            start = last
        return schedule

    @property
    def layer_blocks(self) -> list[int]:
        """The block of each trained layer: `sum(phase_sizes)` indices."""
        if self.block_assignment is not None:
            return list(self.block_assignment)
        return [block for block, size in enumerate(self.phase_sizes) for _ in range(size)]

    def _check_recurrence(self):
        if not self.phase_sizes or min(self.phase_sizes) < 1:
            raise ValueError(f"phase_sizes must be one or more sizes of at least 1, got {self.phase_sizes}.")
        if sum(self.phase_sizes) > MAX_LAYERS:
            raise ValueError(f"phase_sizes must not sum to more than {MAX_LAYERS} layers.")
        if self.block_assignment is not None:
            self.block_assignment = list(self.block_assignment)
            counts = Counter(self.block_assignment)
            if counts != Counter(dict(enumerate(self.phase_sizes))):
                raise ValueError(
                    f"block_assignment {self.block_assignment} must name block j exactly phase_sizes[j] times, but "
                    f"phase_sizes is {self.phase_sizes}."
                )
        if self.phase_iterations is not None:
            self.phase_iterations = list(self.phase_iterations)
            self._check_iterations(self.phase_iterations)

    def _check_iterations(self, iterations):
        if self.block_assignment is not None:
            raise ValueError("phase_iterations needs contiguous phases: leave block_assignment unset.")
        whole = isinstance(iterations, (list, tuple)) and all(type(count) is int for count in iterations)
        if not whole or len(iterations) != len(self.phase_sizes) or min(iterations) < 1:
            raise ValueError(
                f"phase_iterations must give each of the {len(self.phase_sizes)} phases at least 1 "
                f"application, in whole numbers, got {iterations}."
            )
        if sum(iterations) > MAX_LAYERS:
            raise ValueError(f"phase_iterations must not sum to more than {MAX_LAYERS} layers.")

    def _check_sizes(self):
        if self.hidden_size < 1 or self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads must divide hidden_size, got {self.num_attention_heads} heads for a hidden size "
                f"of {self.hidden_size}."
            )
        for name in ("intermediate_size", "depth_scaling_width", "num_channels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.num_register_tokens < 0:
            raise ValueError(f"num_register_tokens must be at least 0, got {self.num_register_tokens}.")
        for name in ("drop_path_rate", "hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is a probability below 1, got {getattr(self, name)}.")
        for name in ("initializer_range", "layerscale_value"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)}.")
        if not 0 < self.layer_norm_eps < math.inf:
            raise ValueError(f"layer_norm_eps must be positive, got {self.layer_norm_eps}.")
        if self.hidden_act != "swiglu" and self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act must be swiglu or one of {', '.join(ACT2FN)}, got {self.hidden_act}.")
        image, patch = as_pair(self.image_size, "image_size"), as_pair(self.patch_size, "patch_size")
        if any(i < p for i, p in zip(image, patch)):
            raise ValueError(f"image_size {image} must be at least patch_size {patch}.")


def as_pair(size, name: str = "size") -> tuple[int, int]:
    """(height, width) of a size given as one number or two. Raises ValueError on anything else."""
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise ValueError(f"{name} must be one positive number or two, (height, width), got {size!r}.")
    return pair


__all__ = ["RaptorConfig"]
