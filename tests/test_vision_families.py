"""Tiny random models of each family, saved and loaded by `load_vision_model`."""

import pytest
import torch
from conftest import make_raptor, make_teacher, shake
from transformers import (
    BeitConfig,
    BeitModel,
    BertConfig,
    BertModel,
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
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTForImageClassification,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    ViTModel,
    ViTMSNConfig,
    ViTMSNModel,
)
from transformers.models.siglip2.image_processing_pil_siglip2 import convert_image_to_patches

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


@pytest.fixture(params=FAMILIES, scope="module")
def loaded(request, tmp_path_factory):
    """A model as saved, the same as loaded, and its numbers of cls and register tokens."""
    make, cls, registers = FAMILIES[request.param]
    folder = str(tmp_path_factory.mktemp(request.param))
    saved = shake(make().eval())
    saved.save_pretrained(folder)
    return saved, load_vision_model(folder), cls, registers


def embed(model, images):
    """What the first layer reads, of images of the trained size, the patches in order."""
    family = model.config.model_type
    if family == "vit_mae":
        return model.embeddings(images, noise=torch.arange(16.0).expand(len(images), -1))[0]
    if family == "siglip2_vision_model":
        patches = torch.stack([torch.from_numpy(convert_image_to_patches(image.numpy(), 8)) for image in images])
        return model.embeddings(patches, torch.tensor([[4, 4]] * len(images)))
    embeddings = model.embeddings(images)
    return model.pre_layrnorm(embeddings) if family == "clip_vision_model" else embeddings


def final_norm(model):
    return next(getattr(model, name) for name in ("layernorm", "norm", "post_layernorm") if hasattr(model, name))


def test_loads_what_was_saved_frozen(loaded):
    saved, model, _, _ = loaded
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    backbone = saved if type(saved) is type(model) else getattr(saved, "vision_model", saved.base_model)
    weights = backbone.state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, weights[name])


def test_trajectory_is_the_residual_stream_at_any_size(loaded):
    _, model, cls, registers = loaded
    for height, width in [(32, 32), (24, 40)]:
        images = torch.randn(2, 3, height, width)
        states = trajectory(model, images)
        patches = height * width // 64
        assert states.shape == (2, LAYERS + 1, cls + registers + patches, WIDTH)

        slices = token_slices(model.config)
        tokens = range(states.shape[2])
        expected = {"cls": cls, "register": registers, "patch": patches}
        assert {name: len(tokens[where]) for name, where in slices.items()} == {n: m for n, m in expected.items() if m}
        assert [i for where in slices.values() for i in tokens[where]] == list(tokens)

        if (height, width) == (32, 32):
            torch.testing.assert_close(states[:, 0], embed(model, images))
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


def test_a_classifier_lends_no_random_pooler(tmp_path):
    ViTForImageClassification(ViTConfig(**SIZED)).save_pretrained(tmp_path)
    assert load_vision_model(str(tmp_path))(torch.randn(1, 3, 32, 32)).pooler_output is None


def test_mae_hides_nothing(tmp_path):
    mae = shake(ViTMAEForPreTraining(ViTMAEConfig(**MAE)).eval())
    mae.save_pretrained(tmp_path)
    model, images = load_vision_model(str(tmp_path)), torch.randn(2, 3, 32, 48)
    outputs = model(pixel_values=images)
    assert not outputs.mask.any()
    torch.testing.assert_close(outputs.last_hidden_state, model(images).last_hidden_state)
    with pytest.raises(ValueError, match=r"5 tokens where its token layout has 1 and 16 patches.*load_vision_model"):
        trajectory(mae.vit, torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize(
    "layout", ["cls", "patch cls", "cls cls patch", "token patch", "cls register=four patch", "register=-1 patch"]
)
def test_refuses_layouts_that_can_not_be(layout):
    config = ViTMSNConfig(**SIZED)
    config.token_layout = layout.split()
    with pytest.raises(ValueError, match=f"at most once and patch last, got {layout}"):
        token_slices(config)


def test_refuses_what_has_no_trajectory(tmp_path):
    BertModel(BertConfig(**TEXT)).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="layout of bert models is not known"):
        load_vision_model(str(tmp_path / "bert"))
    swin = SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2)
    SwinModel(swin).save_pretrained(tmp_path / "swin")
    model = load_vision_model(str(tmp_path / "swin"), token_layout=["patch"])
    with pytest.raises(ValueError, match=r"a trajectory needs 3 of one shape \(batch, tokens, hidden_size\)"):
        trajectory(model, torch.randn(1, 3, 32, 32))


def test_refuses_what_is_not_whole_or_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"Model .*nothing can't be loaded.*give a Hub name or a folder"):
        load_vision_model(str(tmp_path / "nothing"))
    model = CLIPVisionModel(CLIPVisionConfig(**SIZED))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no weights in safetensors"):
        load_vision_model(str(tmp_path))
    state = {key: value for key, value in model.state_dict().items() if "layers.1.mlp" not in key}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match="lacks 4 of its weights"):
        load_vision_model(str(tmp_path))
