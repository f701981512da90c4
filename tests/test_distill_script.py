"""`training/distill.py` as its users run it, on pictures made here."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hub_server import HubServer
from tiny import picture, tiny_teacher

from raptor_hf import RaptorModel
from raptor_hf.distillation import DataArguments, DistillationArguments, ModelArguments
from raptor_hf.distillation.run import _load_images as load_images
from raptor_hf.images import load_image_processor
from raptor_hf.parser import ConfigArgumentParser
from raptor_hf.teacher_training import TeacherArguments

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "training" / "distill.py"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", str(SCRIPT)]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("material")
    tiny_teacher().save_pretrained(folder / "teacher")
    load_image_processor("no model here", 28).save_pretrained(folder / "teacher")
    features = datasets.Features({"image": datasets.Image()})
    pictures = {"train": range(40), "validation": range(40, 48)}
    (folder / "images").mkdir()
    for split, seeds in pictures.items():
        dataset = datasets.Dataset.from_dict({"image": [picture(seed) for seed in seeds]}, features=features)
        dataset.to_parquet(folder / "images" / f"{split}.parquet")
    return folder


@pytest.fixture(scope="module")
def whole(material, tmp_path_factory):
    """An uninterrupted run, through `accelerate launch`."""
    output_dir = tmp_path_factory.mktemp("whole")
    return output_dir, run([*LAUNCH, *flags(material, output_dir)])


@pytest.fixture(scope="module")
def distill():
    """The script's `main`, called in this process."""
    return runpy.run_path(str(SCRIPT))["main"]


def flags(material, output_dir, **changes) -> list[str]:
    settings = {
        "teacher": material / "teacher",
        "dataset": material / "images",
        "num_phases": 2,
        "max_steps": 20,
        "per_device_train_batch_size": 8,
        "save_steps": 2,
        "logging_steps": 1,
        "output_dir": output_dir,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    words = []
    if {"phase_sizes", "block_assignment"} & set(changes) and "num_phases" not in changes:
        del settings["num_phases"]
    settings = {name: value for name, value in (settings | changes).items() if value is not None}
    for name, value in settings.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}


def run(command, **environment):
    command, environment = list(map(str, command)), ENVIRONMENT | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def losses(output_dir):
    states = sorted(output_dir.glob("checkpoint-*/trainer_state.json"), key=lambda p: int(p.parent.name.split("-")[1]))
    return [e for e in json.loads(states[-1].read_text())["log_history"] if "loss" in e]


def test_distils_saves_and_reports(whole):
    output_dir, done = whole
    assert done.returncode == 0, done.stderr
    assert "Distilling in 1 process(es), on cpu." in done.stdout and "after stage 2" in done.stdout
    results = json.loads((output_dir / "results.json").read_text())
    assert set(results["fidelity"]) == {"before", "after_stage1", "after_stage2"}
    for moment in results["fidelity"].values():
        for token in ("cls", "patch"):
            assert [len(moment[token][key]) for key in ("cosine", "r2", "relative_error")] == [7] * 3
            assert moment[token]["cosine"][0] == pytest.approx(1.0)
    before, after = (results["fidelity"][m]["patch"]["cosine"][-1] for m in ("before", "after_stage2"))
    assert after > before
    assert results["images_seen"] == 160 and sum(results["phase_sizes"]) == 6 and len(results["phase_sizes"]) == 2
    assert results["parameters"]["raptor"] < results["parameters"]["teacher"]
    for name in ("phases.json", "phases.png", "phases.svg", "fidelity.png", "preprocessor_config.json", "README.md"):
        assert (output_dir / name).stat().st_size > 0
    model = RaptorModel.from_pretrained(output_dir, dtype=torch.float32)
    assert model.config.phase_sizes == results["phase_sizes"]


def test_a_finished_run_is_not_run_again(material, whole, distill, capsys):
    output_dir, _ = whole
    modified = (output_dir / "model.safetensors").stat().st_mtime_ns
    distill(flags(material, output_dir))
    assert "after stage 2" in capsys.readouterr().out
    assert (output_dir / "model.safetensors").stat().st_mtime_ns == modified


def test_killed_and_started_again_it_goes_on_from_its_last_checkpoint(material, whole, tmp_path):
    command = [*LAUNCH, *flags(material, tmp_path)]
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.time() + 120
    while not (tmp_path / "checkpoint-6" / "trainer_state.json").is_file() and time.time() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "results.json").is_file()
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert [e["stage"] for e in losses(tmp_path)] == [1] * 10 + [2] * 10
    assert [e["loss"] for e in losses(tmp_path)] == [e["loss"] for e in losses(whole[0])]
    weights = [RaptorModel.from_pretrained(f, dtype=torch.float32).state_dict() for f in (whole[0], tmp_path)]
    for key, value in weights[0].items():
        assert torch.equal(value, weights[1][key]), key


def test_two_processes_follow_one_at_the_same_global_batch(material, whole, tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", SCRIPT]
    done = run([*launch, *flags(material, tmp_path, per_device_train_batch_size=4)])
    assert done.returncode == 0, done.stderr
    assert "Distilling in 2 process(es), on cpu." in done.stdout
    assert [e["loss"] for e in losses(tmp_path)] == pytest.approx([e["loss"] for e in losses(whole[0])], rel=1e-4)
    fidelity = [json.loads((f / "results.json").read_text())["fidelity"]["after_stage2"] for f in (whole[0], tmp_path)]
    assert fidelity[0]["patch"]["cosine"] == pytest.approx(fidelity[1]["patch"]["cosine"], abs=1e-3)


def test_a_stream_goes_on_over_epochs_and_is_resumed_where_it_was(material, tmp_path, distill):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    streamed = {"streaming": True, "phase_sizes": [3, 3], "max_steps": 12}
    distill(flags(material, whole, **streamed))
    assert len(losses(whole)) * 8 > 2 * 40
    shutil.copytree(whole, resumed)
    (resumed / "results.json").unlink()
    for step in (12, 10):
        shutil.rmtree(resumed / f"checkpoint-{step}", ignore_errors=True)
    shutil.copytree(whole / "checkpoint-10", resumed / "checkpoint-10")
    distill(flags(material, resumed, **streamed))
    assert [e["loss"] for e in losses(resumed)] == [e["loss"] for e in losses(whole)]


def test_streaming_needs_a_validation_split(material, tmp_path, distill, capsys):
    (tmp_path / "images").mkdir()
    shutil.copy(material / "images" / "train.parquet", tmp_path / "images")
    with pytest.raises(SystemExit):
        distill(flags(material, tmp_path / "out", streaming=True, dataset=tmp_path / "images"))
    assert "has no validation split, and --streaming holds none out" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["folder", "file", "disk"])
def test_without_a_validation_split_images_are_held_out_of_training(material, tmp_path, form):
    dataset = datasets.load_dataset(str(material / "images"), split="train")
    if form == "disk":
        dataset.save_to_disk(tmp_path / "data")
    else:
        dataset.to_parquet(tmp_path / "data" / "train.parquet")
    name = tmp_path / "data" / "train.parquet" if form == "file" else tmp_path / "data"
    args = DistillationArguments(output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=8)
    train, validation, _ = load_images(DataArguments(dataset=str(name)), args)
    assert (len(train), len(validation)) == (36, 4)
    pixels = [{np.asarray(image).tobytes() for image in part["image"]} for part in (train, validation)]
    assert not pixels[0] & pixels[1]


def test_the_number_of_phases_on_the_command_line_beats_the_files_sizes(material, tmp_path, distill, capsys):
    config = tmp_path / "recipe.yaml"
    config.write_text("phase_sizes: [2, 2, 2]")
    distill(["--config", str(config), *flags(material, tmp_path / "out", max_steps=2)])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results["phase_sizes"]) == 2 and (tmp_path / "out" / "phases.json").is_file()
    with pytest.raises(SystemExit):
        distill(flags(material, tmp_path / "both", phase_sizes=[3, 3], num_phases=2))
    assert "phase_sizes and num_phases are both given" in capsys.readouterr().err


def test_killed_in_the_last_measurement_it_trains_no_further(material, tmp_path, distill):
    settings = {"max_steps": 4, "lr_scheduler_type": "constant"}
    distill(flags(material, tmp_path, **settings))
    weights = RaptorModel.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    results = json.loads((tmp_path / "results.json").read_text())
    (tmp_path / "results.json").unlink()
    distill(flags(material, tmp_path, **settings))
    again = json.loads((tmp_path / "results.json").read_text())
    assert again["images_seen"] == results["images_seen"] == 32 and again["fidelity"] == results["fidelity"]
    for key, value in RaptorModel.from_pretrained(tmp_path, dtype=torch.float32).state_dict().items():
        assert torch.equal(value, weights[key]), key


def test_config_file_with_flags_over_it(material, tmp_path, distill):
    config = tmp_path / "recipe.yaml"
    config.write_text(
        f"teacher: {material / 'teacher'}\ndataset: {material / 'images'}\nphase_sizes: [4, 2]\nmax_steps: 3\n"
        "init: random\nhidden_act: swiglu\nlayerscale_value: 1e-3\nper_device_train_batch_size: 8\nmuon: false\n"
        "stage2_weights: [0.45, 0.10, 0.45]\nsave_strategy: 'no'\nuse_cpu: true\n"
    )
    distill(["--config", str(config), "--output_dir", str(tmp_path / "out"), "--phase_sizes", "3", "3"])
    model = RaptorModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert model.config.phase_sizes == [3, 3] and model.config.hidden_act == "swiglu"


def test_goes_on_from_a_raptor_where_that_ended(material, whole, tmp_path, distill):
    earlier, _ = whole
    start = tmp_path / "start"
    # As published: in half precision, without a run's own files but for its results.
    RaptorModel.from_pretrained(earlier, dtype=torch.float16).save_pretrained(start)
    shutil.copy(earlier / "results.json", start)
    changes = {"init": start, "num_phases": None, "max_steps": 4, "training_mode": "autoregressive"}
    distill(flags(material, tmp_path / "out", **changes))
    model, first = (RaptorModel.from_pretrained(path, dtype=torch.float32) for path in (tmp_path / "out", earlier))
    assert model.config.phase_sizes == first.config.phase_sizes
    for name, value in first.embeddings.state_dict().items():
        assert torch.equal(model.embeddings.state_dict()[name], value)
    assert not torch.equal(model.blocks[0].mlp.fc1.weight, first.blocks[0].mlp.fc1.weight)
    before, results = (json.loads((path / "results.json").read_text()) for path in (earlier, tmp_path / "out"))
    for token, curves in results["fidelity"]["before"].items():
        assert curves["cosine"] == pytest.approx(before["fidelity"]["after_stage2"][token]["cosine"], abs=1e-3)
    assert results["images_seen"] == 32 and before["earlier_training"] is None
    assert results["earlier_training"] == {name: before[name] for name in ("images_seen", "wall_time_seconds")}
    assert f"{before['images_seen']} images seen in" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phase_sizes": [3, 3]}, "phase_sizes goes with init teacher or random: the Raptor"),
        ({"num_phases": 2}, "num_phases goes with init teacher or random"),
        ({"hidden_act": "gelu"}, "hidden_act goes with init teacher or random"),
        ({"depth_scaling": False}, "depth_scaling goes with init teacher or random"),
        ({"source_layers": [2, 5]}, "source_layers goes with init teacher or random"),
        ({"init": "/nowhere"}, "Raptor /nowhere can't be loaded"),
        ({"init": "TEACHER"}, "is a dinov2 model: give teacher, random, or a Raptor's"),
        ({"teacher": "DEEPER"}, "The Raptor has a depth of 6, but its teacher one of 8"),
    ],
)
def test_what_does_not_go_with_a_raptor_to_go_on_from(material, whole, tmp_path, distill, capsys, changes, message):
    tiny_teacher(layers=8).save_pretrained(tmp_path / "deeper")
    folders = {"TEACHER": material / "teacher", "DEEPER": tmp_path / "deeper"}
    changes = {name: folders.get(value, value) if isinstance(value, str) else value for name, value in changes.items()}
    with pytest.raises(SystemExit) as exit_info:
        distill(flags(material, tmp_path / "out", **{"init": whole[0], "num_phases": None} | changes))
    assert exit_info.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert message in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "training" / "configs").glob("*.yaml")))
def test_every_recipe_in_the_tree_is_accepted(name):
    of_teacher = name.startswith("teacher_")
    kinds = (TeacherArguments,) if of_teacher else (ModelArguments, DataArguments, DistillationArguments)
    parsed = ConfigArgumentParser(kinds).parse(
        ["--config", str(ROOT / "training/configs" / name), "--use_cpu", "true"]
    )
    assert parsed[-1].output_dir.startswith("outputs/")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 30}, "image_size 30 is not a multiple of the teacher's patch size 14"),
        ({"phase_sizes": [3, 2]}, "phase_sizes [3, 2] sum to 5 layers, but the teacher has 6"),
        ({"teacher": "/nowhere/at-all"}, "Teacher /nowhere/at-all can't be loaded"),
        ({"dataset": "/nowhere"}, "Data set /nowhere can't be loaded"),
        ({"hidden_act": "swiglu", "phase_sizes": [3, 3]}, 'init="teacher" copies the teacher\'s layers'),
        ({"per_device_train_batch_size": 64}, "40 training images don't fill one batch of 64: lower"),
        ({"num_phases": 4}, "6 layers can't be cut into 4 phases"),
        ({"crop_scale": [0.5, 0.1]}, "crop_scale must be two shares"),
        ({"optim": "nothing"}, "optim"),
        ({"optim": "sgd"}, "optim sgd goes with --muon false"),
        ({"resume_from_checkpoint": "x"}, "resume_from_checkpoint is not needed"),
        ({"train_split": "dev"}, "has no split dev: it has train, validation"),
    ],
)
def test_refusals_are_one_line_with_exit_code_2(material, tmp_path, distill, capsys, changes, message):
    with pytest.raises(SystemExit) as exit_info:
        distill(flags(material, tmp_path / "out", **changes))
    assert exit_info.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert message in line


def test_a_folder_with_another_run_is_not_touched(material, tmp_path, distill, capsys):
    distill(flags(material, tmp_path, max_steps=2))
    saved = (tmp_path / "results.json").read_text()
    with pytest.raises(SystemExit):
        distill(flags(material, tmp_path, max_steps=3))
    assert "holds a run with another max_steps (2, not 3)" in capsys.readouterr().err
    assert (tmp_path / "results.json").read_text() == saved
    for refused in ({"teacher": "nowhere"}, {"image_size": 29}, {"save_total_limit": -1}):
        with pytest.raises(SystemExit):
            distill(flags(material, tmp_path, overwrite_output_dir=True, **refused))
        assert (tmp_path / "results.json").read_text() == saved and list(tmp_path.glob("checkpoint-*"))
    distill(flags(material, tmp_path, max_steps=3, overwrite_output_dir=True))
    assert json.loads((tmp_path / "results.json").read_text())["images_seen"] == 24


def test_the_result_is_pushed_with_its_card_and_nothing_else(material, tmp_path):
    with HubServer() as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        environment |= {"HF_HOME": str(tmp_path / "home")}
        push = {"push_to_hub": True, "hub_model_id": "me/raptor", "hub_token": hub.TOKEN, "max_steps": 2}
        done = run([sys.executable, SCRIPT, *flags(material, tmp_path / "out", **push)], **environment)
        assert done.returncode == 0, done.stderr
        files = hub.repos["me/raptor"].branches["main"]
    assert {"README.md", "config.json", "model.safetensors", "preprocessor_config.json", "modeling_raptor.py"} <= set(
        files
    )
    assert not any("checkpoint" in name or name.endswith((".bin", ".pt", ".pth")) for name in files)
    assert b'from_pretrained("me/raptor")' in files["README.md"]
    assert hub.TOKEN not in done.stdout + done.stderr + (tmp_path / "out" / "results.json").read_text()
