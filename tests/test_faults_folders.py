"""Odd output folders, and runs that change under way: nothing is mixed up, nothing stands in the way."""

import json
import shutil

import pytest
import torch
from small_runs import SMALL, make_material, refusal, run
from tiny import tiny_teacher
from transformers import Dinov2Model

from raptor_hf import RaptorModel
from raptor_hf.images import load_image_processor

FEW = SMALL | {"max_bad_image_share": 0.1, "save_steps": 1}
FOUND = {name: value for name, value in FEW.items() if name != "phase_sizes"}


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def finished(material, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    run("distill", FEW, material, folder)
    return folder


@pytest.fixture
def init(finished, tmp_path):
    """A Raptor to go on from."""
    shutil.copytree(finished, tmp_path / "init", ignore=shutil.ignore_patterns("checkpoint-*"))
    return tmp_path / "init"


def going_on(init) -> dict:
    return FOUND | {"init": init}


def test_a_refused_command_leaves_nothing_to_the_next(material, tmp_path, capsys):
    refused = FOUND | {"num_phases": 2, "source_layers": [9, 9]}
    assert "source_layers must name a layer" in refusal(capsys, 2, "distill", refused, material, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".json"]
    run("distill", FOUND | {"num_phases": 3}, material, tmp_path)
    assert len(json.loads((tmp_path / "results.json").read_text())["phase_sizes"]) == 3


def test_an_optimizer_that_is_not_installed_leaves_nothing(material, tmp_path, capsys):
    refused = FEW | {"muon": False, "optim": "adamw_bnb_8bit"}
    assert "bitsandbytes" in refusal(capsys, 2, "distill", refused, material, tmp_path)
    run("distill", FEW | {"muon": False}, material, tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("phases.json", {}, "phases.json is damaged"),
        ("phases.json", {"phase_sizes": [2.5, 3.5]}, "phases.json is damaged"),
        ("phases.json", {"phase_sizes": [7, 3, 2]}, "phases.json is damaged"),
        ("fidelity.json", {"before": 5}, "fidelity.json is damaged"),
        ("fidelity.json", {"before": {}}, "fidelity.json is damaged"),
        ("fidelity.json", {"before": {"cls": {"cosine": ["a"]}}}, "fidelity.json is damaged"),
    ],
)
def test_damaged_notes_of_a_run(material, finished, tmp_path, capsys, name, content, message):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    arguments = json.loads((finished / "arguments.json").read_text())
    settings = FEW
    if name == "phases.json":
        settings = FOUND | {"num_phases": 2}
        arguments |= {"phase_sizes": None, "num_phases": 2}
        (tmp_path / "run" / "arguments.json").write_text(json.dumps(arguments))
    (tmp_path / "run" / name).write_text(json.dumps(content))
    assert message in refusal(capsys, 2, "distill", settings, material, tmp_path / "run")
    assert list((tmp_path / "run").glob("checkpoint-*"))


def test_damaged_arguments_are_not_to_be_deleted(material, finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "arguments.json").write_text("[]")
    error = refusal(capsys, 2, "distill", FEW, material, tmp_path / "run")
    assert "arguments.json is damaged" in error and "--overwrite_output_dir true" in error and "delete" not in error


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_a_finished_run_with_a_damaged_file_is_saved_again(material, finished, tmp_path, name):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / name).write_text("{")
    run("distill", FEW, material, tmp_path / "run")
    assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()


@pytest.mark.parametrize("content", ["{", "[]", '{"images_seen": "many"}', '{"earlier_training": [1]}'])
def test_a_raptor_whose_results_are_damaged_is_refused_at_once(
    material,
    init,
    tmp_path,
    capsys,
    content,
):
    (init / "results.json").write_text(content)
    out = tmp_path / "out"
    assert "results.json is damaged" in refusal(capsys, 2, "distill", going_on(init), material, out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phase_iterations": [4, 2]}, "take phase_iterations out of its configuration"),
        ({"image_size": 56}, "a image_size of (56, 56), its teacher one of (28, 28)"),
        ({"use_mask_token": False}, "a use_mask_token of False"),
    ],
)
def test_a_raptor_that_does_not_fit_is_refused(
    material,
    init,
    tmp_path,
    capsys,
    changes,
    message,
):
    config = json.loads((init / "config.json").read_text())
    (init / "config.json").write_text(json.dumps(config | changes))
    assert message in refusal(capsys, 2, "distill", going_on(init), material, tmp_path / "out")


def test_a_raptor_is_not_trained_over_itself(material, init, capsys):
    settings = going_on(init) | {"overwrite_output_dir": True}
    assert "is in the init's own folder" in refusal(capsys, 2, "distill", settings, material, init)


@pytest.mark.parametrize("changed", ["init", "teacher"])
def test_other_weights_than_when_the_run_began_are_refused(
    material,
    init,
    tmp_path,
    capsys,
    changed,
):
    shutil.copytree(material / "teacher", tmp_path / "teacher")
    out, settings = tmp_path / "out", going_on(init) | {"teacher": tmp_path / "teacher"}
    run("distill", settings, material, out)
    (out / "results.json").unlink()
    kind = {"init": RaptorModel, "teacher": Dinov2Model}[changed]
    model = kind.from_pretrained(tmp_path / changed, dtype=torch.float32)
    with torch.no_grad():
        next(parameter for name, parameter in model.named_parameters() if "fc1.weight" in name).mul_(2)
    model.save_pretrained(tmp_path / changed)
    assert f"{changed} {tmp_path / changed} has other weights than when the run" in refusal(
        capsys, 2, "distill", settings, material, out
    )


def test_the_best_checkpoint_is_taken_after_a_kill_too(material, tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "greater_is_better": False}
    call = ("distill", FEW | best | {"metric_for_best_model": "patch_cosine"}, material, tmp_path)
    run(*call)
    weights = (tmp_path / "model.safetensors").read_bytes()
    last = RaptorModel.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name in ("results.json", "model.safetensors"):
        (tmp_path / name).unlink()
    run(*call)
    assert (tmp_path / "model.safetensors").read_bytes() == weights and last


def test_a_checkpoint_that_is_a_link_is_resumed_and_the_link_removed(material, tmp_path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    run("distill", FEW | {"max_steps": 2}, material, out)
    shutil.move(out / "checkpoint-1", elsewhere)
    (out / "checkpoint-1").symlink_to(elsewhere)
    run("distill", FEW | {"max_steps": 2, "overwrite_output_dir": True}, material, out)
    assert (elsewhere / "checksums.json").is_file() and not (out / "checkpoint-1").is_symlink()


@pytest.mark.parametrize("name", [".raptor_hf-lock", "fidelity.png", "modeling_raptor.py"])
def test_a_folder_where_a_file_is_to_be_written(material, tmp_path, capsys, name):
    (tmp_path / name).mkdir()
    line = refusal(capsys, 2, "distill", FEW, material, tmp_path)
    assert f"{tmp_path / name} is a folder, where a file is to be written" in line


def test_a_file_under_the_name_of_the_partial_folder(material, tmp_path):
    (tmp_path / ".raptor_hf-partial").write_text("")
    run("distill", FEW, material, tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("script", ["distill", "train_teacher"])
def test_another_model_is_not_overwritten(material, tmp_path, capsys, script, name):
    (tmp_path / name).write_text("{}")
    settings = FEW if script == "distill" else {"use_cpu": True}
    assert "holds another model" in refusal(capsys, 2, script, settings, material, tmp_path)


def test_a_teacher_whose_states_are_not_finite_is_refused(material, tmp_path, capsys):
    teacher = tiny_teacher()
    with torch.no_grad():
        for parameter in teacher.encoder.parameters():
            parameter.mul_(1e30)
    teacher.save_pretrained(tmp_path / "teacher")
    load_image_processor("no model here", 28).save_pretrained(tmp_path / "teacher")
    settings, out = FEW | {"teacher": tmp_path / "teacher"}, tmp_path / "out"
    assert "are not finite: give a sound one" in refusal(capsys, 2, "distill", settings, material, out)
    assert not out.exists()


def test_patches_may_be_given_by_their_two_sides(material, tmp_path):
    shutil.copytree(material / "teacher", tmp_path / "teacher")
    path = tmp_path / "teacher" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"patch_size": [14, 14]}))
    run("distill", FEW | {"teacher": tmp_path / "teacher"}, material, tmp_path / "out")
