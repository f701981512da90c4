import subprocess
import sys

import datasets
import pytest
import torch
from conftest import make_raptor, make_teacher
from tiny import picture
from torch.utils.data import DataLoader

from raptor_hf.images import CenterCrop, load_image_processor
from raptor_hf.probes import compute_features, features
from raptor_hf.probes.features import check_image_size, feature_key

TRANSFORM = CenterCrop(load_image_processor("no model here", 28))


def pictures(count: int = 7) -> datasets.Dataset:
    columns = datasets.Features({"image": datasets.Image()})
    return datasets.Dataset.from_dict({"image": [picture(seed) for seed in range(count)]}, features=columns)


class Counted:
    """A model that counts the images it has seen."""

    def __init__(self, model):
        self.model, self.seen = model, 0
        model.register_forward_pre_hook(self.count)

    def count(self, model, args):
        self.seen += len(args[0])


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(features, "KINDS", {"pooled": (3, torch.float32), "dense": (3, torch.float16)})


@pytest.mark.parametrize("registers", [0, 2])
def test_features_are_those_of_the_last_hidden_state(tmp_path, small_files, registers):
    model, images = make_raptor(num_register_tokens=registers), pictures()
    store = compute_features(model, images, TRANSFORM, batch_size=2, cache_dir=tmp_path)
    dense = compute_features(model, images, TRANSFORM, "dense", batch_size=2, cache_dir=tmp_path)
    pixel_values = torch.stack([TRANSFORM(image, None) for image in images["image"]])
    with torch.no_grad():
        tokens = model(pixel_values).last_hidden_state
    patches = tokens[:, 1 + registers :]
    torch.testing.assert_close(store.tensor("cls"), tokens[:, 0])
    torch.testing.assert_close(store.tensor("patch_mean"), patches.mean(1))
    torch.testing.assert_close(dense.tensor("patch").float(), patches.unflatten(1, (2, 2)), atol=2e-3, rtol=1e-3)
    assert len(store) == len(dense) == 7
    assert torch.equal(dense[4]["patch"], dense.tensor("patch")[4]) and torch.equal(dense[-1]["cls"], dense[6]["cls"])
    batch = next(iter(DataLoader(dense, batch_size=7)))
    assert torch.equal(batch["patch"], dense.tensor("patch"))
    with pytest.raises(IndexError):
        store[7]
    with pytest.raises(ValueError, match=r"no patch feature: it has cls, patch_mean"):
        store.tensor("patch")


def test_features_are_computed_once_and_an_interrupted_run_goes_on(tmp_path, small_files):
    counted, images = Counted(make_teacher("dinov2")), pictures()

    def compute(**kwargs):
        counted.seen = 0
        store = compute_features(counted.model, images, TRANSFORM, batch_size=2, cache_dir=tmp_path, **kwargs)
        return store, counted.seen

    first, seen = compute()
    assert seen == 7
    values = first.tensor("cls")
    assert compute()[1] == 0
    first.files[1].write_bytes(first.files[1].read_bytes()[:-5])  # torn
    first.files[2].unlink()
    again, seen = compute(num_workers=1)
    assert seen == 4
    torch.testing.assert_close(again.tensor("cls"), values)
    damaged = bytearray(first.files[0].read_bytes())
    damaged[-9] ^= 1
    first.files[0].write_bytes(damaged)
    assert compute()[1] == 3
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_key_tells_apart_what_changes_features_and_nothing_else(tmp_path):
    model, images = make_raptor(), pictures()
    key = feature_key(model, images, TRANSFORM, "pooled")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    loaded.config.id2label = {0: "cat"}
    assert feature_key(loaded, pictures(), CenterCrop(load_image_processor("none", 28)), "pooled") == key
    others = [
        (model, images, TRANSFORM, "dense"),
        (model, pictures(6), TRANSFORM, "pooled"),
        (model, images, CenterCrop(load_image_processor("none", 56)), "pooled"),
    ]
    loaded.config.phase_iterations = [2, 1]
    others.append((loaded, images, TRANSFORM, "pooled"))
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight[0, 0] += 1e-4
    assert key not in [feature_key(*other) for other in others] + [feature_key(model, images, TRANSFORM, "pooled")]


def test_the_key_is_the_same_in_another_process(tmp_path):
    pictures().to_parquet(tmp_path / "images.parquet")
    make_teacher("dinov2").save_pretrained(tmp_path)
    code = f"""
from raptor_hf.images import CenterCrop, load_image_dataset, load_image_processor
from raptor_hf.probes.features import feature_key
from raptor_hf.teachers import load_vision_model
images = load_image_dataset({str(tmp_path / "images.parquet")!r})
model = load_vision_model({str(tmp_path)!r})
key = feature_key(model, images, CenterCrop(load_image_processor({str(tmp_path)!r}, 28)), "pooled")
"""
    here = {}
    exec(code, here)
    there = subprocess.run([sys.executable, "-c", code + "print(key)"], capture_output=True, text=True)
    assert there.stdout.strip() == here["key"], there.stderr


def test_images_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Images of 50 pixels don't divide into patches of 14: .*--image_size 56"):
        check_image_size(make_raptor().config, 50)
    crop = CenterCrop(load_image_processor("none", 30))
    with pytest.raises(ValueError, match="30 pixels"):
        compute_features(make_raptor(), pictures(1), crop, cache_dir=tmp_path)


def test_a_full_disk_is_foreseen(tmp_path, monkeypatch):
    monkeypatch.setattr(features.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 100}))
    with pytest.raises(ValueError, match=r"would take .* GB, but .* free"):
        compute_features(make_raptor(), pictures(1), TRANSFORM, cache_dir=tmp_path)
