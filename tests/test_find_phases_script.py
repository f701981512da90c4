import json
import runpy
from pathlib import Path

import datasets
import numpy as np
import pytest
from tiny import picture, tiny_teacher
from transformers import (
    CLIPConfig,
    CLIPModel,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    ViTMSNConfig,
    ViTMSNModel,
)

from raptor_hf.images import load_image_processor

SCRIPT = Path(__file__).parents[1] / "training" / "find_phases.py"
main = runpy.run_path(str(SCRIPT))["main"]


def test_writes_sizes_and_figures_of_a_matrix(tmp_path):
    matrix = np.kron(np.eye(2), np.ones((3, 3))) * 0.5 + 0.5
    np.savetxt(tmp_path / "similarity.csv", matrix, delimiter=",", header="layer similarity")
    flags = ["--similarity", tmp_path / "similarity.csv", "--num_phases", "1", "2", "--output_dir", tmp_path / "out"]
    main([str(flag) for flag in flags])
    results = json.loads((tmp_path / "out" / "find_phases.json").read_text())
    assert results["phases"]["2"] == {"phase_sizes": [3, 3], "objective": pytest.approx(6.0)}
    assert results["phases"]["1"] == {"phase_sizes": [6], "objective": pytest.approx(4.5)}
    np.testing.assert_allclose(results["similarity"], matrix)
    for k in (1, 2):
        for ending in ("png", "svg"):
            assert (tmp_path / "out" / f"phases_k{k}.{ending}").stat().st_size > 1000


@pytest.fixture
def images(tmp_path):
    """A parquet file of five pictures."""
    features = datasets.Features({"image": datasets.Image()})
    images = datasets.Dataset.from_dict({"image": [picture(seed) for seed in range(5)]}, features=features)
    images.to_parquet(tmp_path / "images.parquet")
    return tmp_path / "images.parquet"


def test_measures_a_teacher_on_images(tmp_path, images):
    tiny_teacher().save_pretrained(tmp_path / "teacher")
    load_image_processor("no model here", 28).save_pretrained(tmp_path / "teacher")
    flags = ["--teacher", tmp_path / "teacher", "--dataset", images, "--num_phases", "3"]
    main([str(flag) for flag in [*flags, "--max_samples", "4", "--output_dir", tmp_path / "out"]])
    results = json.loads((tmp_path / "out" / "find_phases.json").read_text())
    assert sum(results["phases"]["3"]["phase_sizes"]) == 6
    np.testing.assert_allclose(np.diag(results["similarity"]), 1, atol=1e-6)


SIZES = dict(hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32)
VISION = SIZES | dict(image_size=32, patch_size=8)
OTHER_FAMILIES = {
    "clip": lambda: CLIPModel(CLIPConfig(text_config=SIZES | {"vocab_size": 9}, vision_config=VISION)),
    "siglip2": lambda: Siglip2VisionModel(Siglip2VisionConfig(**SIZES, patch_size=8, num_patches=16)),
    "stated": lambda: ViTMSNModel(ViTMSNConfig(**VISION)),
}


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_measures_models_of_other_families_at_another_size(tmp_path, images, family):
    OTHER_FAMILIES[family]().save_pretrained(tmp_path / "model")
    flags = ["--teacher", tmp_path / "model", "--dataset", images, "--num_phases", "2", "--image_size", "40"]
    flags += ["--token_layout", "cls", "patch"] if family == "stated" else []
    main([str(flag) for flag in [*flags, "--output_dir", tmp_path / "out"]])
    results = json.loads((tmp_path / "out" / "find_phases.json").read_text())
    assert np.shape(results["similarity"]) == (4, 4) and sum(results["phases"]["2"]["phase_sizes"]) == 4
    np.testing.assert_allclose(np.diag(results["similarity"]), 1, atol=1e-6)


def test_refuses_too_many_phases_before_it_measures(tmp_path, capsys):
    tiny_teacher().save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        main(["--teacher", str(tmp_path), "--num_phases", "4", "--dataset", "/nowhere"])
    assert exit_info.value.code == 2
    assert "6 layers can't be cut into 4 phases" in capsys.readouterr().err


def test_refuses_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--similarity", str(tmp_path / "nothing.csv")])
    assert exit_info.value.code == 2
    assert "nothing.csv" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--max_samples", "-3"], "max_samples must be at least 1"),
        (["--similarity", "a.csv", "--dissimilarity", "b.csv"], "both given"),
        (["--similarity", "absent.csv"], "--similarity absent.csv can't be read"),
        (["--image_size", "5"], "don't divide into patches"),
    ],
)
def test_refusals_name_the_flag(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    tiny_teacher().save_pretrained("teacher")
    with pytest.raises(SystemExit) as stop:
        main(["--teacher", "teacher", *flags])
    assert stop.value.code == 2 and message in capsys.readouterr().err
