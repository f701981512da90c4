import pytest
import torch
from conftest import make_raptor

from raptor_hf.cost import cost


def test_of_a_raptor_by_hand(tmp_path):
    model, width, layers, tokens = make_raptor(), 32, 4, 1 + 4**2
    # A multiply-add is two operations: qkv, output and MLP take 12 width² a token, attention 2 tokens * width; the
    # depth scaling is a product 1 -> 16 -> 3 * width, once a layer.
    blocks = layers * (tokens * (12 * width**2 + 2 * tokens * width) + 16 + 16 * 3 * width)
    patches = 4**2 * width * 3 * 14**2
    result = cost(model, 56)
    assert result["flops"] == 2 * (blocks + patches)
    assert result["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    header = 8 + int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert result["stored_bytes"] == (tmp_path / "model.safetensors").stat().st_size - header
    assert cost(model.to(torch.float16), 28)["stored_bytes"] == result["stored_bytes"] // 2
    assert cost(model, 28)["flops"] < result["flops"] / 3


@pytest.mark.parametrize("family", ["dinov2"])
def test_a_raptor_costs_its_teachers_operations(teacher):
    from raptor_hf import RaptorModel

    raptor = RaptorModel.from_teacher(teacher, [2, 2], depth_scaling=False)
    assert cost(raptor, 56)["flops"] == cost(teacher, 56)["flops"]
    assert cost(raptor, 56)["parameters"] < cost(teacher, 56)["parameters"]
