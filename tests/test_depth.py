import json
import runpy
from pathlib import Path

import datasets
import evaluate
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import mean_absolute_percentage_error, root_mean_squared_error
from tiny import picture, tiny_teacher

from raptor_hf import RaptorModel
from raptor_hf.images import load_image_processor
from raptor_hf.probes.depth import (
    DepthBinsHead,
    common_size,
    eigen_crop,
    find_depth_unit,
    read_depth,
    scale_invariant_log_loss,
)

EVAL = Path(__file__).parents[1] / "eval"
main = runpy.run_path(str(EVAL / "depth.py"))["main"]
NAN = float("nan")


@pytest.fixture(scope="module")
def depth_error():
    return evaluate.load(str(EVAL / "metrics" / "depth_error"))


def test_depth_errors_by_hand(depth_error):
    # First image: errors 1 and 0, the third pixel unknown. Second: error 1 of 4 m. Third: nothing known.
    predictions, truth = [[[3.0, 2.0, 9.0]], [[5.0]], [[1.0]]], [[[2.0, 2.0, NAN]], [[4.0]], [[NAN]]]
    result = depth_error.compute(predictions=predictions, references=truth)
    # 5 / 4 is not below 1.25.
    assert result == pytest.approx({"rmse": (0.5**0.5 + 1) / 2, "abs_rel": 0.25, "delta_1_25": 0.25})


def test_depth_errors_of_an_image_are_scikit_learns(depth_error):
    rng = np.random.default_rng(0)
    truth, prediction = rng.uniform(0.5, 9, (6, 8)), rng.uniform(0.5, 9, (6, 8))
    result = depth_error.compute(predictions=[prediction], references=[truth])
    assert result["rmse"] == pytest.approx(root_mean_squared_error(truth.ravel(), prediction.ravel()))
    assert result["abs_rel"] == pytest.approx(mean_absolute_percentage_error(truth.ravel(), prediction.ravel()))
    ratio = prediction / truth
    assert result["delta_1_25"] == pytest.approx(np.mean((ratio < 1.25) & (ratio > 0.8)))


@pytest.mark.parametrize(("prediction", "truth", "message"), [(0, 1, "above 0"), (1, NAN, "no image with a known")])
def test_depth_errors_refuse(depth_error, prediction, truth, message):
    with pytest.raises(ValueError, match=message):
        depth_error.compute(predictions=[[[prediction]]], references=[[[truth]]])


def test_the_eigen_crop():
    rows, columns = eigen_crop(480, 640)
    depth = np.arange(480 * 640).reshape(480, 640)[rows, columns]
    assert depth.shape == (426, 560)
    assert depth[0, 0] == 45 * 640 + 41 and depth[-1, -1] == 470 * 640 + 600
    assert eigen_crop(240, 320) == (slice(22, 236), slice(20, 300))
    with pytest.raises(ValueError, match="--eval_crop none"):
        eigen_crop(500, 741)


METRES = np.array([[0.0, 0.8, 2.5], [3.1, 9.6, NAN]], dtype=np.float32)
MILLIMETRES = (np.nan_to_num(METRES) * 1000).round().astype(np.uint16)
BYTES = (np.nan_to_num(METRES) * 25.5).round().astype(np.uint8)


@pytest.mark.parametrize(
    ("depth", "stated", "unit"),
    [
        (METRES, None, "m"),
        (METRES.astype(np.float64), "m", "m"),
        (MILLIMETRES, None, "mm"),
        (MILLIMETRES.astype(np.int32), None, "mm"),
        (MILLIMETRES.astype(np.float32), None, "mm"),
        (np.where(MILLIMETRES == 0, 65535, MILLIMETRES).astype(np.uint16), None, "mm"),
        (BYTES, "8bit_10m", "8bit_10m"),
    ],
)
def test_the_unit_is_found_or_stated(depth, stated, unit):
    found = find_depth_unit([depth, depth], stated)
    assert found["unit"] == unit and found["by"] == ("stated" if stated else "found") and found["maps"] == 2
    expected = np.where(METRES > 0, METRES, np.float32(NAN))
    np.testing.assert_allclose(read_depth(depth, unit), expected, atol=0.02 if stated == "8bit_10m" else 1e-3)


@pytest.mark.parametrize(
    "depth",
    [
        BYTES,
        BYTES.astype(np.uint16),
        # Fractions of an unknown whole; metres times 256, as KITTI has them; times 5000, as TUM has them.
        METRES / 10,
        (np.nan_to_num(METRES) * 256 * 8).astype(np.uint16),
        (np.nan_to_num(METRES) * 5000).astype(np.uint16),
        METRES * 25.5,
    ],
)
def test_the_unit_is_not_guessed(depth):
    with pytest.raises(ValueError, match=r"can't be told from .*--depth_unit \(m, mm, or 8bit_10m"):
        find_depth_unit([depth])


@pytest.mark.parametrize(
    ("depth", "stated"),
    [(MILLIMETRES, "m"), (MILLIMETRES, "8bit_10m"), (METRES / 100, "mm"), (METRES * 30, "8bit_10m")],
)
def test_a_unit_that_the_numbers_contradict(depth, stated):
    with pytest.raises(ValueError, match=f"can't be in {stated}"):
        find_depth_unit([depth], stated)


def test_no_depth_at_all():
    with pytest.raises(ValueError, match="No depth is above 0"):
        find_depth_unit([METRES * 0])


def test_unknown_depth():
    raw = np.array([[0, 1, 10_000, 10_001, 65535]], dtype=np.uint16)
    np.testing.assert_allclose(read_depth(raw, "mm"), [[NAN, 0.001, 10.0, NAN, NAN]])
    np.testing.assert_allclose(read_depth(np.array([[[-1.0, np.inf, NAN, 4]]]), "m", 3.9), [[NAN] * 4])


def test_sizes_of_splits():
    assert common_size([(480, 640), (240, 320)]) == (480, 640)
    assert common_size([(288, 384)], shorter=100) == (100, 133)
    with pytest.raises(ValueError, match="differ in shape"):
        common_size([(480, 640), (640, 480)])


def test_scale_invariant_log_loss_by_hand():
    target = torch.tensor([[1.0, 2.0, NAN, 8.0]])
    # A factor of 2 everywhere: the variance is 0, and 0.15 of the squared mean stays.
    loss = scale_invariant_log_loss(2 * target.nan_to_num(1.0), target)
    torch.testing.assert_close(loss, torch.tensor(0.15**0.5 * np.log(2)).float())
    # log ratios 1 and -1: the mean is 0 and the mean square 1.
    loss = scale_invariant_log_loss(torch.tensor([np.e, 1 / np.e]), torch.ones(2))
    torch.testing.assert_close(loss, torch.tensor(1.0))


def make_head(**settings):
    head = DepthBinsHead(hidden_size=6, num_bins=11, image_size=(25, 40), **settings)
    torch.nn.init.normal_(head.classifier.weight)
    return head


@pytest.fixture
def features():
    # 25 x 40 pixels, padded to 28 x 42.
    return {"patch": torch.randn(2, 2, 3, 6), "cls": torch.randn(2, 6)}


def test_head_against_its_description(features):
    head = make_head()
    cls = features["cls"][:, :, None, None].expand(-1, -1, 2, 3)
    tokens = torch.cat([features["patch"].permute(0, 3, 1, 2), cls], dim=1)
    tokens = torch.nn.functional.interpolate(tokens, scale_factor=4, mode="bilinear")
    logits = head.classifier(tokens)
    torch.testing.assert_close(head(features), logits)
    bins = 0.001 + torch.arange(11) * (10 - 0.001) / 10
    depth = (logits.softmax(1) * bins[:, None, None]).sum(1, keepdim=True)
    depth = torch.nn.functional.interpolate(depth, size=(28, 42), mode="bilinear")[:, 0, 1:26, 1:41]
    torch.testing.assert_close(head.predict(features, (25, 40)), depth)
    assert head.predict(features, (50, 80)).shape == (2, 50, 80)
    # Without a cls token, patches stand alone.
    assert make_head(use_cls=False).predict({"patch": features["patch"]}, (25, 40)).shape == (2, 25, 40)


def test_loss_is_of_known_pixels(features):
    head = make_head()
    target = torch.full((2, 25, 40), 4.0006)
    loss = head.loss(features, target)
    # Bin 4 of steps of 0.9999 is the nearest; points of the grid in the padding have no truth.
    log_odds = head(features).log_softmax(1)[:, 4]
    rows = (torch.arange(8) * 3.5 + 1.75).long() - 1
    columns = (torch.arange(12) * 3.5 + 1.75).long() - 1
    inside = ((rows >= 0) & (rows < 25))[:, None] & ((columns >= 0) & (columns < 40))
    expected = 10 * scale_invariant_log_loss(head.predict(features, (25, 40)), target) - log_odds[:, inside].mean()
    torch.testing.assert_close(loss, expected)
    target[1] = NAN
    alone = {name: feature[:1] for name, feature in features.items()}
    torch.testing.assert_close(head.loss(features, target), head.loss(alone, target[:1]))
    assert head.loss(features, target * NAN) == 0
    head.loss(features, target).backward()
    assert head.classifier.weight.grad.isfinite().all()


def test_head_is_saved_with_what_it_needs(features, tmp_path):
    head = make_head(max_depth=80.0)
    head.save(tmp_path)
    again = DepthBinsHead.load(tmp_path)
    assert torch.equal(again.predict(features, (25, 40)), head.predict(features, (25, 40)))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    teacher = tiny_teacher()
    RaptorModel.from_teacher(teacher, [3, 3]).save_pretrained(folder / "raptor")
    load_image_processor("no model here", 28).save_pretrained(folder / "raptor")
    return folder


def rooms(seeds) -> tuple[list[Image.Image], list[np.ndarray]]:
    """Pictures of 60 x 80 pixels, brighter where they are nearer, and their depth in metres; some of it unknown."""
    depths = []
    for seed in seeds:
        depth = 1 + 8 * np.asarray(picture(seed, (80, 60), "L"), dtype=np.float32) / 255
        depth[seed % 60, :] = 0
        depths.append(depth)
    return [Image.fromarray((255 - 25 * depth).astype(np.uint8)) for depth in depths], depths


FORMATS = {
    # sayakpaul/nyu_depth_v2: TIFF of floats in metres.
    "nyu_depth_v2": ({"image": datasets.Image(), "depth_map": datasets.Image()}, Image.fromarray, "m"),
    # The usual PNG of 16 bits, beside label maps as in wyrx/NYUDepthv2_seg.
    "millimetres": (
        {"image": datasets.Image(), "depth": datasets.Image(), "label": datasets.Image()},
        lambda depth: Image.fromarray((depth * 1000).round().astype(np.uint16)),
        "mm",
    ),
    "8bit": (
        {"image": datasets.Image(), "depth": datasets.Image()},
        lambda depth: Image.fromarray((depth * 25.5).round().astype(np.uint8)),
        "8bit_10m",
    ),
    # tanganke/nyuv2: arrays, channels first.
    "nyuv2": (
        {
            "image": datasets.Array3D((3, 60, 80), "float32"),
            "segmentation": datasets.Array2D((60, 80), "int64"),
            "depth": datasets.Array3D((1, 60, 80), "float32"),
            "normal": datasets.Array3D((3, 60, 80), "float32"),
            "noise": datasets.Array3D((1, 60, 80), "float32"),
        },
        lambda depth: depth[None],
        "m",
    ),
}


def write(folder: Path, name: str):
    columns, store, _ = FORMATS[name]
    for split, seeds in {"train": range(12), "val": range(12, 16)}.items():
        images, depths = rooms(seeds)
        rows = {
            column: [np.zeros(feature.shape)] * len(images)
            for column, feature in columns.items()
            if hasattr(feature, "shape")
        }
        rows |= {"label": images} if "label" in columns else {}
        if name == "nyuv2":
            images = [np.asarray(image.convert("RGB"), dtype=np.float32).transpose(2, 0, 1) / 255 for image in images]
        rows |= {"image": images, "depth_map" if "depth_map" in columns else "depth": list(map(store, depths))}
        datasets.Dataset.from_dict(rows, features=datasets.Features(columns)).to_parquet(folder / f"{split}.parquet")


def run(models, tmp_path, *flags) -> dict:
    words = ["--model", models / "raptor", "--dataset", tmp_path, "--test_split", "validation"]
    words += ["--output_dir", tmp_path / "out", "--feature_cache", tmp_path / "features"]
    main([str(word) for word in [*words, "--num_train_epochs", 12, "--train_batch_size", 4, *flags]])
    return json.loads((tmp_path / "out" / "depth.json").read_text())["results"]


@pytest.mark.parametrize("name", FORMATS)
def test_data_sets_from_end_to_end(models, tmp_path, name, capsys):
    write(tmp_path, name)
    unit = FORMATS[name][2]
    results = run(models, tmp_path, "--learning_rate", 0.02, *(["--depth_unit", unit] if name == "8bit" else []))
    by = "stated" if name == "8bit" else "found"
    for split in ("train", "test"):
        assert results["depth_unit"][split]["unit"] == unit and results["depth_unit"][split]["by"] == by
    assert f"Depth of train in {unit}, {by}" in capsys.readouterr().out
    # Rows 45:471 and columns 41:601 of 480 x 640, an eighth.
    assert results["measured_part"] == {"rows": [6, 59], "columns": [5, 75], "of": [60, 80]}
    # Each image's own mean depth, the best that knows nothing of its picture.
    depths = [depth[6:59, 5:75] for depth in rooms(range(12, 16))[1]]
    blind = np.mean([np.std(depth[depth > 0]) for depth in depths])
    assert results["rmse"] < 0.7 * blind
    assert results["loss"][-1] < 0.75 * results["loss"][0]
    assert results["images"] == {"train": 12, "test": 4} and (tmp_path / "out" / "depth.png").is_file()
    assert DepthBinsHead.load(tmp_path / "out" / "head").image_size == (60, 80)


def test_same_numbers_twice_and_in_both_protocols(models, tmp_path):
    write(tmp_path, "millimetres")
    flags = ["--num_train_epochs", 2]
    first = run(models, tmp_path, *flags)
    assert run(models, tmp_path, *flags) == first
    paper = run(models, tmp_path, *flags, "--protocol", "paper")
    # Stored features are in half precision.
    assert paper["rmse"] == pytest.approx(first["rmse"], rel=0.01) and paper["loss"] != first["loss"]


def test_smaller_images_and_fewer_of_them(models, tmp_path):
    write(tmp_path, "nyu_depth_v2")
    small = run(
        models, tmp_path, "--image_size", 28, "--max_samples", 5, "--eval_crop", "none", "--num_train_epochs", 1
    )
    assert small["image_size"] == [28, 37] and small["measured_part"]["rows"] == [0, 60]
    assert small["images"] == {"train": 5, "test": 4}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "can't be told from uint8 numbers"),
        (["--depth_unit", "mm", "--max_depth", "0.001"], "max_depth must be above"),
        (["--depth_unit", "8bit_10m", "--test_depth_unit", "m"], "can't be in m"),
        (["--label_column", "image"], "--label_column must be one of depth"),
        (["--num_bins", "1"], "num_bins must be at least 2"),
    ],
)
def test_refusals(models, tmp_path, flags, message, capsys):
    write(tmp_path, "8bit")
    with pytest.raises(SystemExit) as end:
        run(models, tmp_path, *flags)
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert end.value.code == 2 and message in last
    assert not (tmp_path / "out").exists()


# Of the images that scikit-image brings, by its documentation; the Middlebury stereo benchmark of 2014 at a quarter.
FOCAL_LENGTH, PRINCIPAL_POINT_DX, BASELINE = 994.978, 31.086, 0.193001


def test_a_stereo_pair_with_true_disparity(models, tmp_path):
    left, right, disparity = pytest.importorskip("skimage.data").stereo_motorcycle()
    # The disparity takes a pixel of the left image to its partner in the right one.
    row, column = np.nonzero(np.isfinite(disparity))
    partner = np.round(column - disparity[row, column]).astype(int)
    seen = partner >= 0
    partners = right[row[seen], partner[seen]].astype(int)
    apart = np.abs(left[row[seen], column[seen]].astype(int) - partners).mean()
    shuffled = np.abs(
        left[row[seen], column[seen]].astype(int) - np.random.default_rng(0).permutation(partners)
    ).mean()
    assert apart < 0.3 * shuffled
    with np.errstate(divide="ignore"):
        depth = (FOCAL_LENGTH * BASELINE / (disparity + PRINCIPAL_POINT_DX)).astype(np.float32)
    # A motorcycle in a workshop.
    known = np.isfinite(disparity)
    assert 2 < depth[known].min() < 2.5 < np.median(depth[known]) < depth[known].max() < 5.1
    assert (depth[~known] == 0).all()
    columns = datasets.Features({"image": datasets.Image(), "depth_map": datasets.Image()})
    for split, starts in {"train": range(0, 301, 60), "validation": [500]}.items():
        parts = [(slice(top, top + 180), slice(x, x + 240)) for x in starts for top in (0, 160, 320)]
        rows = {"image": [left[part] for part in parts], "depth_map": [Image.fromarray(depth[part]) for part in parts]}
        rows["image"] = list(map(Image.fromarray, rows["image"]))
        datasets.Dataset.from_dict(rows, features=columns).to_parquet(tmp_path / f"{split}.parquet")
    results = run(models, tmp_path, "--image_size", 84, "--max_depth", 6, "--num_train_epochs", 5)
    assert results["depth_unit"]["test"]["unit"] == "m"
    assert results["rmse"] < 1.0 and results["abs_rel"] < 0.3 and 0 < results["delta_1_25"] <= 1
