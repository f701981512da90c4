"""RaptorBackbone: the feature maps of Dinov2's backbone, and a place inside Transformers' dense prediction models."""

import pytest
import torch
from conftest import TINY, make_raptor, make_teacher
from torch.testing import assert_close
from transformers import (
    Dinov2Backbone,
    Dinov2Config,
    Dinov2WithRegistersBackbone,
    DPTConfig,
    DPTForDepthEstimation,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)

from raptor_hf import RaptorBackbone, RaptorConfig, RaptorModel


@pytest.mark.parametrize("apply_layernorm", [True, False])
@pytest.mark.parametrize("reshape_hidden_states", [True, False])
def test_feature_maps_are_the_teachers(family, apply_layernorm, reshape_hidden_states):
    options = {
        "out_features": ["stem", "stage2", "stage4"],
        "apply_layernorm": apply_layernorm,
        "reshape_hidden_states": reshape_hidden_states,
    }
    teacher = make_teacher(family, **options)
    backbone_class = Dinov2Backbone if family == "dinov2" else Dinov2WithRegistersBackbone
    dinov2 = backbone_class(teacher.config).eval()
    dinov2.load_state_dict(teacher.state_dict())
    raptor = RaptorBackbone.from_teacher(teacher, phase_sizes=[1, 1, 1, 1], **options)
    images = torch.randn(2, 3, 42, 70)
    expected = dinov2(images, output_hidden_states=True)
    outputs = raptor(images, output_hidden_states=True)
    assert type(outputs) is type(expected)
    assert len(outputs.feature_maps) == 3
    for feature_map, expected_map in zip(outputs.feature_maps, expected.feature_maps):
        assert torch.equal(feature_map, expected_map)
        if reshape_hidden_states:
            assert feature_map.shape == (2, 32, 3, 5)
    assert all(torch.equal(*pair) for pair in zip(outputs.hidden_states, expected.hidden_states))
    assert raptor.channels == dinov2.channels == [32, 32, 32]


def test_feature_maps_of_a_saved_raptor(tmp_path):
    raptor = make_raptor(num_register_tokens=2)
    raptor.save_pretrained(tmp_path)
    images = torch.randn(2, 3, 42, 70)
    backbone, info = RaptorBackbone.from_pretrained(tmp_path, out_indices=[1, 3], output_loading_info=True)
    assert not any(info.values())
    feature_maps = backbone(images).feature_maps
    states = raptor(images, output_hidden_states=True).hidden_states
    for feature_map, state in zip(feature_maps, (states[1], states[3])):
        patches = raptor.layernorm(state)[:, 3:]
        assert_close(feature_map[:, :, 1, 4], patches[:, 1 * 5 + 4])  # row 1, column 4
    assert backbone(images).hidden_states is None
    assert isinstance(backbone(images, return_dict=False), tuple)


def test_phase_iterations_of_a_backbone(tmp_path, images):
    raptor = make_raptor()
    raptor.save_pretrained(tmp_path)
    backbone = RaptorBackbone.from_pretrained(tmp_path, phase_iterations=[4, 2], reshape_hidden_states=False)
    assert backbone.out_features == ["stage6"]
    assert_close(backbone(images).feature_maps[0], raptor(images, phase_iterations=[4, 2]).last_hidden_state)
    with pytest.raises(ValueError, match="8 states were computed for 7 stages"):
        backbone(images, phase_iterations=[5, 2])


def dpt(backbone_config):
    backbone_config.reshape_hidden_states = False
    config = DPTConfig(
        backbone_config=backbone_config,
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        readout_type="project",
        reassemble_factors=[4, 2, 1, 0.5],
        head_in_index=-1,
    )
    return DPTForDepthEstimation(config), lambda model, x: model(x).predicted_depth


def upernet(backbone_config):
    config = UperNetConfig(
        backbone_config=backbone_config,
        hidden_size=8,
        pool_scales=[1, 2],
        auxiliary_in_channels=32,
        auxiliary_channels=8,
        num_labels=3,
    )
    return UperNetForSemanticSegmentation(config), lambda model, x: model(x).logits


# DPT takes every token after cls for a patch, from Dinov2's backbone with registers too.
@pytest.mark.parametrize("make_head, num_register_tokens", [(dpt, 0), (upernet, 0), (upernet, 2)])
def test_inside_a_dense_prediction_model(make_head, num_register_tokens, tmp_path):
    raptor = make_raptor(num_register_tokens=num_register_tokens)
    raptor.save_pretrained(tmp_path / "raptor")
    config = RaptorConfig.from_pretrained(tmp_path / "raptor", out_indices=[1, 2, 3, 4])
    model, predict = make_head(config)
    assert type(model.backbone) is RaptorBackbone
    model.backbone.load_state_dict(raptor.state_dict())

    images = torch.randn(2, 3, 56, 84)
    target = (images.mean(1) > 0).long()  # for DPT, a depth of 0 or 1 metre
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        if make_head is dpt:
            depth = torch.nn.functional.interpolate(predict(model, images)[:, None], size=(56, 84))[:, 0]
            loss = (depth - target).square().mean()
        else:
            loss = model(images, labels=target).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert model.backbone.blocks[0].mlp.fc1.weight.grad.abs().sum() > 0

    model.eval().save_pretrained(tmp_path / "model")
    loaded, info = type(model).from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values())
    assert loaded.config.backbone_config.phase_sizes == [3, 1]
    assert_close(predict(loaded, images), predict(model, images))


def test_a_raptor_and_its_backbone_hold_the_same_weights():
    assert make_raptor().state_dict().keys() == make_raptor(RaptorBackbone).state_dict().keys()
    assert issubclass(RaptorBackbone, RaptorModel)


def test_of_a_teacher_backbone_the_feature_maps_are_the_teachers(images):
    config = Dinov2Config(**TINY, num_hidden_layers=3, out_features=["stage1", "stage3"], apply_layernorm=False)
    teacher = Dinov2Backbone(config).eval()
    raptor = RaptorBackbone.from_teacher(teacher, [1, 1, 1])
    assert raptor.out_features == ["stage1", "stage3"]
    for ours, theirs in zip(raptor(images).feature_maps, teacher(images).feature_maps, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert RaptorBackbone.from_teacher(teacher, [2, 1], out_indices=[2]).out_features == ["stage2"]
