"""Raptors that earlier releases saved, in `tests/fixtures`, load and give what they gave."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from raptor_hf import RaptorModel, __version__

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("raptor-*"))


def check(model, folder):
    expected = load_file(folder / "expected.safetensors")
    with torch.no_grad():
        outputs = model.eval()(expected["pixel_values"], output_hidden_states=True)
    torch.testing.assert_close(torch.stack(outputs.hidden_states), expected["hidden_states"], rtol=1e-4, atol=1e-5)
    for name in ("last_hidden_state", "pooler_output"):
        torch.testing.assert_close(outputs[name], expected[name], rtol=1e-4, atol=1e-5)


def test_this_release_is_among_them():
    assert f"raptor-{__version__}" in [folder.name for folder in FIXTURES]


@pytest.mark.parametrize("folder", FIXTURES, ids=lambda folder: folder.name)
@pytest.mark.parametrize("model_class", [RaptorModel, AutoModel])
def test_a_saved_model_gives_what_it_gave(folder, model_class, caplog):
    model, info = model_class.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()) and "doesn't know" not in caplog.text
    check(model, folder)


def test_fields_of_a_later_release_give_a_warning(tmp_path, caplog):
    folder = shutil.copytree(FIXTURES[-1], tmp_path / "later")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"colour": "green", "gates": {"a": [1]}}))
    model = RaptorModel.from_pretrained(folder, dtype=torch.float32)
    assert "doesn't know and doesn't use: colour, gates" in caplog.text
    check(model, folder)
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["colour"] == "green"
