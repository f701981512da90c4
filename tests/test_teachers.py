import json

import pytest
import torch
from tiny import tiny_teacher
from transformers import Dinov2ForImageClassification, ViTConfig, ViTModel

from raptor_hf.teachers import load_teacher, token_slices, trajectory


@pytest.mark.parametrize("registers", [0, 4])
def test_loads_in_float32_whatever_the_file_holds(tmp_path, registers):
    tiny_teacher(registers).half().save_pretrained(tmp_path)
    teacher = load_teacher(str(tmp_path))
    assert teacher.dtype == torch.float32
    assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
    assert load_teacher(str(tmp_path), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_takes_the_backbone_of_a_classifier(tmp_path):
    config = tiny_teacher().config
    classifier = Dinov2ForImageClassification(config)
    classifier.save_pretrained(tmp_path)
    teacher = load_teacher(str(tmp_path))
    torch.testing.assert_close(teacher.layernorm.weight, classifier.dinov2.layernorm.weight)


def test_refuses_other_families(tmp_path):
    ViTModel(
        ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a vit model, but a teacher must be one of dinov2"):
        load_teacher(str(tmp_path))


def test_refuses_what_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="give a Hub name or a folder"):
        load_teacher(str(tmp_path / "nothing"))


def test_refuses_missing_weights(tmp_path):
    teacher = tiny_teacher()
    state = {key: value for key, value in teacher.state_dict().items() if "layer.2.mlp" not in key}
    teacher.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match="lacks 4 of its weights"):
        load_teacher(str(tmp_path))


def test_refuses_weights_that_the_configuration_has_no_place_for(tmp_path):
    tiny_teacher().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"qkv_bias": False}))
    with pytest.raises(ValueError, match=r"18 weights that its configuration has no place for, encoder\.layer\.0"):
        load_teacher(str(tmp_path))


@pytest.mark.parametrize(("registers", "types"), [(0, ["cls", "patch"]), (4, ["cls", "register", "patch"])])
def test_token_slices_cover_every_token_once(registers, types):
    teacher = tiny_teacher(registers)
    slices = token_slices(teacher.config)
    assert list(slices) == types
    tokens = trajectory(teacher, torch.zeros(1, 3, 28, 42)).shape[2]
    covered = [i for where in slices.values() for i in range(tokens)[where]]
    assert covered == list(range(1 + registers + 2 * 3))


def test_trajectory_is_the_residual_stream():
    teacher = tiny_teacher(4)
    images = torch.randn(2, 3, 28, 28)
    states = trajectory(teacher, images)
    assert states.shape == (2, 7, 1 + 4 + 4, 16)
    torch.testing.assert_close(states[:, 0], teacher.embeddings(images))
    torch.testing.assert_close(states[:, 3], teacher.encoder.layer[2](states[:, 2]))
    torch.testing.assert_close(teacher.layernorm(states[:, -1]), teacher(images).last_hidden_state)
