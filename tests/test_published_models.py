"""The Raptors that come with the repository: complete, small, and what their cards say."""

import html
import re
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoImageProcessor, AutoModel

from raptor_hf import RaptorModel
from raptor_hf.fidelity import compare
from raptor_hf.images import CenterCrop, PixelValues, crop_size, load_image_dataset, load_image_processor

ROOT = Path(__file__).parents[1]
FOLDERS = sorted((ROOT / "model_cards").glob("raptor-*"))


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def folder(request):
    return request.param


def test_there_are_some():
    assert FOLDERS


def test_weights_are_small_half_precision_and_each_block_once(folder):
    path = folder / "model.safetensors"
    assert path.stat().st_size <= 16e6
    weights = load_file(path)
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    model = RaptorModel.from_pretrained(folder, dtype=torch.float32)
    assert {weight.dtype for weight in weights.values()} == {torch.float16}
    assert len(blocks) == len(model.config.phase_sizes) == int(folder.name[-1])
    assert path.stat().st_size < 2.1 * model.num_parameters()


def test_it_works_with_its_own_code_and_processor(folder):
    model = RaptorModel.from_pretrained(folder, dtype=torch.float32)
    remote = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    processor = AutoImageProcessor.from_pretrained(folder)
    photographs = load_image_dataset("photographs", "test")["image"][:2]
    pixel_values = processor(photographs, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        states = [m(pixel_values, output_hidden_states=True).hidden_states for m in (model, remote)]
    assert len(states[0]) == model.config.num_hidden_layers + 1
    torch.testing.assert_close(states[0], states[1])


def test_its_card_is_whole(folder):
    card = ModelCard.load(folder / "README.md")
    text = html.unescape(card.text)
    assert card.data.base_model == "facebook/dinov2-small" and card.data.license == "apache-2.0"
    assert (folder / "patch_components.png").is_file() and "](patch_components.png)" in text
    for heading in ("Use", "Phases", "What it keeps of its teacher", "How it was trained", "Good for", "Limits"):
        assert f"\n## {heading}\n" in card.text
    recipe, flags = re.findall(r"--config (training/configs/\S+)(.*)", card.text)[-1]
    seed = re.search(r"--seed (\d+)", flags)
    seed = seed[1] if seed else yaml.safe_load((ROOT / recipe).read_text()).get("seed", 42)
    assert f"| seed | {seed} |" in card.text
    assert not re.search(r"/(work|tmp|home|root)/", card.text)


def test_its_card_tells_its_fidelity(folder, dinov2_small):
    """On 12 of the 256 photos that the card's figures are of, at its own image size."""
    path = ROOT.parent / "shared" / "data" / "photos"
    if not path.is_dir():
        pytest.skip("the photos are not on this machine")
    photos = load_image_dataset(str(path), "validation").select(range(12))
    processor = load_image_processor(str(folder))
    images = PixelValues(photos, CenterCrop(processor))
    model = RaptorModel.from_pretrained(folder, dtype=torch.float32)
    measured = compare(model, dinov2_small, DataLoader(images, 12))["closed_loop"]
    row = rf"\| At {crop_size(processor)} pixels \| (\w+) \| ([\d.]+) \| ([\d.]+) \|"
    rows = re.findall(row, (folder / "README.md").read_text())
    assert {name for name, *_ in rows} == {"cls", "patch"}
    for name, last, lowest in rows:
        cosine = measured[name]["cosine"]
        assert cosine[-1] == pytest.approx(float(last), abs=0.05)
        assert min(cosine[1:]) == pytest.approx(float(lowest), abs=0.05)
