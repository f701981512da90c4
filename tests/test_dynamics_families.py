"""Every measure takes whatever family and token types there are, cls and registers or not."""

import json

import pytest
import torch
from conftest import shake
from test_vision_families import FAMILIES

from raptor_hf.dynamics import ModelDynamics, RecordedLayers
from raptor_hf.vision_models import load_vision_model, token_slices


@pytest.fixture(
    params=["dinov3", "vit", "deit", "mae", "beit", "clip_vision", "siglip_vision", "siglip2_vision", "ijepa"]
)
def model(request, tmp_path):
    shake(FAMILIES[request.param][0]().eval()).save_pretrained(tmp_path)
    return load_vision_model(str(tmp_path))


def test_a_family_is_measured_and_run_on(model):
    images = torch.randn(3, 3, 32, 32)
    layers = RecordedLayers(model, images)
    for start in range(4):
        torch.testing.assert_close(layers(layers.states[:, start], start), layers.states[:, start:])
    dynamics = ModelDynamics(model, epsilons=[0.1])
    dynamics.update(images, torch.tensor([0, 0, 1]))
    result = json.loads(json.dumps(dynamics.compute([2, 1]), allow_nan=False))
    slices = token_slices(model.config)
    assert list(result["tokens"]) == list(result["self_correction"]) == list(slices)
    assert len(result["claims"]) == 8 and "not_run_on" not in result
    # A single token has none with others.
    assert [name for name in slices if "coherence" not in result["tokens"][name]] == [
        name for name, where in slices.items() if where.stop is not None and where.stop - where.start == 1
    ]
