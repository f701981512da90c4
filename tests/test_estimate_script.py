"""What a run will take, told before it starts."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from tiny import tiny_teacher

from raptor_hf import RaptorModel
from raptor_hf.distillation import DistillationArguments
from raptor_hf.distillation.estimate import EstimateArguments, Part, estimate_run, parts_of
from raptor_hf.modeling_raptor import raptor_config_of_teacher

SCRIPT = Path(__file__).parents[1] / "training" / "estimate.py"


def arguments(**kwargs):
    return DistillationArguments(
        output_dir="unused", use_cpu=True, per_device_train_batch_size=2, disable_tqdm=True, **kwargs
    )


def test_parts_follow_the_stages_and_sizes():
    args = arguments(stage1_ratio=0.5, teacher_forcing_ratio=0.4, early_image_size=14, early_image_ratio=0.8)
    parts = parts_of(args, 20, 28)
    # The first step has teacher forcing alone.
    assert parts == [
        Part(1, 14, 1, 1.0),
        Part(3, 14, 1, 0.5),
        Part(6, 14, 1, 0.0),
        Part(6, 14, 2, 0.0),
        Part(4, 28, 2, 0.0),
    ]


def test_counts_what_a_step_does():
    teacher = tiny_teacher(layers=4).config
    config = raptor_config_of_teacher(teacher, phase_sizes=[2, 2])
    args = arguments(stage1_ratio=0.0, muon=False, save_total_limit=2)
    kind = EstimateArguments(device_kind="a100", num_devices=2, utilization=0.5)
    one = estimate_run(teacher, config, args, kind, 10, 28)
    assert (one["steps"], one["images"]) == (10, 40)
    # Per token and layer 16 D^2 for a block whose MLP is 2 D wide: once by the teacher, thrice by the student. The
    # depth scaling, small in a model of real width, is left to the tolerance.
    tokens, width, layers = 5, 16, 4
    matrices = 16 * width * width * tokens * layers
    attention = 4 * tokens * tokens * width * layers
    patches = 2 * 4 * 3 * 14 * 14 * width
    forward = matrices + attention
    assert one["flops"] == pytest.approx(40 * (4 * forward + patches), rel=0.05)
    assert one["hours"] == pytest.approx(one["flops"] / 2 / (156e12 * 0.5) / 3600)
    assert one["device_hours"] == pytest.approx(2 * one["hours"])
    double = estimate_run(teacher, config, args, kind, 20, 28)
    assert double["flops"] == 2 * one["flops"] and double["memory_bytes"] == one["memory_bytes"]
    assert one["stored_states_bytes"] == 40 * 5 * tokens * width * 4
    parameters = sum(p.numel() for p in RaptorModel(config).parameters())
    trained = sum(p.numel() for p in RaptorModel(config).blocks.parameters())
    # Three checkpoints with two moments of each trained weight, and the Raptor.
    assert one["disk_bytes"] == pytest.approx(4 * (4 * parameters + 3 * 2 * trained), rel=0.01)
    muon = estimate_run(teacher, config, arguments(stage1_ratio=0.0, save_total_limit=2), kind, 10, 28)
    assert muon["flops"] > one["flops"] and muon["disk_bytes"] < one["disk_bytes"]


def test_script(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("estimate_script", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    teacher = tmp_path / "teacher"
    tiny_teacher(layers=4).save_pretrained(teacher)
    flags = ["--teacher", str(teacher), "--dataset", "unused", "--num_images", "10", "--num_train_epochs", "2"]
    flags += ["--image_size", "28", "--num_phases", "2", "--per_device_train_batch_size", "2", "--use_cpu"]
    script.main([*flags, "--output_dir", str(tmp_path), "--disable_tqdm", "true"])
    estimate = json.loads((tmp_path / "estimate.json").read_text())["estimate"]
    assert (estimate["steps"], estimate["images"]) == (10, 20)
    assert estimate["hours"] == pytest.approx(sum(p["steps"] * p["seconds_a_step"] for p in estimate["parts"]) / 3600)
    assert "device hours" in capsys.readouterr().out
    assert not torch.is_inference_mode_enabled()
    with pytest.raises(SystemExit) as error:
        script.main(["--teacher", str(teacher), "--dataset", "unused", "--num_devices", "0"])
    assert error.value.code == 2 and "num_devices must be at least 1" in capsys.readouterr().err
