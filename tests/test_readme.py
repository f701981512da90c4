"""What the README says can be copied and run."""

import re
from pathlib import Path

import pytest
import torch
from tiny import tiny_teacher
from transformers import Dinov2Model

from raptor_hf import RaptorModel
from raptor_hf.images import load_image_processor

README = (Path(__file__).parents[1] / "README.md").read_text()


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\b(?:training|tests|eval|raptor_hf)/[\w./]*\w", README))))
def test_every_path_that_the_readme_names_is_there(name):
    assert (Path(__file__).parents[1] / name).exists() or name == "training/configs/cpu_dinov2_small"


def test_swap_it_in_is_one_line_and_the_code_after_it_runs(tmp_path, monkeypatch):
    (diff,) = blocks(section("Swap it in"), "diff")
    old, new = (line[2:] for line in diff.splitlines())
    monkeypatch.chdir(tmp_path)
    teacher = tiny_teacher()
    teacher.save_pretrained("facebook/dinov2-small")
    folder = "model_cards/raptor-dinov2-small-k3"
    RaptorModel.from_teacher(teacher, [3, 3]).save_pretrained(folder)
    load_image_processor("no model here", 28).save_pretrained(folder)
    code = blocks(section("Swap it in"), "python")[0]
    assert new.split(" = ")[1].split("(")[0] in code
    outputs = {}
    for line in (old, new):
        swapped = "\n".join(line if part.startswith("model = ") else part for part in code.splitlines())
        scope = {"Dinov2Model": Dinov2Model}
        exec(swapped, scope)
        outputs[line] = scope["outputs"]
    assert len(outputs[old].hidden_states) == len(outputs[new].hidden_states) == 7
    for name in ("last_hidden_state", "pooler_output"):
        assert outputs[old][name].shape == outputs[new][name].shape
    torch.testing.assert_close(outputs[old].hidden_states[0], outputs[new].hidden_states[0])


def test_a_head_of_ones_own(tmp_path, monkeypatch):
    code = blocks(section("Swap it in"), "python")[1]
    monkeypatch.chdir(tmp_path)
    RaptorModel.from_teacher(tiny_teacher(), [3, 3]).save_pretrained("model_cards/raptor-dinov2-small-k3")
    scope = {"torch": torch}
    exec(code, scope)
    classifier = scope["classifier"]
    assert classifier(torch.zeros(2, 3, 28, 28)).logits.shape == (2, 10)
    torch.testing.assert_close(
        classifier.raptor.state_dict(),
        RaptorModel.from_pretrained("model_cards/raptor-dinov2-small-k3", dtype=torch.float32).state_dict(),
    )


def test_a_raptor_straight_from_a_teacher(tmp_path, monkeypatch):
    code = blocks(section("Swap it in"), "python")[2]
    monkeypatch.chdir(tmp_path)
    tiny_teacher(layers=12).save_pretrained("facebook/dinov2-small")
    scope = {"RaptorModel": RaptorModel, "pixel_values": torch.zeros(1, 3, 28, 28)}
    exec(code, scope)
    assert scope["states"].shape == (1, 13, 5, 16)
    assert scope["raptor"].config.phase_sizes == [6, 4, 2]


def test_find_phases_in_python():
    code = blocks(section("Find phases"), "python")[0]
    scope = {"teacher": tiny_teacher(), "batches_of_pixel_values": [torch.randn(2, 3, 28, 28)]}
    exec(code, scope)
    assert sum(scope["sizes"]) == 6 and len(scope["sizes"]) == 3


def test_three_lines_to_a_trajectory_and_three_to_a_figure(tmp_path, monkeypatch):
    to_trajectory, to_figure = blocks(section("Depth as a dynamical system"), "python")
    monkeypatch.chdir(tmp_path)
    tiny_teacher(layers=12).save_pretrained("facebook/dinov2-small")
    scope = {"pixel_values": torch.randn(2, 3, 28, 28)}
    exec(to_trajectory, scope)
    assert scope["states"].shape == (2, 13, 5, 16)
    exec(to_figure, scope)
    assert Path("coherence.png").stat().st_size > 1000 and Path("coherence.svg").is_file()
