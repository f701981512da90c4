import io
import json
import runpy
from pathlib import Path

import datasets
import evaluate
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import jaccard_score, recall_score
from tiny import tiny_teacher

from raptor_hf import RaptorModel
from raptor_hf.images import load_image_processor
from raptor_hf.probes.dense import Framing, resize_nearest, with_map_column
from raptor_hf.probes.segmentation import IGNORED, LinearSegmentationHead, find_num_labels, read_labels

EVAL = Path(__file__).parents[1] / "eval"
main = runpy.run_path(str(EVAL / "segmentation.py"))["main"]
COLORS = np.array([[30, 30, 30], [220, 40, 40], [40, 40, 220]], dtype=np.uint8)


@pytest.fixture(scope="module")
def mean_iou():
    return evaluate.load(str(EVAL / "metrics" / "mean_iou"))


def test_mean_iou_by_hand(mean_iou):
    # Class 0: one pixel of two in the union; class 1 the same; the last pixel has no truth; class 2 doesn't occur.
    result = mean_iou.compute(predictions=[[[0, 0, 1, 1]]], references=[[[0, 1, 1, 255]]], num_labels=3)
    assert result["per_category_iou"] == [0.5, 0.5, None] and result["mean_iou"] == 0.5
    assert result["per_category_accuracy"] == [1.0, 0.5, None] and result["mean_accuracy"] == 0.75
    assert result["overall_accuracy"] == pytest.approx(2 / 3)


def test_mean_iou_is_scikit_learns_over_maps_of_several_sizes(mean_iou):
    rng = np.random.default_rng(0)
    truth = [rng.integers(-1, 4, size) for size in [(5, 7), (3, 2), (8, 8)]]
    predictions = [rng.integers(0, 4, labels.shape) for labels in truth]
    for pair in zip(predictions, truth):
        mean_iou.add_batch(predictions=pair[:1], references=pair[1:])
    result = mean_iou.compute(num_labels=4, ignore_index=-1)
    x, y = (np.concatenate([labels.ravel() for labels in maps]) for maps in (predictions, truth))
    x, y = x[y >= 0], y[y >= 0]
    assert result["per_category_iou"] == pytest.approx(jaccard_score(y, x, average=None))
    assert result["mean_iou"] == pytest.approx(jaccard_score(y, x, average="macro"))
    assert result["mean_accuracy"] == pytest.approx(recall_score(y, x, average="macro"))
    assert result["overall_accuracy"] == pytest.approx(np.mean(x == y))


@pytest.mark.parametrize(
    ("truth", "message"), [([[7]], "Labels must be 0..2, got"), ([[255]], "All pixels are ignor")]
)
def test_mean_iou_refuses(mean_iou, truth, message):
    with pytest.raises(ValueError, match=message):
        mean_iou.compute(predictions=[[[0]]], references=[truth], num_labels=3)


def coded(labels) -> Image.Image:
    """Class indices as ADE20K's colours; blue counts the objects."""
    labels = np.asarray(labels, dtype=int)
    return Image.fromarray(np.stack([labels // 256 * 10, labels % 256, labels * 0 + 3], axis=-1).astype(np.uint8))


def palette(labels) -> Image.Image:
    image = Image.fromarray(np.asarray(labels, dtype=np.uint8), mode="P")
    image.putpalette([200, 100, 50, 1, 2, 3, 90, 90, 90])
    return image


RAW = [[0, 2], [1, 255]]


@pytest.mark.parametrize(
    ("value", "settings", "expected"),
    [
        (Image.fromarray(np.array(RAW, dtype=np.uint8)), {}, [[0, 2], [1, -1]]),
        (Image.fromarray(np.array(RAW, dtype=np.uint8)), {"reduce_labels": True}, [[-1, 1], [0, -1]]),
        (Image.fromarray(np.array(RAW, dtype=np.uint8)).convert("RGB"), {}, [[0, 2], [1, -1]]),
        (Image.fromarray(np.array(RAW, dtype=np.uint16)), {"ignore_index": 1}, [[0, 2], [-1, 255]]),
        (palette([[0, 2], [1, 1]]), {}, [[0, 2], [1, 1]]),
        (Image.fromarray(np.array([[False, True]])), {}, [[0, 1]]),
        ([[-1, 12], [3, 0]], {}, [[-1, 12], [3, 0]]),
        (np.array([[[2.0, 1.0]]]), {}, [[2, 1]]),
        ([coded([[0, 255], [256, 2977]]), coded([[9, 9], [9, 9]])], {}, [[0, 255], [256, 2977]]),
        ([coded([[0, 255], [256, 2977]])], {"reduce_labels": True}, [[-1, 254], [255, 2976]]),
    ],
)
def test_labels_as_data_sets_store_them(value, settings, expected):
    labels = read_labels(value, **settings)
    assert labels.tolist() == expected and labels.dtype == np.int64


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "no true map"),
        (Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3)), "colours"),
        (np.array([[0.5, 1.0]]), "fractions"),
    ],
)
def test_labels_that_are_none(value, message):
    with pytest.raises(ValueError, match=message):
        read_labels(value)


def test_the_number_of_classes_is_found_or_refused():
    assert find_num_labels([np.array([[0, -1]]), np.array([[4, 0]])]) == 5
    # A mask of 0 and 255, the second taken for the ignored label.
    with pytest.raises(ValueError, match="hold 1 classes"):
        find_num_labels([read_labels(Image.fromarray(np.array([[0, 255]], dtype=np.uint8)))])


def test_head_against_its_formula(tmp_path):
    head = LinearSegmentationHead(hidden_size=6, num_labels=3)
    features = {"patch": torch.randn(2, 2, 3, 6)}
    target = torch.randint(-1, 3, (2, 8, 12))
    scores = torch.einsum("bhwd,nd->bnhw", features["patch"], head.classifier.weight)
    scores = scores + head.classifier.bias[:, None, None]
    logits = torch.nn.functional.interpolate(scores, size=(8, 12), mode="bilinear")
    torch.testing.assert_close(head(features, (8, 12)), logits)
    known = target >= 0
    log_likelihood = logits.log_softmax(1).movedim(1, -1)[known].gather(1, target[known][:, None])
    torch.testing.assert_close(head.loss(features, target), -log_likelihood.mean())
    assert head.loss(features, torch.full((2, 8, 12), IGNORED)) == 0
    with pytest.raises(ValueError, match="Label 3 occurs"):
        head.loss(features, target + 1)
    head.save(tmp_path, model="a teacher")
    again = LinearSegmentationHead.load(tmp_path)
    assert torch.equal(again.predict(features, (8, 12)), head.predict(features, (8, 12)))
    assert json.loads((tmp_path / "config.json").read_text())["model"] == "a teacher"


def scene(seed: int, size=(48, 32)) -> tuple[Image.Image, np.ndarray]:
    """A picture of (width, height) and its labels: a dark ground with a red and a blue rectangle."""
    rng = np.random.default_rng(seed)
    labels = np.zeros(size[::-1], dtype=np.uint8)
    for label in (1, 2):
        top, left = rng.integers(0, size[1] // 2), rng.integers(0, size[0] // 2)
        labels[top : top + size[1] // 2, left : left + size[0] // 3] = label
    return Image.fromarray(COLORS[labels]), labels


@pytest.mark.parametrize("cut", ["square", "random", "none"])
def test_images_and_maps_are_cut_alike(cut):
    framing = Framing(load_image_processor("no model here", 28), (56, 42), cut=cut)
    boxes = set()
    for seed in range(4):
        image, labels = scene(seed)
        frame = framing.frame(*image.size, np.random.default_rng(seed))
        picture, cut_labels = np.array(frame(image), dtype=int), resize_nearest(labels, frame)
        nearest = np.abs(picture[:, :, None] - COLORS.astype(int)).sum(-1).argmin(-1)
        assert cut_labels.shape == (56, 42) and np.mean(nearest == cut_labels) > 0.93
        # A map of twice the resolution is cut in the same place.
        fine = resize_nearest(labels.repeat(2, axis=0).repeat(2, axis=1), frame)
        assert np.mean(fine == cut_labels) > 0.97
        boxes.add(cut_labels.tobytes())
    assert len(boxes) == 4


def test_random_cuts_flip_half_the_time_and_keep_their_share():
    framing = Framing(load_image_processor("no model here", 28), None, cut="random", scale=(0.5, 1.0))
    columns = np.tile(np.arange(64, dtype=np.int32), (48, 1))
    flips, shares = 0, []
    for seed in range(60):
        cut = resize_nearest(columns, framing.frame(64, 48, np.random.default_rng(seed)))
        flips += cut[0, 0] > cut[0, -1]
        shares.append(cut.size / columns.size)
    assert 18 <= flips <= 42
    assert 0.45 < min(shares) < 0.6 < 0.85 < max(shares) <= 1


def test_padding_is_alike_on_both_sides_and_of_the_mean_colour():
    processor = load_image_processor("no model here", 28)
    pixels = Framing(processor, None, multiple_of=14)(Image.new("RGB", (640, 480), "white"), None)
    assert pixels.shape == (3, 490, 644)
    inside = pixels[:, 5:485, 2:642]
    assert (inside > 2).all() and pixels.double().sum() == pytest.approx(inside.double().sum())


def test_columns_are_found_or_refused():
    image, array = datasets.Image(), datasets.Array2D((2, 2), "int64")
    picture, labels = Image.new("RGB", (2, 2)), [[0, 1], [1, 0]]
    columns = datasets.Features(
        {"image": image, "segmentation": array, "depth": array, "label": datasets.Value("int64")}
    )
    rows = {"image": [picture], "segmentation": [labels], "depth": [labels], "label": [3]}
    dataset = datasets.Dataset.from_dict(rows, features=columns)
    assert with_map_column(dataset, None, ("annotation", "segmentation")).column_names == ["image", "map"]
    assert with_map_column(dataset.remove_columns("depth"), None, ("annotation",))[0]["map"] == labels
    with pytest.raises(ValueError, match=r"2 columns .* \(segmentation, depth\) .*--label_column"):
        with_map_column(dataset, None, ("annotation",))
    with pytest.raises(ValueError, match="label holds no maps: --label_column must be one of segmentation, depth"):
        with_map_column(dataset, "label", ())
    # As tools other than `datasets` write parquet: bytes and paths, without a word on images.
    plain = dataset.select_columns(["image"]).add_column("mask", [{"bytes": b"", "path": None}])
    assert plain.features["mask"] != image
    assert with_map_column(plain, None, ("mask",)).features["map"] == datasets.Image(decode=False)


@pytest.mark.parametrize("form", ["EPS", "cut short", "address"])
def test_a_bad_map_is_refused_unopened_and_in_one_line(form):
    buffer = io.BytesIO()
    labels = np.random.default_rng(0).integers(0, 5, (32, 32), dtype=np.uint8)
    Image.fromarray(labels).convert("RGB" if form == "EPS" else "L").save(buffer, "EPS" if form == "EPS" else "PNG")
    value = {"bytes": buffer.getvalue()[: 150 if form == "cut short" else None], "path": None}
    if form == "address":
        value = {"bytes": None, "path": "http://127.0.0.1:9/map.png"}
    with pytest.raises(ValueError, match=r"A true map can't be read \(.*\): mend it, or leave its row out"):
        read_labels(value)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    teacher = tiny_teacher()
    teacher.save_pretrained(folder / "teacher")
    RaptorModel.from_teacher(teacher, [3, 3]).save_pretrained(folder / "raptor")
    for model in ("teacher", "raptor"):
        load_image_processor("no model here", 28).save_pretrained(folder / model)
    return folder


def scene_parse_150(folder: Path):
    """As zhoubolei/scene_parse_150: label 0 is unlabelled, and 1..150 the classes."""
    columns = datasets.Features(
        {
            "image": datasets.Image(),
            "annotation": datasets.Image(),
            "scene_category": datasets.ClassLabel(names=["hall"]),
        }
    )
    for split, seeds in {"train": range(12), "validation": range(12, 16)}.items():
        scenes = [scene(seed, (56, 42 + 14 * (seed % 2))) for seed in seeds]
        labels = [np.where(labels == 0, 150, labels).astype(np.uint8) for _, labels in scenes]
        for label_map in labels:
            label_map[0] = 0
        rows = {"image": [image for image, _ in scenes], "annotation": list(map(Image.fromarray, labels))}
        dataset = datasets.Dataset.from_dict(rows | {"scene_category": [0] * len(scenes)}, features=columns)
        dataset.to_parquet(folder / f"{split}.parquet")


def ade20k(folder: Path):
    """As 1aurent/ADE20K: a list of label maps, whole objects first, and whatever else stands beside them."""
    columns = datasets.Features(
        {
            "image": datasets.Image(mode="RGB"),
            "segmentations": datasets.List(datasets.Image(mode="RGB")),
            "instances": datasets.List(datasets.Image(mode="L")),
            "filename": datasets.Value("string"),
            "scene": datasets.List(datasets.Value("string")),
            "objects": datasets.List({"id": datasets.Value("uint16"), "name": datasets.Value("string")}),
        }
    )
    for split, seeds in {"train": range(8), "validation": range(8, 10)}.items():
        scenes = [scene(seed, (56, 56)) for seed in seeds]
        rows = {
            "image": [image for image, _ in scenes],
            "segmentations": [[coded(labels * 2), coded(labels * 0)] for _, labels in scenes],
            "instances": [[Image.fromarray(labels)] for _, labels in scenes],
            "filename": ["ADE_train_1.jpg"] * len(scenes),
            "scene": [["hall"]] * len(scenes),
            "objects": [[{"id": 1, "name": "wall"}]] * len(scenes),
        }
        datasets.Dataset.from_dict(rows, features=columns).to_parquet(folder / f"{split}.parquet")


def run(models, tmp_path, *flags) -> dict:
    words = ["--model", models / "raptor", "--dataset", tmp_path, "--output_dir", tmp_path / "out", *flags]
    main([str(word) for word in [*words, "--feature_cache", tmp_path / "features"]])
    return json.loads((tmp_path / "out" / "segmentation.json").read_text())["results"]


@pytest.mark.parametrize("protocol", ["fast", "paper"])
def test_scene_parse_150_from_end_to_end(models, tmp_path, protocol, capsys):
    scene_parse_150(tmp_path)
    flags = ["--protocol", protocol, "--image_size", 56, "--do_reduce_labels", "--learning_rate", 0.1]
    flags += ["--num_train_epochs", 8, "--train_batch_size", 6, "--batch_size", 4]
    results = run(models, tmp_path, *flags)
    assert results["num_labels"] == {"value": 150, "by": "found"}
    occurring = [i for i, iou in enumerate(results["per_category_iou"]) if iou is not None]
    assert {0, 1, 149} <= set(occurring)
    # Colours tell the classes, even to a random backbone; the commonest class alone would give a third of the mean.
    assert results["mean_iou"] > 0.4 and results["loss"][-1] < results["loss"][0] / 2
    assert results["images"] == {"train": 12, "test": 4}
    assert "150 classes, found" in capsys.readouterr().out
    assert (tmp_path / "out" / "segmentation.png").is_file()
    head = LinearSegmentationHead.load(tmp_path / "out" / "head")
    assert head.classifier.weight.shape == (150, 16)
    if protocol == "paper":
        assert run(models, tmp_path, *flags) == results


def test_ade20k_from_end_to_end(models, tmp_path):
    ade20k(tmp_path)
    results = run(models, tmp_path, "--image_size", 28, "--num_train_epochs", 1, "--max_samples", 5)
    assert results["num_labels"]["value"] == 5 and results["images"] == {"train": 5, "test": 2}
    assert results["per_category_iou"][1] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--image_size", "30"], "multiple, --image_size 28"),
        (["--label_column", "scene_category"], "--label_column must be one of annotation"),
        (["--test_split", "test"], "no split test"),
        (["--num_labels", "2", "--num_train_epochs", "1"], "classes: give --num_labels"),
        (["--num_labels", "1"], "num_labels must be at least 2"),
        (["--learning_rate", "0"], "learning_rate must be positive"),
        (["--image_column", "picture"], "--image_column must be one of"),
    ],
)
def test_refusals(models, tmp_path, flags, message, capsys):
    scene_parse_150(tmp_path)
    with pytest.raises(SystemExit) as end:
        run(models, tmp_path, *flags)
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert end.value.code == 2 and message in last
    assert not (tmp_path / "out").exists()
