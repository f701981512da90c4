import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_teacher

from raptor_hf import RaptorModel
from raptor_hf.images import load_image_dataset, load_image_processor
from raptor_hf.probes.components import ComponentColors

main = runpy.run_path(str(Path(__file__).parents[1] / "eval" / "patch_components.py"))["main"]


def test_components_are_those_of_a_known_subspace():
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(16, 16, generator=generator))[0][:3]
    strengths = torch.randn(2, 10, 10, 3, generator=generator) * torch.tensor([3.0, 2.0, 1.0])
    colors = ComponentColors(strengths @ basis + 5.0)
    assert colors.explained.sum() == pytest.approx(1.0)
    drawn = colors(strengths @ basis + 5.0)
    assert drawn.shape == (2, 10, 10, 3) and drawn.min() == 0.0 and drawn.max() == 1.0
    for channel in range(3):
        inside = (drawn[..., channel] > 0) & (drawn[..., channel] < 1)
        correlation = np.corrcoef(drawn[..., channel][inside], strengths[..., channel].numpy()[inside])[0, 1]
        assert abs(correlation) > 0.9


def test_the_photographs_are_embedded():
    photographs = load_image_dataset("photographs", "test")
    assert len(photographs) >= 2 and min(photographs[0]["image"].size) >= 400
    with pytest.raises(ValueError, match="photographs has no split train: it has test"):
        load_image_dataset("photographs", "train")


def test_script_draws_a_raptor_beside_its_teacher(tmp_path):
    teacher = tiny_teacher()
    teacher.save_pretrained(tmp_path / "teacher")
    RaptorModel.from_teacher(teacher, [1] * 6).save_pretrained(tmp_path / "same")
    RaptorModel.from_teacher(teacher, [3, 3]).save_pretrained(tmp_path / "raptor")
    load_image_processor("no model here", 56).save_pretrained(tmp_path / "same")
    load_image_processor("no model here", 56).save_pretrained(tmp_path / "raptor")
    cosines = {}
    for name in ("same", "raptor"):
        paths = ["--model", str(tmp_path / name), "--teacher", str(tmp_path / "teacher")]
        main([*paths, "--max_samples", "2", "--output_dir", str(tmp_path / "out")])
        results = json.loads((tmp_path / "out" / "patch_components.json").read_text())["results"]
        assert results["images"] == 2 and len(results["explained_variance"]) == 3
        cosines[name] = results["cosine"]
    assert cosines["same"] == pytest.approx(1.0, abs=1e-5) and cosines["raptor"] < 0.999
    assert (tmp_path / "out" / "patch_components.svg").is_file()
    main(["--model", str(tmp_path / "raptor"), "--max_samples", "1", "--output_dir", str(tmp_path / "alone")])
    assert "cosine" not in json.loads((tmp_path / "alone" / "patch_components.json").read_text())["results"]
