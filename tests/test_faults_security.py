"""What comes from others' folders, data and configurations does no harm."""

import json
import os
import pickle
import re
import struct
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import tiny_teacher
from transformers import AutoModel

from raptor_hf import RaptorForImageClassification, RaptorModel
from raptor_hf.images import load_image_processor
from raptor_hf.model_card import model_card
from raptor_hf.teachers import load_teacher

TOKEN = "hf_thisisnotmytoken"


class Payload:
    """Runs a command where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def raptor(tmp_path):
    model = RaptorModel.from_teacher(tiny_teacher(), [3, 3])
    model.save_pretrained(tmp_path / "raptor")
    return tmp_path / "raptor"


@pytest.fixture
def teacher(tmp_path):
    tiny_teacher().save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


LOADERS = [RaptorModel.from_pretrained, RaptorForImageClassification.from_pretrained, AutoModel.from_pretrained]


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("form", ["plain", "torch"])
def test_a_pickle_in_place_of_weights_is_refused_unread(raptor, tmp_path, load, form):
    (raptor / "model.safetensors").unlink()
    payload = Payload(tmp_path / "ran")
    if form == "plain":
        (raptor / "pytorch_model.bin").write_bytes(pickle.dumps(payload))
    else:
        torch.save({"cls_token": payload}, raptor / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load(raptor)
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        load(raptor, use_safetensors=False)
    assert not (tmp_path / "ran").exists()


def test_an_adapter_that_names_another_base_model_is_refused(teacher):
    (teacher / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/elses"}))
    with pytest.raises(ValueError, match="holds a PEFT adapter, not yet merged"):
        load_teacher(str(teacher))


def test_a_teachers_pickle_is_refused_unread(teacher, tmp_path):
    (teacher / "model.safetensors").unlink()
    torch.save({"x": Payload(tmp_path / "ran")}, teacher / "pytorch_model.bin")
    with pytest.raises(ValueError, match="has no weights in safetensors"):
        load_teacher(str(teacher))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "..\\x"])
def test_weights_outside_the_folder_are_refused(raptor, teacher, name):
    for folder in (raptor, teacher):
        (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
        index = {"metadata": {"total_size": 0}, "weight_map": {"layernorm.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for load in LOADERS:
        with pytest.raises(ValueError, match=f"names the file {re.escape(name)}, which doesn't lie beside it"):
            load(raptor)
    with pytest.raises(ValueError, match="doesn't lie beside it"):
        load_teacher(str(teacher))


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**9) + b" " * 100,
        struct.pack("<Q", 60) + json.dumps({"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}).encode(),
        b"",
    ],
)
def test_a_header_that_lies_is_refused(raptor, teacher, content):
    for folder in (raptor, teacher):
        (folder / "model.safetensors").write_bytes(content)
    with pytest.raises((SafetensorError, OSError)):
        RaptorModel.from_pretrained(raptor)
    with pytest.raises(ValueError, match="Teacher"):
        load_teacher(str(teacher))


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": []}', "{}", '{"weight_map": {"x": 5}}'])
def test_an_index_that_is_none_is_refused(raptor, teacher, content):
    for folder in (raptor, teacher):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises((ValueError, OSError)):
        RaptorModel.from_pretrained(raptor)
    with pytest.raises(ValueError):
        load_teacher(str(teacher))


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 10**9}, {"num_hidden_layers": "many"}, {"hidden_size": []}, {"mlp_ratio": None}, None],
)
def test_a_configuration_that_cannot_be_is_refused(teacher, changes):
    file = teacher / "config.json"
    file.write_text("[1]" if changes is None else json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match="Teacher"):
        load_teacher(str(teacher))


def test_weights_that_are_not_finite_are_refused(teacher):
    weights = load_file(teacher / "model.safetensors")
    next(iter(weights.values())).flatten()[0] = float("nan")
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="has weights that aren't finite"):
        load_teacher(str(teacher))


DAMAGED_PROCESSORS = [
    *({"image_std": [0, 1, 1]}, {"size": {"side": 3}}, {"image_mean": "grey"}, {"image_std": [1e-45] * 3}),
    *({"rescale_factor": float("nan")}, {"rescale_factor": 1e300}, {"rescale_factor": 0}, None),
    *({"size": {"shortest_edge": 10_000_000}}, {"crop_size": {"height": 28, "width": 1_000_000}}),
    {"crop_size": {"shortest_edge": 28}},
]


@pytest.mark.parametrize("changes", DAMAGED_PROCESSORS)
def test_a_damaged_image_processor_is_refused(teacher, changes):
    load_image_processor("no model here", 28).save_pretrained(teacher)
    file = teacher / "preprocessor_config.json"
    file.write_text("{" if changes is None else json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=r"The image processor in .* can't be used"):
        load_image_processor(str(teacher))


def test_images_that_are_not_square_are_refused(teacher):
    load_image_processor("no model here", 28).save_pretrained(teacher)
    file = teacher / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"crop_size": {"height": 28, "width": 56}}))
    with pytest.raises(ValueError, match="not square"):
        load_image_processor(str(teacher))
    assert dict(load_image_processor(str(teacher), 28).crop_size) == {"height": 28, "width": 28}


def test_code_in_a_folder_does_not_run_unasked(raptor, teacher, tmp_path):
    code = f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n"
    for folder in (raptor, teacher):
        for file in ("modeling_raptor.py", "configuration_raptor.py"):
            (folder / file).write_text(code)
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {"AutoModel": "modeling_raptor.X", "AutoConfig": "configuration_raptor.X"}
        (folder / "config.json").write_text(json.dumps(config))
    assert isinstance(AutoModel.from_pretrained(raptor), RaptorModel)
    load_teacher(str(teacher))
    config["model_type"] = "unheard_of"
    (teacher / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="can't be loaded"):
        load_teacher(str(teacher))
    assert not (tmp_path / "ran").exists()


HOSTILE = "<script>alert(1)</script>\n---\nlicense: mit\n- [x](javascript:y) {{ 7*7 }} | `a` \u202e'\""


def test_names_cannot_write_a_cards_markup_or_its_metadata():
    model = RaptorForImageClassification.from_teacher(tiny_teacher(), [3, 3])
    model.config.id2label = {0: HOSTILE, 1: "<b>"}
    curves = {"cosine": [1.0] * 7, "r2": [1.0] * 7, "relative_error": [0.0] * 7}
    results = {
        "teacher": HOSTILE,
        "dataset": f"/data/{HOSTILE}",
        "arguments": {"init": HOSTILE, HOSTILE: 1, "hub_token": TOKEN, "validation_dataset": HOSTILE},
        "fidelity": {"before": {"cls": curves, "patch": curves}},
        "bad_images": {"train": 1, "validation": 0, "first": [HOSTILE]},
    }
    card = str(model_card(model, results))
    metadata, body = re.match(r"---\n(.*?)\n---\n(.*)", card, re.DOTALL).groups()
    assert "license" not in yaml.safe_load(metadata)
    for markup in ("<script", "<b>", "javascript:", "{{", "\u202e"):
        assert markup not in body
    assert TOKEN not in card
