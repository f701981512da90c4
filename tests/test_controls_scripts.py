"""The scripts of the controls as their users run them, on a tiny classifier and runs of one step."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from labelled import distil_flags, make_material

from raptor_hf import RaptorModel
from raptor_hf.controls import ablations, layer_swap, partitions, scaling, starts, stochastic_depth
from raptor_hf.controls.command import run_control
from raptor_hf.controls.experiment import Experiment
from raptor_hf.distillation import DataArguments, DistillationArguments, ModelArguments
from raptor_hf.distillation.faults import RunStopped
from raptor_hf.files import weights_sha256
from raptor_hf.images import load_image_processor
from raptor_hf.parser import ConfigArgumentParser
from raptor_hf.teachers import load_teacher

EVAL = Path(__file__).parents[1] / "eval"
CONTROLS = {
    "ablations": ablations,
    "layer_swap": layer_swap,
    "partitions": partitions,
    "scaling": scaling,
    "stochastic_depth": stochastic_depth,
}


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(autouse=True)
def no_figures_of_members(monkeypatch):
    # They take longer than a step of training, and other tests look at them.
    monkeypatch.setattr("raptor_hf.distillation.run.save_figure", lambda figure, path: None)


def run(script: str, argv: list[str]):
    runpy.run_path(str(EVAL / f"{script}.py"))["main"](argv)


def results_of(output_dir, script: str) -> dict:
    assert (output_dir / f"{script}.png").stat().st_size > 0
    return json.loads((output_dir / f"{script}.json").read_text())["results"]


@pytest.mark.parametrize("config", sorted((EVAL / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_hold_known_flags_that_fit_together(config):
    control = CONTROLS[next(name for name in CONTROLS if config.stem.startswith(name))]
    parts = [control.Arguments]
    if control is not layer_swap:
        parts += [ModelArguments, DataArguments, DistillationArguments]
    arguments = ConfigArgumentParser(parts).parse(["--config", str(config), *(["--bf16", "false"] * (len(parts) > 1))])
    assert arguments[-1].output_dir == f"outputs/{config.stem}"
    recipe = yaml.safe_load(config.read_text()).get("teacher_recipe")
    assert recipe is None or (EVAL.parent / recipe).is_file()


def test_partitions(material, tmp_path, capsys):
    run("partitions", distil_flags(material, tmp_path, num_phases=2, num_random=1, num_shuffled=1))
    results = results_of(tmp_path, "partitions")
    # Of 4 layers there is one segmentation in two phases of at least 2, so none is left to draw.
    assert {m["group"] for m in results["members"].values()} == {"mean", "shuffled"}
    assert results["max_cut"]["accuracy"]["mean"]["shuffled"]["of"] == 1
    assert results["members"]["shuffled-0"]["block_assignment"] not in ([0, 0, 1, 1], [1, 1, 0, 0])
    assert "best by cut (2 2)" in capsys.readouterr().out


def test_layer_swap(material, tmp_path, capsys):
    flags = ["--model", "teacher", "--dataset", "images", "--num_phases", "2", "--output_dir", "out"]
    paths = [str(material / word) if word in ("teacher", "images") else word for word in flags]
    run("layer_swap", [str(tmp_path) if word == "out" else word for word in paths])
    results = results_of(tmp_path, "layer_swap")
    assert results["phase_sizes"] == [2, 2] and results["images"] == 12
    assert results["contrast"]["accuracy"]["intra"]["n"] == 2 and results["contrast"]["accuracy"]["inter"]["n"] == 4
    assert results["matrices"]["final_cosine"][0][1] == results["matrices"]["final_cosine"][1][0] < 1
    assert "different phases" in capsys.readouterr().out


def test_ablations(material, tmp_path, capsys):
    names = ["blocks_from_teacher", "random_blocks_swiglu_8_3d"]
    run("ablations", distil_flags(material, tmp_path, num_phases=2, ablations=names))
    members = results_of(tmp_path, "ablations")["members"]
    assert list(members) == ["base", *names, "random_blocks_gelu"]
    assert members["blocks_from_teacher"]["same_as_base"] and not members["random_blocks_gelu"]["same_as_base"]
    for name in (name for name in members if not members[name]["same_as_base"]):
        arguments = json.loads((tmp_path / "runs" / name / "arguments.json").read_text())
        assert arguments["phase_sizes"] == [2, 2], name
    assert members["random_blocks_gelu"]["parameters"] > members["base"]["parameters"]
    swiglu = members["random_blocks_swiglu_8_3d"]
    assert swiglu["changes"]["intermediate_size"] == 48 and swiglu["reference"] == "random_blocks_gelu"
    difference = swiglu["final_cosine"] - members["random_blocks_gelu"]["final_cosine"]
    assert swiglu["final_cosine_difference"] == pytest.approx(difference)
    assert "random blocks swiglu 8 3d" in capsys.readouterr().out


def test_ablations_in_equal_time(material, tmp_path, monkeypatch):
    timed = []

    def steps_in(experiment, seconds):
        timed.append(experiment.run.muon)
        return 2 if experiment.run.muon else 3

    monkeypatch.setattr("raptor_hf.controls.experiment.Experiment.steps_in", steps_in)
    names = ["adamw", "blocks_from_mean", "blocks_from_best_layer", "double_learning_rate", "cosine_added", "authors"]
    flags = distil_flags(material, tmp_path, phase_sizes=[3, 1], ablations=names, seconds=60, learning_rate=1e-3)
    flags += ["--eval_strategy", "steps", "--eval_steps", "1"]
    run("ablations", flags)
    members = results_of(tmp_path, "ablations")["members"]
    steps = {name: [entry["step"] for entry in found["curve"]] for name, found in members.items()}
    assert steps == {name: [1, 2] for name in members} | {"adamw": [1, 2, 3], "authors": [1, 2, 3]}
    for found in members.values():
        seconds = [entry["seconds"] for entry in found["curve"]]
        assert 0 < seconds[0] < seconds[1]
        assert found["curve"][-1]["final_cosine"] == pytest.approx(found["final_cosine"], abs=1e-5)
    assert members["double_learning_rate"]["changes"]["learning_rate"] == 2e-3
    # Timed once: the same command goes on with the same steps.
    assert len(timed) == len(members)
    run("ablations", flags)
    assert len(timed) == len(members)
    with pytest.raises(SystemExit):
        run("ablations", [word if word != "60" else "61" for word in flags])


def test_starts_other_than_the_middle_layer(material, tmp_path):
    kinds = (ablations.Arguments, ModelArguments, DataArguments, DistillationArguments)
    parsed = ConfigArgumentParser(kinds).parse(distil_flags(material, tmp_path, phase_sizes=[3, 1]))
    experiment = Experiment(*parsed)
    teacher = load_teacher(str(material / "teacher"))
    layers = RaptorModel.from_teacher(teacher, [1] * 4).blocks
    mean = RaptorModel.from_pretrained(starts.mean_of_layers(experiment)["init"], dtype=torch.float32)
    assert mean.config.phase_sizes == [3, 1]
    expected = torch.stack([layers[i].mlp.fc1.weight for i in range(3)]).mean(0)
    torch.testing.assert_close(mean.blocks[0].mlp.fc1.weight, expected)
    torch.testing.assert_close(mean.blocks[1].mlp.fc1.weight, layers[3].mlp.fc1.weight)
    # Of the images themselves, not only of a mean: the second layer, twice there, serves the phase best.
    with torch.no_grad():
        for name, value in teacher.encoder.layer[1].state_dict().items():
            teacher.encoder.layer[2].state_dict()[name].copy_(value)
    teacher.save_pretrained(tmp_path / "doubled")
    doubled = experiment.changed(teacher=str(tmp_path / "doubled"))
    load_image_processor("no model here", 28).save_pretrained(tmp_path / "doubled")
    assert starts.best_layers(doubled)["source_layers"][0] in (2, 3)
    assert starts.best_layers(doubled)["source_layers"][1] == 4


def test_steps_in_so_many_seconds(material, tmp_path, monkeypatch):
    seconds_of_part = {28: 0.75, 14: 0.25}
    monkeypatch.setattr("raptor_hf.distillation.estimate._time", lambda *args: seconds_of_part[args[-1].image_size])
    kinds = (ablations.Arguments, ModelArguments, DataArguments, DistillationArguments)
    parsed = ConfigArgumentParser(kinds).parse(distil_flags(material, tmp_path, num_phases=2, early_image_size=14))
    assert Experiment(*parsed).steps_in(60) == 120


def test_scaling(material, tmp_path, capsys):
    run("scaling", distil_flags(material, tmp_path, num_blocks=[4, 1], learning_rate=1e-9))
    results = results_of(tmp_path, "scaling")
    # With a block for each layer and next to nothing learnt it is the teacher itself.
    assert results["members"]["4"]["accuracy"] == results["teacher"]["accuracy"]
    assert results["members"]["4"]["final_cosine"] == pytest.approx(1, abs=1e-5)
    assert results["members"]["1"]["parameters"] < results["members"]["4"]["parameters"]
    assert results["members"]["1"]["phase_sizes"] == [4]
    assert "| teacher" in capsys.readouterr().out


def test_stochastic_depth(material, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    settings = {"image_size": 28, "patch_size": 14, "hidden_size": 16, "num_hidden_layers": 6, "max_steps": 2}
    settings |= {"num_attention_heads": 2, "phase_structure_steps": 2, "per_device_train_batch_size": 4}
    recipe.write_text(yaml.safe_dump(settings | {"report_to": "none"}))
    flags = distil_flags(material, tmp_path, teacher_recipe=recipe, rates=[0, 0.9], phase_sizes=[3, 3])
    run("stochastic_depth", flags)
    results = results_of(tmp_path, "stochastic_depth")
    assert [m["rate"] for m in results["members"].values()] == [0.0, 0.9]
    first = results["members"]["rate-0-seed-42"]
    assert [entry["step"] for entry in first["during_training"]] == [0, 2]
    assert -1 <= first["mean_similarity"] <= 1 and first["parameters"] > 0
    for name in results["members"]:
        teacher = load_teacher(tmp_path / "teachers" / name)
        began_with = json.loads((tmp_path / name / "runs" / "raptor" / "arguments.json").read_text())
        assert began_with["weights_sha256"]["teacher"] == weights_sha256(teacher)
    assert results["correlation"] == {"n": 2, "r": None, "p": None, "low": None, "high": None}
    assert "Too few different points" in capsys.readouterr().out


@pytest.mark.parametrize(
    "script, flags, message",
    [
        ("partitions", {"phase_sizes": [2, 2]}, "give --num_phases alone"),
        ("partitions", {"num_random": 0}, "num_random must be at least 1"),
        ("scaling", {"streaming": True}, "streaming is not for controls"),
        ("scaling", {"num_phases": 2}, "leave them out"),
        ("scaling", {"num_blocks": [0]}, "num_blocks must be"),
        ("scaling", {"num_blocks": [5]}, "4 layers can't be cut into 5 phases"),
        ("ablations", {"ablations": ["no_sleep"]}, "unknown ablation no_sleep"),
        ("stochastic_depth", {}, "give one"),
        ("stochastic_depth", {"rates": [0.2, 1.5]}, "rates must be"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(script, flags, message, material, tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        run(script, distil_flags(material, tmp_path, **flags))
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert refused.value.code == 2 and message in error
    assert not (tmp_path / "runs").exists()


def test_a_member_that_stops_ends_the_control_with_its_exit_code(material, tmp_path, capsys):
    def measure(experiment):
        raise RunStopped("The disk is full")

    control = SimpleNamespace(Arguments=scaling.Arguments, measure=measure)
    with pytest.raises(SystemExit) as stopped:
        run_control(control, str(EVAL / "scaling.py"), "", distil_flags(material, tmp_path))
    assert stopped.value.code == 3 and "The disk is full" in capsys.readouterr().err
    assert not (tmp_path / "scaling.json").exists()
