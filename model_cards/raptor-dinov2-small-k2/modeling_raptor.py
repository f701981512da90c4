"""Raptor model: a Vision Transformer of a few weight-tied blocks, each applied several times in a row.

Block-Recurrent Dynamics in Vision Transformers, arXiv 2512.19941.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, TransformersKwargs
from transformers.utils.generic import can_return_tuple, maybe_autocast, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_raptor import RaptorConfig, as_pair


class RaptorEmbeddings(nn.Module):
    """Images to tokens: (batch, channels, height, width) -> (batch, 1 + registers + patches, hidden_size)."""

    def __init__(self, config: RaptorConfig):
        super().__init__()
        self.patch_size = as_pair(config.patch_size)
        self.grid_size = tuple(i // p for i, p in zip(as_pair(config.image_size), self.patch_size))
        self.antialias = config.interpolate_antialias
        self.num_channels = config.num_channels

        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.mask_token = nn.Parameter(torch.zeros(1, config.hidden_size)) if config.use_mask_token else None
        self.register_tokens = (
            nn.Parameter(torch.zeros(1, config.num_register_tokens, config.hidden_size))
            if config.num_register_tokens
            else None
        )
        num_positions = 1 + self.grid_size[0] * self.grid_size[1]
        self.position_embeddings = nn.Parameter(torch.zeros(1, num_positions, config.hidden_size))
        self.patch_embeddings = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=self.patch_size, stride=self.patch_size
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def interpolate_position_embeddings(self, grid_height: int, grid_width: int) -> torch.Tensor:
        """Position embeddings for a grid of patches: (1, 1 + grid_height * grid_width, hidden_size)."""
        # Tracing and exporting always interpolate: the grid of the example must not be frozen into the program.
        traced = torch.jit.is_tracing() or torch.compiler.is_exporting()
        if not traced and (grid_height, grid_width) == self.grid_size:
            return self.position_embeddings
        cls_position, patch_positions = self.position_embeddings[:, :1], self.position_embeddings[:, 1:]
        patch_positions = patch_positions.unflatten(1, self.grid_size).permute(0, 3, 1, 2)
        # In float32: bicubic interpolation in half precision shifts the embeddings.
        patch_positions = nn.functional.interpolate(
            patch_positions.float(),
            size=(grid_height, grid_width),
            mode="bicubic",
            align_corners=False,
            antialias=self.antialias,
        ).to(cls_position.dtype)
        return torch.cat((cls_position, patch_positions.flatten(2).transpose(1, 2)), dim=1)

    def forward(self, pixel_values: torch.Tensor, bool_masked_pos: torch.Tensor | None = None) -> torch.Tensor:
        batch_size, num_channels, height, width = pixel_values.shape
        if num_channels != self.num_channels:
            raise ValueError(f"The model takes images of {self.num_channels} channels, got {num_channels}.")
        patches = self.patch_embeddings(pixel_values.to(self.patch_embeddings.weight.dtype))
        patches = patches.flatten(2).transpose(1, 2)
        if bool_masked_pos is not None:
            if self.mask_token is None:
                raise ValueError("bool_masked_pos needs a mask token: set use_mask_token=True in the configuration.")
            patches = torch.where(bool_masked_pos.bool().unsqueeze(-1), self.mask_token.to(patches.dtype), patches)
        tokens = torch.cat((self.cls_token.expand(batch_size, -1, -1).to(patches.dtype), patches), dim=1)
        # A plain division: as an int, an exported program would keep the example's grid.
        tokens = tokens + self.interpolate_position_embeddings(
            height // self.patch_size[0], width // self.patch_size[1]
        )
        if self.register_tokens is not None:
            registers = self.register_tokens.expand(batch_size, -1, -1).to(tokens.dtype)
            tokens = torch.cat((tokens[:, :1], registers, tokens[:, 1:]), dim=1)
        return self.dropout(tokens)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
):
    attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        attn_weights = attn_weights + attention_mask
    attn_weights = nn.functional.softmax(attn_weights, dim=-1)
    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
    attn_output = torch.matmul(attn_weights, value)
    return attn_output.transpose(1, 2).contiguous(), attn_weights


class RaptorAttention(nn.Module):
    """Multi-head self-attention, with queries, keys and values in one matrix product."""

    def __init__(self, config: RaptorConfig):
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_probs_dropout_prob
        self.is_causal = False
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        input_shape = hidden_states.shape[:-1]
        qkv = self.qkv(hidden_states).view(*input_shape, 3, self.num_heads, self.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(attn_output.reshape(*input_shape, -1)), attn_weights


class RaptorMLP(nn.Module):
    """`act(fc1 x)` through fc2, or, for `hidden_act="swiglu"`, `silu(gate) * up` with both halves made by fc1."""

    def __init__(self, config: RaptorConfig):
        super().__init__()
        self.gated = config.hidden_act == "swiglu"
        self.activation = ACT2FN["silu" if self.gated else config.hidden_act]
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size * (2 if self.gated else 1))
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = self.fc1(hidden_states)
        if self.gated:
            gate, up = hidden_states.chunk(2, dim=-1)
            return self.fc2(self.activation(gate) * up)
        return self.fc2(self.activation(hidden_states))


class RaptorDepthScaling(nn.Module):
    """The scaling vectors t1, t2, t3 of depth steps: shape (...) -> (..., 3, hidden_size)."""

    def __init__(self, config: RaptorConfig):
        super().__init__()
        self.fc1 = nn.Linear(1, config.depth_scaling_width)
        self.fc2 = nn.Linear(config.depth_scaling_width, 3 * config.hidden_size)

    def forward(self, depth_step: torch.Tensor) -> torch.Tensor:
        # t3 multiplies the whole residual stream, so it is never rounded to autocast's precision.
        with maybe_autocast(device_type=depth_step.device.type, enabled=False):
            # As a matrix: quantised layers take nothing less.
            scaling = 1 + self.fc2(nn.functional.silu(self.fc1(depth_step.reshape(-1, 1))))
        return scaling.view(*depth_step.shape, 3, -1)


class RaptorDropPath(nn.Module):
    """Stochastic depth: drops a residual branch for whole samples during training, and scales the others up."""

    def __init__(self, drop_prob: float):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return hidden_states
        keep_prob = 1 - self.drop_prob
        mask = hidden_states.new_empty(hidden_states.shape[0], 1, 1).bernoulli_(keep_prob)
        return hidden_states * (mask / keep_prob)


class RaptorBlock(GradientCheckpointingLayer):
    """
    One application of a weight-tied block (arXiv 2512.19941):

        u   = x + t1 * g1 * Attention(LayerNorm1(x))
        out = t3 * (u + t2 * g2 * MLP(LayerNorm2(u)))

    with LayerScale vectors g1, g2 and the depth scaling t1, t2, t3 of the depth step.
    """

    def __init__(self, config: RaptorConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = RaptorAttention(config)
        self.layer_scale1 = nn.Parameter(torch.full((config.hidden_size,), float(config.layerscale_value)))
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = RaptorMLP(config)
        self.layer_scale2 = nn.Parameter(torch.full((config.hidden_size,), float(config.layerscale_value)))
        self.depth_scaling = RaptorDepthScaling(config) if config.depth_scaling else None
        self.drop_path = RaptorDropPath(config.drop_path_rate)

    def forward(
        self,
        hidden_states: torch.Tensor,
        depth_step: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """
        Args:
            hidden_states: (batch, tokens, hidden_size).
            depth_step: the 1-based layer number, of shape () for the whole batch or (batch,) for each sample.

        Returns:
            (batch, tokens, hidden_size).
        """
        scale1, scale2, out_scale = self.layer_scale1, self.layer_scale2, None
        if self.depth_scaling is not None:
            # Not in the dtype of the depth scaling's own weights, which may be quantised.
            scaling = self.depth_scaling(depth_step.to(scale1.dtype))
            t1, t2, out_scale = scaling.unsqueeze(-2).unbind(-3)
            scale1, scale2 = t1 * scale1, t2 * scale2
        attn_output, _ = self.attention(self.norm1(hidden_states), attention_mask=attention_mask, **kwargs)
        hidden_states = hidden_states + self.drop_path(scale1 * attn_output)
        hidden_states = hidden_states + self.drop_path(scale2 * self.mlp(self.norm2(hidden_states)))
        return hidden_states if out_scale is None else out_scale * hidden_states


def copy_code(folder: str | Path):
    """Copies this file and the configuration's into a model's folder, if it isn't where they are."""
    for source in (Path(__file__), Path(__file__).with_name("configuration_raptor.py")):
        target = Path(folder, source.name)
        if not target.exists() or not target.samefile(source):
            shutil.copyfile(source, target)


def check_shards(folder: str | Path | None, subfolder: str = ""):
    """Raises ValueError if the index of a local folder's weights names a file that doesn't lie beside it."""
    index = Path(folder or "", subfolder, SAFE_WEIGHTS_INDEX_NAME)
    if folder is None or not index.is_file():
        return
    try:
        names = list(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of weights: get the model anew.") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            raise ValueError(f"{index} names the file {name}, which doesn't lie beside it: such a model isn't loaded.")


class RaptorPreTrainedModel(PreTrainedModel):
    config: RaptorConfig
    config_class = RaptorConfig
    base_model_prefix = "raptor"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["RaptorEmbeddings", "RaptorBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": RaptorBlock, "attentions": RaptorAttention}
    _input_embed_layer = "patch_embeddings"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            init.trunc_normal_(module.weight, std=std)
        elif isinstance(module, RaptorEmbeddings):
            init.trunc_normal_(module.position_embeddings, std=std)
            init.trunc_normal_(module.cls_token, std=std)
            for token in (module.mask_token, module.register_tokens):
                if token is not None:
                    init.zeros_(token)
        elif isinstance(module, RaptorBlock):
            init.constant_(module.layer_scale1, self.config.layerscale_value)
            init.constant_(module.layer_scale2, self.config.layerscale_value)
            if module.depth_scaling is not None:
                # From here, as Transformers skips modules of custom code that hold no parameter of their own.
                init.normal_(module.depth_scaling.fc2.weight, std=1e-4)
                init.normal_(module.depth_scaling.fc2.bias, std=1e-4)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Transformers' own, but pickled weights are not read unless `use_safetensors=False` asks for it."""
        if kwargs.get("use_safetensors") is None:
            kwargs["use_safetensors"] = True
        check_shards(pretrained_model_name_or_path, kwargs.get("subfolder", ""))
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Nothing: the folder of any Raptor serves every auto class, see `save_pretrained`."""

    def save_pretrained(self, save_directory, is_main_process: bool = True, **kwargs):
        """Transformers' own, and the code for those who have only torch and transformers: these two files."""
        self.config.auto_map = {
            "AutoConfig": "configuration_raptor.RaptorConfig",
            "AutoModel": "modeling_raptor.RaptorModel",
            "AutoBackbone": "modeling_raptor.RaptorBackbone",
            "AutoModelForImageClassification": "modeling_raptor.RaptorForImageClassification",
        }
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process:
            copy_code(save_directory)

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        # The last step of `push_to_hub`. It finds Transformers' generic card where the repository had none.
        copy_code(working_dir)
        try:
            from raptor_hf.hub import replace_generic_card
        except ImportError:
            pass  # Only the two files that travel with the weights are here.
        else:
            replace_generic_card(self, working_dir, repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)


class RaptorModel(RaptorPreTrainedModel):
    """
    The bare Raptor backbone, a drop-in for `Dinov2Model`.

    Args:
        config ([`RaptorConfig`]): the model's configuration.
    """

    def __init__(self, config: RaptorConfig):
        super().__init__(config)
        self.embeddings = RaptorEmbeddings(config)
        self.blocks = nn.ModuleList(RaptorBlock(config) for _ in config.phase_sizes)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        bool_masked_pos: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        phase_iterations: list[int] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """
        Args:
            pixel_values: (batch, channels, height, width), height and width at least one patch.
            bool_masked_pos: (batch, patches), true where the mask token replaces a patch.
            attention_mask: (batch, tokens), true for the tokens to attend to.
            phase_iterations: how many times each block is applied; see [`RaptorConfig`].
            output_hidden_states: whether to return the states before the final LayerNorm: the embeddings and each
                layer's output, L + 1 tensors of (batch, tokens, hidden_size).
            output_attentions: whether to return the L attention maps, (batch, heads, tokens, tokens); needs the
                `"eager"` attention implementation.
            return_dict: whether to return a `BaseModelOutputWithPooling` rather than a tuple.

        Returns:
            `last_hidden_state` (batch, tokens, hidden_size) after the final LayerNorm, `pooler_output` (batch,
            hidden_size), its cls token, and what was asked for.

        Raises:
            ValueError: if the channels don't match the configuration, or `phase_iterations` not the phases.
        """
        hidden_states = self.embeddings(pixel_values, bool_masked_pos)
        attention_mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
        )
        # Not as a method of the configuration, which torch.compile of torch 2.7 can't look up.
        schedule = RaptorConfig.schedule(self.config, phase_iterations)
        depth_steps = torch.tensor([step for _, step in schedule], device=hidden_states.device)
        for (block, _), depth_step in zip(schedule, depth_steps):
            hidden_states = self.blocks[block](hidden_states, depth_step, attention_mask, **kwargs)
        last_hidden_state = self.layernorm(hidden_states)
        return BaseModelOutputWithPooling(last_hidden_state=last_hidden_state, pooler_output=last_hidden_state[:, 0])

    @classmethod
    def from_teacher(
        cls,
        teacher: PreTrainedModel,
        phase_sizes: list[int] | None = None,
        init: str = "teacher",
        source_layers: list[int] | None = None,
        **config_kwargs,
    ) -> "RaptorModel":
        """
        A Raptor of a teacher: its embeddings and final LayerNorm, and blocks to be distilled.

        Args:
            teacher: a DINOv2 model, with or without registers.
            phase_sizes: layers of each block; their sum must be the teacher's depth. May be left out where
                `block_assignment` is given.
            init: `"teacher"` copies each block from one of the teacher's layers, with a depth scaling of exactly 1, so
                that a phase of size 1 is the teacher's layer. `"random"` draws the blocks anew.
            source_layers: for `init="teacher"`, the layer (1-based) that each block is copied from. Defaults to the
                middle one of its phase.
            **config_kwargs: further fields of [`RaptorConfig`]. By default they are the teacher's, but for stochastic
                depth, which is off, and the start of random blocks.

        Returns:
            The model, in the teacher's dtype and on its device, in evaluation mode.

        Raises:
            ValueError: if the teacher is of another family, or the phases or the configuration don't fit it.
        """
        config = raptor_config_of_teacher(teacher.config, phase_sizes=phase_sizes, init=init, **config_kwargs)
        model = cls(config)
        raptor = model.base_model
        raptor.take_ends(teacher)
        if init == "teacher":
            raptor._copy_blocks(teacher.base_model.encoder.layer, source_layers)
        elif source_layers is not None:
            raise ValueError('source_layers goes with init="teacher": random blocks have no source.')
        return model.to(device=teacher.device, dtype=teacher.dtype).eval()

    def take_ends(self, teacher: PreTrainedModel):
        """Takes a DINOv2 model's embeddings and final LayerNorm."""
        encoder = teacher.base_model
        self.embeddings.load_state_dict(_embeddings_state(encoder))
        self.layernorm.load_state_dict(encoder.layernorm.state_dict())

    @torch.no_grad()
    def _copy_blocks(self, layers: nn.ModuleList, source_layers: list[int] | None):
        layers_of_block = [[] for _ in self.blocks]
        for layer, block in enumerate(self.config.layer_blocks, start=1):
            layers_of_block[block].append(layer)
        if source_layers is None:
            source_layers = [members[len(members) // 2] for members in layers_of_block]
        if len(source_layers) != len(self.blocks) or not all(1 <= layer <= len(layers) for layer in source_layers):
            raise ValueError(
                f"source_layers must name a layer from 1 to {len(layers)} for each of the {len(self.blocks)} blocks, "
                f"got {source_layers}."
            )
        for block, layer in zip(self.blocks, source_layers):
            missing, unexpected = block.load_state_dict(_block_state(layers[layer - 1]), strict=False)
            unknown = unexpected + [key for key in missing if not key.startswith("depth_scaling.")]
            if unknown:
                raise ValueError(f"This teacher's layers don't fit a Raptor block: {', '.join(unknown)}.")
            if block.depth_scaling is not None:
                block.depth_scaling.fc2.weight.zero_()
                block.depth_scaling.fc2.bias.zero_()


def raptor_config_of_teacher(teacher_config, init: str = "teacher", **config_kwargs) -> RaptorConfig:
    """
    The [`RaptorConfig`] that fits a DINOv2 configuration; `config_kwargs` override its fields.

    Raises:
        ValueError: if the teacher is of another family, or what is asked for doesn't fit it.
    """
    families = ("dinov2", "dinov2_with_registers")
    if teacher_config.model_type not in families:
        raise ValueError(
            f"A teacher must be one of {', '.join(families)}, but this model is of type '{teacher_config.model_type}'."
        )
    if init not in ("teacher", "random"):
        raise ValueError(f'init must be "teacher" or "random", got {init!r}.')
    names = (
        "hidden_size num_attention_heads hidden_dropout_prob attention_probs_dropout_prob initializer_range "
        "layer_norm_eps image_size patch_size num_channels qkv_bias problem_type"
    )
    fields = {name: getattr(teacher_config, name) for name in names.split()}
    if config_kwargs.get("num_labels") == teacher_config.num_labels:
        config_kwargs.pop("num_labels")
    if not {"num_labels", "id2label", "label2id"} & set(config_kwargs):
        fields |= {"id2label": teacher_config.id2label, "label2id": teacher_config.label2id}
    with_registers = teacher_config.model_type == "dinov2_with_registers"
    # Whatever the registers family's configuration says, its embeddings always hold a mask token.
    fields["use_mask_token"] = with_registers or teacher_config.use_mask_token
    fields["interpolate_antialias"] = with_registers
    fields["num_register_tokens"] = teacher_config.num_register_tokens if with_registers else 0
    embedded = "hidden_size image_size patch_size num_channels num_register_tokens use_mask_token"
    for name in embedded.split():
        if config_kwargs.get(name, fields[name]) != fields[name]:
            raise ValueError(
                f"The embeddings are the teacher's, whose {name} is {fields[name]}, not {config_kwargs[name]}: leave "
                f"{name} out. (Images of other sizes run without it.)"
            )
    inner = int(teacher_config.hidden_size * teacher_config.mlp_ratio)
    if teacher_config.use_swiglu_ffn:
        mlp = {"hidden_act": "swiglu", "intermediate_size": (int(inner * 2 / 3) + 7) // 8 * 8}
    else:
        mlp = {"hidden_act": teacher_config.hidden_act, "intermediate_size": inner}
    copied = mlp | {name: fields[name] for name in ("hidden_size", "num_attention_heads", "qkv_bias")}
    if init == "teacher":
        for name, value in copied.items():
            if config_kwargs.get(name, value) != value:
                raise ValueError(
                    f'init="teacher" copies the teacher\'s layers, whose {name} is {value}, not '
                    f'{config_kwargs[name]}: leave {name} out, or use init="random".'
                )
    elif "hidden_act" in config_kwargs and "intermediate_size" not in config_kwargs:
        mlp["intermediate_size"] = None
    config = RaptorConfig(**(fields | mlp | config_kwargs))
    if sum(config.phase_sizes) != teacher_config.num_hidden_layers:
        raise ValueError(
            f"phase_sizes {config.phase_sizes} sum to {sum(config.phase_sizes)} layers, but the teacher has "
            f"{teacher_config.num_hidden_layers}."
        )
    return config


def _embeddings_state(teacher: nn.Module) -> dict[str, torch.Tensor]:
    """State dict of a DINOv2 model's embeddings under Raptor's names."""
    state = teacher.embeddings.state_dict()
    return {key.replace("patch_embeddings.projection", "patch_embeddings"): value for key, value in state.items()}


def _block_state(layer: nn.Module) -> dict[str, torch.Tensor]:
    """State dict of a DINOv2 layer under Raptor's names, with its separate projections fused."""
    state = layer.state_dict()
    for kind in ("weight", "bias"):
        for fused, parts in (
            ("attention.qkv", ("attention.q_proj", "attention.k_proj", "attention.v_proj")),
            ("mlp.fc1", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            if f"{parts[0]}.{kind}" in state:
                state[f"{fused}.{kind}"] = torch.cat([state.pop(f"{part}.{kind}") for part in parts])
    renamed = {"layer_scale1.lambda1": "layer_scale1", "layer_scale2.lambda1": "layer_scale2"}
    renamed |= {f"mlp.down_proj.{kind}": f"mlp.fc2.{kind}" for kind in ("weight", "bias")}
    return {renamed.get(key, key): value for key, value in state.items()}


class RaptorBackbone(BackboneMixin, RaptorModel):
    """
    A Raptor as the backbone of dense prediction heads, as `Dinov2Backbone`. From a folder it is loaded with its own
    `from_pretrained`: that of Transformers' `AutoBackbone` takes names on the Hub only.
    """

    def __init__(self, config: RaptorConfig):
        super().__init__(config)
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)

    @can_return_tuple
    @filter_output_hidden_states
    def forward(
        self,
        pixel_values: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BackboneOutput:
        """
        Args:
            pixel_values: (batch, channels, height, width).

        Returns:
            `feature_maps`, one for each of `out_features`: (batch, hidden_size, height / patch, width / patch), or
            (batch, tokens, hidden_size) with `reshape_hidden_states=False`. And what [`RaptorModel`] was asked for.

        Raises:
            ValueError: if `phase_iterations` changes the depth, which the stages are numbers of.
        """
        # Not super(): BackboneMixin comes first and has an abstract forward.
        outputs = RaptorModel.forward(self, pixel_values, attention_mask=attention_mask, **kwargs)
        if len(outputs.hidden_states) != len(self.stage_names):
            raise ValueError(
                f"{len(outputs.hidden_states)} states were computed for {len(self.stage_names)} stages: give "
                "phase_iterations when the backbone is made, as in RaptorBackbone.from_pretrained(..., "
                "phase_iterations=[...])."
            )
        height, width = (size // patch for size, patch in zip(pixel_values.shape[-2:], self.embeddings.patch_size))
        feature_maps = ()
        for stage, hidden_state in zip(self.stage_names, outputs.hidden_states):
            if stage not in self.out_features:
                continue
            if self.config.apply_layernorm:
                hidden_state = self.layernorm(hidden_state)
            if self.config.reshape_hidden_states:
                patches = hidden_state[:, 1 + self.config.num_register_tokens :]
                hidden_state = patches.transpose(1, 2).unflatten(2, (height, width)).contiguous()
            feature_maps += (hidden_state,)
        return BackboneOutput(
            feature_maps=feature_maps, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    @classmethod
    def from_teacher(cls, teacher: PreTrainedModel, *args, **kwargs) -> "RaptorBackbone":
        """As [`RaptorModel.from_teacher`]; of a backbone, the feature maps are the teacher's too."""
        if isinstance(teacher, BackboneMixin):
            names = ["apply_layernorm", "reshape_hidden_states"]
            if not {"out_features", "out_indices", "phase_iterations"} & set(kwargs):
                names.append("out_features")
            kwargs = {name: getattr(teacher.config, name) for name in names} | kwargs
        return RaptorModel.from_teacher.__func__(cls, teacher, *args, **kwargs)


class RaptorForImageClassification(RaptorPreTrainedModel):
    """A Raptor with a linear head on [cls, mean of the patch tokens], as `Dinov2ForImageClassification`."""

    def __init__(self, config: RaptorConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.raptor = RaptorModel(config)
        self.classifier = (
            nn.Linear(2 * config.hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """
        Args:
            pixel_values: (batch, channels, height, width).
            labels: (batch,), class indices (or regression targets with `num_labels` of 1), for a loss.

        Returns:
            `logits` (batch, num_labels), `loss` if `labels` is given, and what [`RaptorModel`] was asked for.
        """
        outputs = self.raptor(pixel_values, attention_mask=attention_mask, **kwargs)
        tokens = outputs.last_hidden_state
        patch_mean = tokens[:, 1 + self.config.num_register_tokens :].mean(dim=1)
        logits = self.classifier(torch.cat((tokens[:, 0], patch_mean), dim=1))
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    @classmethod
    def from_teacher(cls, teacher: PreTrainedModel, *args, **kwargs) -> "RaptorForImageClassification":
        """As [`RaptorModel.from_teacher`]; the head is the teacher's, if it has one and the labels are the same."""
        model = RaptorModel.from_teacher.__func__(cls, teacher, *args, **kwargs)
        head = getattr(teacher, "classifier", None)
        if head is not None and model.config.id2label == teacher.config.id2label:
            model.classifier.load_state_dict(head.state_dict())
        return model


__all__ = ["RaptorBackbone", "RaptorForImageClassification", "RaptorModel", "RaptorPreTrainedModel"]
