"""Raptor folders through Transformers' auto classes, with raptor_hf and with nothing but the folder's own code."""

import os
import subprocess
import sys
from textwrap import dedent

import pytest
import torch
from conftest import make_raptor
from torch.testing import assert_close
from transformers import AutoBackbone, AutoConfig, AutoModel, AutoModelForImageClassification
from transformers.models.auto import auto_factory

from raptor_hf import RaptorBackbone, RaptorConfig, RaptorForImageClassification, RaptorModel


@pytest.fixture
def folder(tmp_path):
    make_raptor(num_register_tokens=2).save_pretrained(tmp_path / "raptor")
    return tmp_path / "raptor"


@pytest.fixture
def folder_as_hub_name(monkeypatch):
    """AutoBackbone takes a Hub's names only, and asks the Hub for them: here every name is known."""
    monkeypatch.setattr(auto_factory.hf_api(), "repo_exists", lambda name: True)


@pytest.mark.parametrize("trust_remote_code", [None, True])
@pytest.mark.parametrize(
    "auto_class, expected",
    [
        (AutoConfig, RaptorConfig),
        (AutoModel, RaptorModel),
        (AutoBackbone, RaptorBackbone),
        (AutoModelForImageClassification, RaptorForImageClassification),
    ],
)
def test_the_installed_class_wins_over_the_folders_code(
    folder, folder_as_hub_name, auto_class, expected, trust_remote_code
):
    loaded = auto_class.from_pretrained(folder, trust_remote_code=trust_remote_code)
    assert type(loaded) is expected


def test_from_config():
    config = RaptorConfig(phase_sizes=[2, 1], hidden_size=32, num_attention_heads=2)
    assert type(AutoModel.from_config(config)) is RaptorModel
    assert type(AutoBackbone.from_config(config)) is RaptorBackbone
    assert AutoConfig.for_model("raptor", phase_sizes=[2, 1]).num_hidden_layers == 3


def without_raptor_hf(code: str, tmp_path):
    """Runs code in a Python that finds, of what raptor_hf needs, only torch and transformers."""
    hidden = ["raptor_hf", "datasets", "accelerate", "evaluate", "sklearn", "matplotlib"]
    prelude = f"import sys; sys.modules.update(dict.fromkeys({hidden}))\n"
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", prelude + dedent(code)]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_folder_carries_its_code(folder, tmp_path):
    images = torch.randn(1, 3, 56, 70)
    torch.save(images, tmp_path / "images.pt")
    code = """
        import torch
        from transformers import AutoConfig, AutoModel, AutoModelForImageClassification
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        config = AutoConfig.from_pretrained("raptor", trust_remote_code=True)
        model = AutoModel.from_pretrained("raptor", trust_remote_code=True)
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        assert config.num_hidden_layers == 4 and type(model.config) is type(config)
        images = torch.load("images.pt", weights_only=True)
        torch.save(model(images).last_hidden_state, "outputs.pt")

        # What was loaded with its code is saved with its code.
        model.save_pretrained("again")
        again = AutoModel.from_pretrained("again", trust_remote_code=True)
        torch.testing.assert_close(again(images), model(images))

        AutoModelForImageClassification.from_pretrained("again", trust_remote_code=True)
        backbone = get_class_from_dynamic_module(config.auto_map["AutoBackbone"], "again")
        assert len(backbone.from_pretrained("again", out_indices=[1, 2])(images).feature_maps) == 2

        # Whichever of them saves, and whatever loaded it, the folder serves every auto class.
        backbone.from_pretrained("again").save_pretrained("of_backbone")
        classifier = AutoModelForImageClassification.from_pretrained("again", trust_remote_code=True)
        classifier.raptor.save_pretrained("inner")
        for folder in ("of_backbone", "inner"):
            assert type(AutoModel.from_pretrained(folder, trust_remote_code=True)).__name__ == "RaptorModel", folder

        # Started from random weights, the depth scaling starts near 1 here too.
        fresh = AutoModel.from_config(config, trust_remote_code=True)
        assert fresh.blocks[0].depth_scaling.fc2.weight.std() < 2e-4
    """
    without_raptor_hf(code, tmp_path)
    outputs = torch.load(tmp_path / "outputs.pt", weights_only=True)
    assert_close(outputs, RaptorModel.from_pretrained(folder)(images).last_hidden_state)
    assert {"modeling_raptor.py", "configuration_raptor.py"} <= {path.name for path in (tmp_path / "again").iterdir()}
    # And a folder that its own code wrote is one for raptor_hf.
    assert type(AutoModel.from_pretrained(tmp_path / "again")) is RaptorModel


def test_remote_code_must_be_trusted(folder, tmp_path):
    code = """
        from transformers import AutoModel

        try:
            AutoModel.from_pretrained("raptor", trust_remote_code=False)
        except ValueError as error:
            assert "trust_remote_code" in str(error), error
        else:
            raise AssertionError("code was run unasked")
        assert not any(name.startswith("transformers_modules.") for name in sys.modules)
    """
    without_raptor_hf(code, tmp_path)


class OwnRaptor(RaptorModel):
    """Of somebody's own code."""


def test_a_subclass_is_saved_with_this_packages_code_and_not_its_own(tmp_path):
    OwnRaptor(make_raptor().config).save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "model.safetensors", "modeling_raptor.py", "configuration_raptor.py"}
    assert type(AutoModel.from_pretrained(tmp_path)) is RaptorModel
