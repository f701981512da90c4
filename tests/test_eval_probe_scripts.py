import json
import runpy
from pathlib import Path

import datasets
import evaluate
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import accuracy_score, balanced_accuracy_score
from tiny import tiny_teacher
from transformers import AutoModelForImageClassification, pipeline

from raptor_hf import RaptorForImageClassification, RaptorModel
from raptor_hf.images import load_image_processor

EVAL = Path(__file__).parents[1] / "eval"
knn = runpy.run_path(str(EVAL / "knn.py"))["main"]
linear_probe = runpy.run_path(str(EVAL / "linear_probe.py"))["main"]
NAMES = ["red", "green", "blue"]


def coloured(counts: list[int], seed: int) -> datasets.Dataset:
    """Noisy pictures, each mostly of its class's colour, class by class."""
    rng = np.random.default_rng(seed)
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    columns = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})

    def picture(label):
        pixels = rng.integers(0, 150, (28, 28, 3)) + 40 * (np.arange(3) == label)
        return Image.fromarray(pixels.astype(np.uint8))

    return datasets.Dataset.from_dict({"image": [picture(x) for x in labels], "label": labels}, features=columns)


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A folder with `teacher`, `raptor` and `images` of splits train (class by class) and test."""
    folder = tmp_path_factory.mktemp("material")
    (folder / "images").mkdir()
    coloured([14, 12, 4], 0).to_parquet(folder / "images" / "train.parquet")
    coloured([5, 4, 3], 1).to_parquet(folder / "images" / "test.parquet")
    teacher = tiny_teacher()
    teacher.save_pretrained(folder / "teacher")
    RaptorModel.from_teacher(teacher, [3, 3]).save_pretrained(folder / "raptor")
    for model in ("teacher", "raptor"):
        load_image_processor("no model here", 28).save_pretrained(folder / model)
    return folder


@pytest.fixture
def flags(material, tmp_path):
    words = ["--model", material / "raptor", "--dataset", material / "images", "--output_dir", tmp_path / "out"]
    return [str(word) for word in [*words, "--feature_cache", material / "features"]]


def refusal(main, flags, capsys) -> str:
    with pytest.raises(SystemExit) as end:
        main(flags)
    assert end.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error:" in message
    return message


def results(tmp_path, name: str) -> dict:
    assert (tmp_path / "out" / f"{name}.png").stat().st_size > 0
    return json.loads((tmp_path / "out" / f"{name}.json").read_text())["results"]


def test_the_metric_is_scikit_learns_and_needs_no_hub():
    metric = evaluate.load(str(EVAL / "metrics" / "accuracy"))
    references, predictions = [0, 0, 0, 1, 2], [0, 0, 1, 1, 3]
    measured = metric.compute(references=references, predictions=predictions)
    assert measured["accuracy"] == pytest.approx(accuracy_score(references, predictions)) == 0.6
    with pytest.warns(UserWarning, match="y_pred contains classes"):
        reference = balanced_accuracy_score(references, predictions)
    assert measured["balanced_accuracy"] == pytest.approx(reference)


def test_knn_on_a_test_split_twice(flags, tmp_path, material):
    knn([*flags, "--k", "1", "5"])
    first = results(tmp_path, "knn")
    assert first["k=5"]["images"] == 12 and 0.5 <= first["k=5"]["accuracy"] <= 1
    stored = {path: path.stat().st_mtime_ns for path in (material / "features").rglob("*.safetensors")}
    assert len(stored) == 2
    knn([*flags, "--k", "1", "5", "--batch_size", "5"])
    assert results(tmp_path, "knn") == first
    assert {path: path.stat().st_mtime_ns for path in (material / "features").rglob("*.safetensors")} == stored


def test_knn_cross_validated(flags, tmp_path):
    knn([*flags, "--folds", "5", "--k", "3"])
    result = results(tmp_path, "knn")["k=3"]
    assert result["images"] == 30 and len(result["fold_accuracy"]) == 5
    assert np.mean(result["fold_accuracy"]) == pytest.approx(result["accuracy"])
    assert result["accuracy"] > 0.6


@pytest.mark.parametrize("model, classifier_class", [("raptor", "Raptor"), ("teacher", "Dinov2")])
def test_the_saved_classifier_reproduces_the_accuracy(flags, tmp_path, material, model, classifier_class):
    flags[1] = str(material / model)
    linear_probe(flags)
    result = results(tmp_path, "linear_probe")
    assert result["accuracy"] > 0.6
    folder = tmp_path / "out" / "classifier"
    classifier = AutoModelForImageClassification.from_pretrained(folder)
    assert type(classifier).__name__ == f"{classifier_class}ForImageClassification"
    test = coloured([5, 4, 3], 1)
    predicted = pipeline("image-classification", model=str(folder))(list(test["image"]))
    right = [best[0]["label"] == NAMES[label] for best, label in zip(predicted, test["label"])]
    assert np.mean(right) == pytest.approx(result["accuracy"])
    linear_probe(flags)
    assert results(tmp_path, "linear_probe") == result


def test_the_papers_protocol(flags, tmp_path):
    paper = [*flags, "--protocol", "paper", "--num_train_epochs", "8", "--train_batch_size", "6"]
    linear_probe([*paper, "--warmup_steps", "2", "--learning_rate", "0.03"])
    accuracy = results(tmp_path, "linear_probe")["accuracy"]
    assert accuracy > 0.5
    model = RaptorForImageClassification.from_pretrained(tmp_path / "out" / "classifier").eval()
    processor = load_image_processor("none", 28)
    test = coloured([5, 4, 3], 1)
    with torch.no_grad():
        logits = model(processor(list(test["image"]), return_tensors="pt")["pixel_values"]).logits
    assert (logits.argmax(dim=1) == torch.tensor(test["label"])).float().mean().item() == pytest.approx(accuracy)


def test_linear_probe_cross_validated_saves_no_classifier(flags, tmp_path):
    linear_probe([*flags, "--folds", "4", "--max_samples", "25", "--strengths", "0.01"])
    result = results(tmp_path, "linear_probe")
    assert result["images"] == 25 and len(result["choices"]) == 4 and result["classifier"] is None
    assert not (tmp_path / "out" / "classifier").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--test_split", "validation"], "no split validation: it has train, test"),
        (["--label_column", "colour"], "no column colour: set --label_column"),
        (["--image_column", "picture"], "no column picture"),
        (["--image_size", "30"], "30 pixels don't divide into patches of 14"),
        (["--folds", "20"], "No class has 20 images"),
        (["--max_samples", "0"], "max_samples must be at least 1"),
        (["--model", "nowhere"], "nowhere can't be loaded"),
        (["--features", "none"], "invalid choice"),
    ],
)
def test_refusals(flags, words, message, capsys):
    assert message in refusal(knn, [*flags, *words], capsys)


def test_refuses_what_does_not_fit(flags, tmp_path, capsys):
    test = coloured([5, 4, 3], 1)
    names = datasets.ClassLabel(names=["green", "red", "blue"])
    test.cast_column("label", names).to_parquet(tmp_path / "renamed.parquet")
    renamed = ["--test_dataset", str(tmp_path / "renamed.parquet"), "--test_split", "train"]
    assert "an index must mean the same in both" in refusal(knn, [*flags, *renamed], capsys)
    test.cast_column("label", datasets.Value("float32")).to_parquet(tmp_path / "floats.parquet")
    floats = ["--test_dataset", str(tmp_path / "floats.parquet"), "--test_split", "train"]
    assert "must be class indices" in refusal(knn, [*flags, *floats], capsys)
    assert "k must be from 1 to 30" in refusal(knn, [*flags, "--k", "31"], capsys)
    assert "folds goes with" in refusal(linear_probe, [*flags, "--protocol", "paper", "--folds", "2"], capsys)


@pytest.mark.parametrize("name", ["knn", "linear_probe", "fidelity", "phase_iterations"])
def test_help_names_the_flags_that_all_scripts_share(name, capsys):
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EVAL / f"{name}.py"))["main"](["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    for flag in [
        "model",
        "dataset",
        "train_split",
        "test_split",
        "test_dataset",
        "max_samples",
        "image_size",
        "batch_size",
        "seed",
    ]:
        assert f"--{flag}" in text


def test_classes_are_matched_by_name_where_the_test_data_number_them_otherwise(flags, material, tmp_path):
    knn([*flags, "--k", "3"])
    expected = results(tmp_path, "knn")["k=3"]["accuracy"]
    train, test = coloured([14, 12, 4], 0), coloured([5, 4, 3], 1)
    names = [NAMES[label] for label in train["label"]]
    train.remove_columns("label").add_column("label", names).to_parquet(tmp_path / "strings.parquet")
    columns = test.features.copy()
    columns["label"] = datasets.ClassLabel(names=["blue", "green", "red"])
    renumbered = test.map(lambda row: {"label": 2 - row["label"]}, features=columns)
    renumbered.to_parquet(tmp_path / "renumbered.parquet")
    paths = ["--dataset", str(tmp_path / "strings.parquet"), "--test_dataset", str(tmp_path / "renumbered.parquet")]
    knn([*flags, *paths, "--test_split", "train", "--k", "3"])
    assert results(tmp_path, "knn")["k=3"]["accuracy"] == expected


def test_bad_images_of_both_parts_are_counted_where_their_splits_are_called_alike(flags, material, tmp_path):
    rows = coloured([14, 12, 4], 0).cast_column("image", datasets.Image(decode=False)).to_list()
    rows[3]["image"]["bytes"] = b"none"
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "bad.parquet")
    coloured([5, 4, 3], 1).to_parquet(tmp_path / "good.parquet")
    paths = ["--dataset", str(tmp_path / "bad.parquet"), "--test_dataset", str(tmp_path / "good.parquet")]
    knn([*flags, *paths, "--test_split", "train", "--k", "3"])
    counted = json.loads((tmp_path / "out" / "knn.json").read_text())["bad_images"]
    assert (counted["train"], counted["test"]) == (1, 0) and counted["first"][0].startswith("row 3: ")
