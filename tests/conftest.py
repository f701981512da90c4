"""Fixtures that several test files share. Models are tiny and random, so that nothing is downloaded."""

import os
from pathlib import Path

# Before anything imports huggingface_hub, which reads it once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported; scripts that tests start have it too.
    os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from transformers import (
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    Dinov2WithRegistersModel,
    set_seed,
)

from raptor_hf import RaptorConfig, RaptorModel

SHARED = Path(__file__).resolve().parents[2] / "shared"
TEACHERS = {
    "dinov2": (Dinov2Config, Dinov2Model, Dinov2ForImageClassification),
    "dinov2_with_registers": (
        Dinov2WithRegistersConfig,
        Dinov2WithRegistersModel,
        Dinov2WithRegistersForImageClassification,
    ),
}


TINY = {"hidden_size": 32, "num_attention_heads": 2, "image_size": 56, "patch_size": 14, "layerscale_value": 0.5}


@pytest.fixture(autouse=True)
def seed():
    set_seed(0)


def make_teacher(family: str, classifier: bool = False, **config_kwargs):
    """A tiny teacher of a family: 4 layers of width 32, 14-pixel patches, positions for 56 x 56 pixels."""
    config_class, model_class, classifier_class = TEACHERS[family]
    config = config_class(**(TINY | {"num_hidden_layers": 4} | config_kwargs))
    return shake((classifier_class if classifier else model_class)(config).eval())


def make_raptor(model_class=RaptorModel, **config_kwargs):
    """A Raptor of the same size: 3 layers of one block, 1 of another."""
    return shake(model_class(RaptorConfig(**(TINY | {"phase_sizes": [3, 1]} | config_kwargs))).eval())


@torch.no_grad()
def shake(model):
    # Fresh models hold zeros and equal numbers, which would hide a tensor that was left out or mixed up.
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(params=TEACHERS)
def family(request):
    return request.param


@pytest.fixture
def teacher(family):
    """A tiny teacher, once of each family."""
    return make_teacher(family)


@pytest.fixture
def images():
    """(2, 3, 56, 56)"""
    return torch.randn(2, 3, 56, 56)


@pytest.fixture(scope="session")
def dinov2_small():
    """DINOv2 ViT-S/14 with its trained weights, in float32."""
    folder = SHARED / "teachers" / "dinov2-small"
    if not folder.exists():
        pytest.skip("the trained dinov2-small is not on this machine")
    return Dinov2Model.from_pretrained(folder, dtype=torch.float32).eval()
