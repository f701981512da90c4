"""Tiny random models of each family, saved and loaded by `load_vision_model`."""

import pytest
import torch
from conftest import make_raptor, make_teacher, shake
from transformers import (
    BeitConfig,
    BeitModel,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    DeiTConfig,
    DeiTModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    IJepaConfig,
    IJepaModel,
    Siglip2Config,
    Siglip2Model,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipConfig,
    SiglipModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTForImageClassification,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    ViTModel,
    ViTMSNConfig,
    ViTMSNModel,
)

from raptor_hf.teachers import load_vision_model, token_slices, trajectory

LAYERS = 3
WIDTH = 16
TINY = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "patch_size": 8,
}
SIZED = TINY | {"image_size": 32}
TEXT = {key: value for key, value in TINY.items() if key != "patch_size"} | {"vocab_size": 9}
NAFLEX = TINY | {"num_patches": 16}
MAE = SIZED | {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
BEIT = SIZED | {"use_relative_position_bias": True}
BOTH = {"text_config": TEXT, "vision_config": SIZED}

# Family: how it is made, its special tokens (cls, registers).
FAMILIES = {
    "raptor": (lambda: make_raptor(hidden_size=16, phase_sizes=[2, 1], image_size=32, patch_size=8), 1, 0),
    "dinov2": (lambda: make_teacher("dinov2", **SIZED), 1, 0),
    "dinov2_with_registers": (lambda: make_teacher("dinov2_with_registers", **SIZED), 1, 4),
    "dinov3": (lambda: DINOv3ViTModel(DINOv3ViTConfig(**SIZED, num_register_tokens=4)), 1, 4),
    "vit": (lambda: ViTModel(ViTConfig(**SIZED)), 1, 0),
    "vit_classifier": (lambda: ViTForImageClassification(ViTConfig(**SIZED)), 1, 0),
    "deit": (lambda: DeiTModel(DeiTConfig(**SIZED)), 1, 1),
    "mae": (lambda: ViTMAEForPreTraining(ViTMAEConfig(**MAE)), 1, 0),
    "beit": (lambda: BeitModel(BeitConfig(**BEIT, use_mean_pooling=False)), 1, 0),
    "beit_mean_pooled": (lambda: BeitModel(BeitConfig(**SIZED, use_absolute_position_embeddings=True)), 1, 0),
    "clip": (lambda: CLIPModel(CLIPConfig(**BOTH)), 1, 0),
    "clip_vision": (lambda: CLIPVisionModel(CLIPVisionConfig(**SIZED)), 1, 0),
    "clip_with_projection": (lambda: CLIPVisionModelWithProjection(CLIPVisionConfig(**SIZED)), 1, 0),
    "siglip": (lambda: SiglipModel(SiglipConfig(**BOTH)), 0, 0),
    "siglip_vision": (lambda: SiglipVisionModel(SiglipVisionConfig(**SIZED)), 0, 0),
    "siglip2": (lambda: Siglip2Model(Siglip2Config(text_config=TEXT, vision_config=NAFLEX)), 0, 0),
    "siglip2_vision": (lambda: Siglip2VisionModel(Siglip2VisionConfig(**NAFLEX)), 0, 0),
    "ijepa": (lambda: IJepaModel(IJepaConfig(**SIZED)), 0, 0),
}


@pytest.fixture(params=FAMILIES)
def loaded(request, tmp_path):
    """A model as saved, the same as loaded, and its numbers of cls and register tokens."""
    make, cls, registers = FAMILIES[request.param]
    saved = shake(make().eval())
    saved.save_pretrained(tmp_path)
    return saved, load_vision_model(str(tmp_path)), cls, registers


def final_norm(model):
    return next(getattr(model, name) for name in ("layernorm", "norm", "post_layernorm") if hasattr(model, name))


@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
def test_trajectory_is_the_residual_stream(loaded, size):
    _, model, cls, registers = loaded
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    images = torch.randn(2, 3, *size)
    states = trajectory(model, images)
    patches = size[0] * size[1] // 64
    assert states.shape == (2, LAYERS + 1, cls + registers + patches, WIDTH)

    slices = token_slices(model.config)
    lengths = {name: len(range(states.shape[2])[where]) for name, where in slices.items()}
    expected = {"cls": cls, "register": registers, "patch": patches}
    assert lengths == {name: length for name, length in expected.items() if length}
    covered = [i for where in slices.values() for i in range(states.shape[2])[where]]
    assert covered == list(range(states.shape[2]))

    outputs = model(images)
    if model.config.model_type == "clip_vision_model":
        # CLIP normalises only the cls token, which it pools.
        torch.testing.assert_close(outputs.last_hidden_state, states[:, -1])
        torch.testing.assert_close(outputs.pooler_output, model.post_layernorm(states[:, -1, 0]))
    else:
        torch.testing.assert_close(outputs.last_hidden_state, final_norm(model)(states[:, -1]))


def test_refuses_an_unknown_family_unless_its_layout_is_stated(tmp_path):
    shake(ViTMSNModel(ViTMSNConfig(**SIZED))).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layout of vit_msn models is not known.*siglip.*--token_layout cls"):
        load_vision_model(str(tmp_path))
    model = load_vision_model(str(tmp_path), token_layout=["cls", "patch"])
    assert token_slices(model.config) == {"cls": slice(0, 1), "patch": slice(1, None)}
    assert trajectory(model, torch.randn(1, 3, 24, 40)).shape == (1, LAYERS + 1, 16, WIDTH)
    model = load_vision_model(str(tmp_path), token_layout=["cls", "register=4", "patch"])
    with pytest.raises(ValueError, match="17 tokens where its token layout has 5 and 16 patches"):
        trajectory(model, torch.randn(1, 3, 32, 32))
