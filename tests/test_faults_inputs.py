"""What the scripts refuse: one line that says what and why, exit code 2, before anything is loaded."""

import json
import os
import signal

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image
from small_runs import SMALL, make_material, refusal, run
from test_faults_images import dataset_with_bad_rows, encoded
from tiny import picture

from raptor_hf.distillation.run import distill
from raptor_hf.distillation.run_folder import LOCK_NAME
from raptor_hf.files import ASIDE


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("material"))


# Refused before any file is looked at: neither the teacher nor the images are there.
NOWHERE = {"teacher": "/nowhere/teacher", "dataset": "/nowhere/images"}
REFUSED_AT_ONCE = [
    ("distill", {"num_phases": 0}, "num_phases must be at least 1, got 0"),
    ("distill", {"num_phases": "three"}, "invalid int value: 'three'"),
    ("distill", {"phase_sizes": [3, 0]}, "phase_sizes must be one or more sizes of at least 1, got [3, 0]"),
    (
        "distill",
        {"source_layers": [1, 2, 3], "phase_sizes": [3, 3]},
        "source_layers must name a layer for each of the 2",
    ),
    ("distill", {"phase_images": 0}, "phase_images must be at least 1"),
    ("distill", {"phase_objective": "median"}, "invalid choice: 'median'"),
    ("distill", {"image_size": -14}, "image_size must be at least 1, got -14"),
    ("distill", {"early_image_size": 0}, "early_image_size must be at least 1"),
    ("distill", {"max_train_samples": 0}, "max_train_samples must be at least 1"),
    ("distill", {"max_eval_samples": 0}, "max_eval_samples must be at least 1"),
    ("distill", {"crop_scale": [0.5]}, "crop_scale must be two shares"),
    ("distill", {"augment_ratio": 2}, "augment_ratio is a share from 0 to 1, got 2.0"),
    ("distill", {"augment_ratio": 0.5, "crop": "center"}, "augment_ratio goes with random crops"),
    ("distill", {"crop_scale": [float("nan"), 1]}, "crop_scale must be two shares"),
    ("distill", {"learning_rate": -1}, "learning_rate must be a positive number, got -1.0"),
    ("distill", {"learning_rate": "nan"}, "learning_rate must be a finite number, got nan"),
    ("distill", {"seed": -1}, "seed must be from 0"),
    ("distill", {"num_train_epochs": 0}, "num_train_epochs must be above 0"),
    ("distill", {"per_device_train_batch_size": 0}, "per_device_train_batch_size must be at least 1"),
    ("distill", {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1"),
    ("distill", {"stage1_ratio": "nan"}, "stage1_ratio must be a finite number, got nan"),
    ("distill", {"stage2_weights": ["nan", 1, 1]}, "stage2_weights must be three weights"),
    ("distill", {"max_bad_image_share": 1.5}, "max_bad_image_share is a share from 0 to 1"),
    ("distill", {"max_nonfinite_steps": 0}, "max_nonfinite_steps must be at least 1"),
    ("distill", {"save_only_model": True}, "save_only_model would leave checkpoints that a run can't go on from"),
    ("distill", {"lr_scheduler_type": "square"}, "square"),
    ("distill", {"lr_scheduler_kwargs": '{"min": 1}'}, "unexpected keyword argument 'min'"),
    ("distill", {"report_to": "nowhere"}, "report_to nowhere is not installed, or unknown"),
    ("distill", {"save_steps": -1}, "save_steps must be a positive number"),
    ("distill", {"adam_beta1": 2}, "Invalid beta parameter"),
    ("distill", {"weight_decay": -1}, "Invalid weight_decay"),
    ("distill", {"max_grad_norm": "nan"}, "max_grad_norm must be a finite number, got nan"),
    ("distill", {"save_steps": "inf"}, "save_steps"),
    ("distill", {"dataloader_num_workers": -1}, "dataloader_num_workers must be at least 0"),
    ("distill", {"output_dir": ""}, "output_dir is empty: name a folder"),
    ("distill", {"lr_scheduler_kwargs": '{"num_cycles": NaN}'}, "num_cycles must be a finite number, got nan"),
    (
        "distill",
        {"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": '{"timescale": 0}'},
        "give no schedule",
    ),
    (
        "distill",
        {"accelerator_config": '{"gradient_accumulation_kwargs": {"num_steps": 3}}'},
        "gradient_accumulation_kwargs are --gradient_accumulation_steps here",
    ),
    ("distill", {"dataloader_persistent_workers": True}, "dataloader_persistent_workers needs"),
    (
        "distill",
        {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 0},
        "dataloader_prefetch_factor must be at least 1, got 0",
    ),
    ("distill", {"load_best_model_at_end": True, "eval_strategy": "steps"}, "needs --metric_for_best_model"),
    (
        "distill",
        {"save_strategy": "best", "eval_strategy": "steps", "metric_for_best_model": "accuracy"},
        "save_strat",
    ),
    ("distill", {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "needs --metric_for_best"),
    ("distill", {"label_smoothing_factor": 0.1}, "label_smoothing_factor has no meaning in distillation"),
    ("distill", {"neftune_noise_alpha": 1.0}, "neftune_noise_alpha has no meaning in distillation"),
    ("distill", {"num_train_epochs": 1e308}, "num_train_epochs must be above 0, at most 1000000"),
    ("distill", {"cosine_weight": -1.0}, "cosine_weight must be at least 0"),
    ("distill", {"push_to_hub": True, "hub_model_id": "a/b/c"}, "a/b/c"),
    ("distill", {"output_dir": "MATERIAL/no_images.parquet"}, "is no folder that can be written to"),
    ("find_phases", {"output_dir": "MATERIAL/no_images.parquet"}, "is no folder that can be written to"),
    ("train_teacher", {"output_dir": "/proc/version/teacher"}, "is no folder that can be written to"),
    ("distill", {"lr_scheduler_kwargs": "{min_lr"}, "'{min_lr' should be JSON, but isn't"),
    ("distill", {"deepspeed": "/nowhere.json"}, "deepspeed"),
    ("distill", {"config": "/nowhere.yaml"}, "--config /nowhere.yaml can't be read"),
    ("find_phases", {"objective": "median"}, "invalid choice: 'median'"),
    ("find_phases", {"num_phases": ["two"]}, "invalid int value: 'two'"),
    ("train_teacher", {"crop_scale": [2, 3]}, "crop_scale must be two shares"),
    ("train_teacher", {"image_size": 33}, "image_size 33"),
    ("train_teacher", {"patch_size": 0}, "patch_size must be at least 1, got 0"),
    ("train_teacher", {"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
    ("train_teacher", {"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
]
# Refused for what the teacher's configuration or the data set's columns say.
REFUSED_EARLY = [
    ("distill", {"init": "zeros"}, "Raptor zeros can't be loaded"),
    ("distill", NOWHERE, "Teacher /nowhere/teacher can't be loaded"),
    ("distill", {"teacher": "MATERIAL/vit"}, "is a vit model, but a teacher must be one of dinov2"),
    ("distill", {"output_dir": "MATERIAL/teacher"}, "is in the teacher's own folder: give another --output_dir"),
    ("distill", {"output_dir": "MATERIAL/images"}, "is in the dataset's own folder: give another --output_dir"),
    ("distill", {"output_dir": "/proc/of_no_process", "per_device_train_batch_size": 8}, "can't be made"),
    (
        "distill",
        {"eval_strategy": "steps", "save_strategy": "best", "metric_for_best_model": "register_cosine"},
        "register_cosine is of registers, and the teacher has none",
    ),
    ("distill", {"image_size": 30}, "image_size 30 is not a multiple of the teacher's patch size 14"),
    ("distill", {"early_image_size": 15}, "early_image_size 15 is not a multiple of the teacher's patch size 14"),
    ("distill", {"early_image_size": 42}, "early_image_size 42 is larger than image_size 28"),
    ("distill", {"image_size": 28_000_000}, "image_size 28000000 is more than the 9459 pixels"),
    ("find_phases", {"image_size": 28_000_000}, "image_size 28000000 is more than the 9459 pixels"),
    ("distill", {"phase_sizes": [3, 2]}, "phase_sizes [3, 2] sum to 5 layers, but the teacher has 6"),
    ("distill", {"num_phases": 4}, "6 layers can't be cut into 4 phases of at least 2"),
    ("distill", {"block_assignment": [0, 1]}, "6"),
    ("distill", {"hidden_act": "cubic", "init": "random"}, "hidden_act must be swiglu or one of"),
    ("distill", {"drop_path_rate": 1.0}, "drop_path_rate is a probability below 1, got 1.0"),
    ("distill", {"dataset": "/nowhere/images"}, "Data set /nowhere/images can't be loaded"),
    ("distill", {"dataset": "MATERIAL/no_images.parquet"}, "0 image columns among text: name one with"),
    ("distill", {"image_column": "photo"}, "no column photo: --image_column must be one of image"),
    ("distill", {"train_split": "test"}, "has no split test: it has train, validation"),
    ("distill", {"per_device_train_batch_size": 25}, "24 training images don't fill one batch of 25"),
    ("find_phases", {"teacher": "/nowhere"}, "/nowhere"),
    ("find_phases", {"dataset": "/nowhere", "num_phases": [2]}, "Data set /nowhere can't be loaded"),
    ("find_phases", {"similarity": "/nowhere.csv"}, "/nowhere.csv"),
]


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [(s, NOWHERE | a if s != "train_teacher" else a, m) for s, a, m in REFUSED_AT_ONCE] + REFUSED_EARLY,
)
def test_refused_in_one_line_with_exit_code_2(material, tmp_path, capsys, script, arguments, message):
    known = {"teacher": "MATERIAL/teacher", "dataset": "MATERIAL/images"} if script != "train_teacher" else {}
    extra = {"use_cpu": True} if script == "distill" else {}
    with pytest.raises(SystemExit) as info:
        run(script, known | extra | arguments, material, tmp_path)
    assert info.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert message in line and "Traceback" not in line
    assert not list(tmp_path.iterdir())


def test_results_say_how_many_images_could_not_be_read(material, tmp_path):
    run("distill", SMALL | {"max_bad_image_share": 0.1}, material, tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["bad_images"]["train"] == 2 and results["bad_images"]["validation"] == 1
    assert {name.split(":")[0] for name in results["bad_images"]["first"]} == {"0.png", "2.png", "5.png"}
    assert results["nonfinite_steps"] == 0 and not (tmp_path / ASIDE).exists()


def test_a_run_with_too_many_bad_images_ends_with_exit_code_3(material, tmp_path, capsys):
    with pytest.raises(SystemExit) as info:
        run("distill", SMALL, material, tmp_path)
    assert info.value.code == 3
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "training images can't be read" in line]
    assert "more than max_bad_image_share 0.01" in line and ".png: " in line
    assert not (tmp_path / "results.json").exists() and not (tmp_path / "model.safetensors").exists()


def test_a_raptor_whose_numbers_are_not_finite_is_not_saved(material, tmp_path, capsys):
    settings = SMALL | {"max_bad_image_share": 0.1, "learning_rate": 1e30, "muon": False}
    assert "not finite" in refusal(capsys, 3, "distill", settings, material, tmp_path)
    assert not (tmp_path / "results.json").exists() and not (tmp_path / "model.safetensors").exists()


def test_a_folder_that_was_tampered_with(material, tmp_path, capsys):
    call = ("distill", SMALL | {"max_bad_image_share": 0.1, "save_steps": 1}, material, tmp_path)
    run(*call)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").unlink()
    run(*call)
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    changed = bytearray(weights)
    changed[len(weights) // 2] ^= 1
    (tmp_path / "model.safetensors").write_bytes(changed)
    run(*call)
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    (tmp_path / "config.json").unlink()
    run(*call)
    assert (tmp_path / "config.json").is_file()
    (tmp_path / "results.json").write_text("{}")
    assert "results.json is damaged" in refusal(capsys, 2, *call)
    (tmp_path / "results.json").write_text("{")
    assert "results.json is damaged" in refusal(capsys, 2, *call)
    (tmp_path / "results.json").unlink()
    (tmp_path / "arguments.json").unlink()
    assert "holds checkpoints, but no arguments.json" in refusal(capsys, 2, *call)


def test_a_refused_command_leaves_no_trace_and_another_model_is_not_overwritten(material, tmp_path, capsys):
    settings = SMALL | {"max_bad_image_share": 0.1}
    assert "source_layers" in refusal(capsys, 2, "distill", settings | {"source_layers": [9, 9]}, material, tmp_path)
    assert not (tmp_path / "arguments.json").exists()
    (tmp_path / "model.safetensors").write_bytes(b"another's")
    assert "holds another model" in refusal(capsys, 2, "distill", settings, material, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"another's"


def test_two_runs_do_not_share_a_folder(material, tmp_path, capsys):
    call = ("distill", SMALL | {"max_bad_image_share": 0.1}, material, tmp_path)
    with FileLock(tmp_path / LOCK_NAME):
        assert "is where another run is at work" in refusal(capsys, 2, *call)
    assert not (tmp_path / "arguments.json").exists()
    run(*call)
    assert (tmp_path / "results.json").is_file()


def test_what_cannot_be_written_at_the_end_is_refused_at_the_start(material, tmp_path, capsys):
    (tmp_path / "out" / "README.md").mkdir(parents=True)
    call = ("distill", SMALL | {"max_bad_image_share": 0.1}, material, tmp_path / "out")
    assert "README.md is a folder, where a file is to be written" in refusal(capsys, 2, *call)
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    assert "is no folder that can be written to" in refusal(capsys, 2, *call[:-1], tmp_path / "nowhere")


def test_sigterm_outside_training_ends_with_its_exit_code(material, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(distill.__globals__, "load_teacher", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert "the same command goes on" in refusal(capsys, 75, "distill", SMALL, material, tmp_path / "out")
    assert signal.getsignal(signal.SIGTERM) == before and not (tmp_path / "out").exists()


def test_images_that_are_all_bad_are_told_before_anything_is_measured(material, tmp_path, capsys):
    dataset_with_bad_rows(range(24), length=24).to_parquet(tmp_path / "train.parquet")
    settings = SMALL | {"dataset": tmp_path / "train.parquet", "validation_dataset": "MATERIAL/images"}
    line = refusal(capsys, 3, "distill", settings, material, tmp_path / "out")
    assert "100 images in a row can't be read" in line and not (tmp_path / "out").exists()


def test_images_of_any_shape_train(material, tmp_path):
    """One pixel, a narrow strip, palette, grey and 16 bits."""
    (tmp_path / "images").mkdir()
    sixteen_bits = Image.fromarray(np.asarray(picture(2, mode="L")).astype(np.uint16) * 257)
    odd = [picture(0, (1, 1)), picture(1, (1, 90)), picture(2, mode="P"), picture(3, mode="LA"), sixteen_bits]
    for index, image in enumerate([*odd, *(picture(seed) for seed in range(5, 18))]):
        (tmp_path / "images" / f"{index}.png").write_bytes(encoded(image))
    run("distill", SMALL | {"dataset": tmp_path / "images", "max_steps": 2}, material, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "results.json").read_text())["bad_images"]["train"] == 0
