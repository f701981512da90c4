import json
import runpy
from pathlib import Path

import datasets
import pytest
from tiny import picture, tiny_teacher

from raptor_hf import RaptorModel
from raptor_hf.images import load_image_processor

main = runpy.run_path(str(Path(__file__).parents[1] / "eval" / "phase_iterations.py"))["main"]


def test_the_trained_depth_of_an_undistilled_identity_is_the_best(tmp_path):
    teacher = tiny_teacher()
    teacher.save_pretrained(tmp_path / "teacher")
    RaptorModel.from_teacher(teacher, [1] * 6).save_pretrained(tmp_path / "raptor")
    load_image_processor("no model here", 28).save_pretrained(tmp_path / "raptor")
    features = datasets.Features({"image": datasets.Image()})
    images = datasets.Dataset.from_dict({"image": [picture(seed) for seed in range(3)]}, features=features)
    images.to_parquet(tmp_path / "images.parquet")
    flags = ["--model", "raptor", "--teacher", "teacher", "--dataset", "images.parquet", "--output_dir", "out"]
    paths = [flag if flag.startswith("--") else str(tmp_path / flag) for flag in flags]
    main([*paths, "--split", "train", "--scales", "1", "2", "--rounds", "2"])
    same, double = json.loads((tmp_path / "out" / "phase_iterations.json").read_text())["results"]
    assert same["cosine"] == {"cls": pytest.approx(1), "patch": pytest.approx(1)}
    assert double["phase_iterations"] == [2] * 6 and double["block_applications"] == 12
    assert double["cosine"]["cls"] < 0.99
    assert min(same["milliseconds_per_image"], double["milliseconds_per_image"]) > 0
