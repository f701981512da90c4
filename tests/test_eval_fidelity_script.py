import json
import runpy
from pathlib import Path

import datasets
import pytest
import torch
from tiny import picture, tiny_teacher

from raptor_hf import RaptorModel
from raptor_hf.fidelity import compare, epsilon_brh, one_step
from raptor_hf.images import load_image_processor
from raptor_hf.teachers import trajectory

main = runpy.run_path(str(Path(__file__).parents[1] / "eval" / "fidelity.py"))["main"]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("material")
    teacher = tiny_teacher()
    teacher.save_pretrained(folder / "teacher")
    tiny_teacher(layers=4).save_pretrained(folder / "shallow")
    RaptorModel.from_teacher(teacher, [4, 2]).save_pretrained(folder / "raptor")
    RaptorModel.from_teacher(teacher, [1] * 6).save_pretrained(folder / "same")
    for model in ("teacher", "raptor", "same"):
        load_image_processor("no model here", 28).save_pretrained(folder / model)
    features = datasets.Features({"image": datasets.Image()})
    images = datasets.Dataset.from_dict({"image": [picture(seed) for seed in range(5)]}, features=features)
    images.to_parquet(folder / "images.parquet")
    return folder


def run(material, output_dir, **changes):
    settings = {"model": "raptor", "teacher": "teacher", "dataset": "images.parquet"} | changes
    paths = [word for name, value in settings.items() for word in (f"--{name}", str(material / value))]
    main([*paths, "--test_split", "train", "--batch_size", "2", "--output_dir", str(output_dir)])
    return json.loads((output_dir / "fidelity.json").read_text())["results"]


def test_one_step_is_the_block_on_the_teachers_state():
    teacher = tiny_teacher(registers=2)
    model = RaptorModel.from_teacher(teacher, [4, 2])
    states = trajectory(teacher, torch.randn(2, 3, 28, 28))
    steps = one_step(model, states)
    assert steps.shape == states.shape and torch.equal(steps[:, 0], states[:, 0])
    for layer, block in enumerate([0, 0, 0, 0, 1, 1], start=1):
        expected = model.blocks[block](states[:, layer - 1], torch.tensor(float(layer)))
        torch.testing.assert_close(steps[:, layer], expected)
    # The layer that a block was copied from is exact.
    torch.testing.assert_close(steps[:, 3], states[:, 3])
    fidelity = compare(model, teacher, [torch.randn(3, 3, 28, 28)])
    for ways in fidelity.values():
        assert set(ways) == {"cls", "register", "patch", "all"}
    tokens = {"cls": 1, "register": 2, "patch": 4}
    errors = {name: torch.tensor(curves["relative_error"]) for name, curves in fidelity["closed_loop"].items()}
    torch.testing.assert_close(errors["all"], sum(count * errors[name] for name, count in tokens.items()) / 7)


def test_epsilon_is_the_largest_error_after_the_embeddings():
    assert epsilon_brh([9.0, 0.1, 0.4, 0.2]) == 0.4


def test_results_and_figures(material, tmp_path):
    results = run(material, tmp_path)
    closed_loop = results["fidelity"]["closed_loop"]["patch"]["cosine"]
    assert len(closed_loop) == 7 and closed_loop[0] == pytest.approx(1) and closed_loop[-1] < 0.999
    assert results["fidelity"]["one_step"]["patch"]["cosine"][3] == pytest.approx(1)
    error = results["fidelity"]["closed_loop"]["all"]["relative_error"]
    assert results["epsilon_brh"]["all"] == max(error) > 0
    assert results["phases"] == [4, 2] and results["images"] == 5 and results["image_size"] == 28
    cost = results["cost"]
    assert cost["model"]["parameters"] < cost["teacher"]["parameters"]
    assert cost["model"]["flops"] == pytest.approx(cost["teacher"]["flops"], rel=0.1)
    assert cost["model"]["stored_bytes"] == 4 * cost["model"]["parameters"]
    for name in ("fidelity_cosine.png", "fidelity_relative_error.svg"):
        assert (tmp_path / name).stat().st_size > 0


def test_a_raptor_that_is_its_teacher(material, tmp_path):
    results = run(material, tmp_path, model="same")
    assert results["epsilon_brh"]["all"] < 1e-5
    assert min(results["fidelity"]["closed_loop"]["cls"]["r2"]) == pytest.approx(1)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"teacher": "shallow"}, "num_hidden_layers is 6, the teacher's 4"),
        ({"model": "teacher"}, "--model must be a Raptor"),
        ({"teacher": "raptor"}, "is a raptor model, but a teacher must be one of"),
    ],
)
def test_refusals(material, tmp_path, changes, message, capsys):
    with pytest.raises(SystemExit) as end:
        run(material, tmp_path, **changes)
    assert end.value.code == 2 and message in capsys.readouterr().err
