import json

import datasets
import pytest
import torch
from conftest import SHARED
from labelled import CLASSES, make_material
from tiny import picture
from transformers import AutoModelForImageClassification

from raptor_hf.phase_structure_callback import PHASE_STRUCTURE_NAME
from raptor_hf.teacher_training import (
    TeacherArguments,
    class_indices,
    class_names,
    main,
    teacher_from_recipe,
    train_teacher,
)


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("material"))


def arguments(dataset, output_dir, **changes) -> TeacherArguments:
    settings = dict(image_size=28, patch_size=14, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    settings |= dict(max_steps=1, per_device_train_batch_size=4, report_to="none", use_cpu=True, disable_tqdm=True)
    return TeacherArguments(dataset=str(dataset), output_dir=str(output_dir), **settings | changes)


@pytest.mark.parametrize("rate", [0.0, 0.9])
def test_stochastic_depth_is_the_same_for_every_layer(rate, material, tmp_path):
    results = train_teacher(arguments(material / "images", tmp_path, drop_path_rate=rate))
    assert results["arguments"]["drop_path_rate"] == rate
    model = AutoModelForImageClassification.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.config.drop_path_rate == rate
    assert [getattr(layer.drop_path, "drop_prob", 0.0) for layer in model.base_model.encoder.layer] == [rate] * 2
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert list(model.config.id2label.values()) == CLASSES


def test_a_teacher_is_trained_once_and_another_is_not_put_over_it(material, tmp_path):
    first = train_teacher(arguments(material / "images", tmp_path))
    modified = (tmp_path / "model.safetensors").stat().st_mtime_ns
    assert train_teacher(arguments(material / "images", tmp_path)) == first
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == modified
    with pytest.raises(ValueError, match=r"another drop_path_rate \(0.1, not 0.5\)"):
        train_teacher(arguments(material / "images", tmp_path, drop_path_rate=0.5))
    train_teacher(arguments(material / "images", tmp_path, drop_path_rate=0.5, overwrite_output_dir=True))
    assert json.loads((tmp_path / "results.json").read_text())["arguments"]["drop_path_rate"] == 0.5


def test_the_token_for_the_hub_is_written_nowhere(material, tmp_path):
    token = "hf_thisisnotmytoken"
    train_teacher(arguments(material / "images", tmp_path, hub_token=token, save_strategy="steps", save_steps=1))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not [path for path in files if token.encode() in path.read_bytes()]
    assert not [path for path in files if path.name == "training_args.bin"]


def test_a_teacher_that_is_not_finite_is_not_saved(material, tmp_path):
    with pytest.raises(ValueError, match="not finite after training, and not saved: lower --learning_rate"):
        train_teacher(arguments(material / "images", tmp_path, learning_rate=1e30, warmup_steps=0, max_steps=3))
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("content", ["{}", '{"arguments": []}', '{"arguments": {}}'])
def test_damaged_results_of_a_teacher(material, tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=r"results.json is damaged"):
        train_teacher(arguments(material / "images", tmp_path))


def test_a_teacher_is_not_put_into_its_data(material):
    with pytest.raises(ValueError, match="is in the dataset's own folder"):
        train_teacher(arguments(material / "images", material / "images" / "teacher"))


def test_a_recipes_flags_can_be_changed(material, tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "image_size: 28\npatch_size: 14\nhidden_size: 16\nnum_hidden_layers: 6\nnum_attention_heads: 2\nmax_steps: 1\n"
        "per_device_train_batch_size: 4\nreport_to: none\nuse_cpu: true\ndisable_tqdm: true\n"
    )
    changes = {"dataset": material / "images", "output_dir": tmp_path / "out", "phase_structure_steps": 1}
    results = teacher_from_recipe(tmp_path / "recipe.yaml", **changes, image_column=None)
    assert results["arguments"]["num_hidden_layers"] == 6 and results["arguments"]["dataset"].endswith("images")
    entries = json.loads((tmp_path / "out" / PHASE_STRUCTURE_NAME).read_text())
    assert [entry["step"] for entry in entries] == [0, 1]


def labelled(labels, feature=None) -> datasets.Dataset:
    columns = {"image": datasets.Image()} | ({"label": feature} if feature else {})
    rows = {"image": [picture(i) for i in range(len(labels))], "label": labels}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(columns) if feature else None)


def test_classes_may_be_class_labels_indices_or_names():
    assert class_names(labelled([0, 1], datasets.ClassLabel(names=["no", "yes"])), "label") == ["no", "yes"]
    assert class_names(labelled([2, 0]), "label") == ["0", "1", "2"]
    names = class_names(labelled(["eel", "cat", "eel"]), "label")
    assert names == ["cat", "eel"]
    assert class_indices(labelled(["eel", "cat"]), "label", names) == [1, 0]


@pytest.mark.parametrize(
    "labels, names, message",
    [
        ([0, 3], ["a", "b"], r"1 rows have no class among the 2 known ones in column label, row 1 \(3\)"),
        (["cat", "dog"], ["cat"], r"row 1 \('dog'\)"),
        ([0.5, 1.0], ["a", "b"], "Labels must be class indices or names, but label holds 0.5"),
    ],
)
def test_labels_of_no_known_class_are_refused(labels, names, message):
    with pytest.raises(ValueError, match=message):
        class_indices(labelled(labels), "label", names)


def test_rows_without_a_label_are_refused():
    # As test splits on the Hub have it.
    with pytest.raises(ValueError, match=r"row 1 \(-1\)"):
        class_indices(labelled([0, -1], datasets.ClassLabel(names=["a", "b"])), "label", ["a", "b"])


@pytest.mark.parametrize(
    "flag, value, message", [("drop_path_rate", 1.0, "a probability below 1"), ("hidden_size", 18, "a multiple of")]
)
def test_settings_that_do_not_fit_are_refused(flag, value, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["--output_dir", str(tmp_path), f"--{flag}", str(value), "--use_cpu", "true"])
    assert refused.value.code == 2 and message in capsys.readouterr().err


def test_grey_images_of_28_pixels_are_taken(tmp_path):
    folder = SHARED / "data" / "fashion_mnist"
    if not folder.exists():
        pytest.skip("Fashion-MNIST is not on this machine")
    for split in ("train", "test"):
        rows = datasets.load_dataset("parquet", data_files=str(folder / f"{split}.parquet"), split="train[:16]")
        (tmp_path / "few").mkdir(exist_ok=True)
        rows.to_parquet(tmp_path / "few" / f"{split}.parquet")
    train_teacher(arguments(tmp_path / "few", tmp_path / "out", patch_size=7))
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert model.config.num_labels == 10 and model.config.id2label[9] == "Ankle boot"
