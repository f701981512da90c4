"""Checkpoints of the paper's published code, against its block written out plainly."""

import importlib.util
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from torch import nn
from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model
from transformers import Dinov2WithRegistersConfig as RegistersConfig
from transformers import Dinov2WithRegistersModel as RegistersModel

from raptor_hf import RaptorModel

SCRIPT = Path(__file__).parents[1] / "training" / "convert_reference_checkpoint.py"
WIDTH, HEADS, DEPTH, PHASES = 16, 2, 5, [3, 1, 1]


class Gate(nn.Module):
    def forward(self, x):
        x1, x2 = x.chunk(2, dim=-1)
        return nn.functional.silu(x1) * x2


class Gamma(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))


class ReferenceBlock(nn.Module):
    def __init__(self, swiglu, scaled):
        super().__init__()
        inner = 4 * WIDTH
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-5), nn.LayerNorm(WIDTH, eps=1e-5)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.ls1, self.ls2 = Gamma(), Gamma()
        first = nn.Linear(WIDTH, 2 * inner if swiglu else inner)
        self.mlp = nn.Sequential(first, Gate() if swiglu else nn.GELU(), nn.Linear(inner, WIDTH))
        if scaled:
            self.t_proj = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 3 * WIDTH))

    def forward(self, x, step):
        t1 = t2 = t3 = 1.0
        if hasattr(self, "t_proj"):
            t1, t2, t3 = (1 + self.t_proj(torch.tensor([float(step)]))).chunk(3)
        y = self.norm1(x)
        u = x + t1 * self.ls1.gamma * self.attn(y, y, y, need_weights=False)[0]
        return t3 * (u + t2 * self.ls2.gamma * self.mlp(self.norm2(u)))


class Reference(nn.Module):
    def __init__(self, swiglu=False, scaled=True):
        super().__init__()
        self.thresholds = [3, 4]
        self.blocks = nn.ModuleList(ReferenceBlock(swiglu, scaled) for _ in PHASES)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x):
        states = [x]
        for layer in range(1, DEPTH + 1):
            block = self.blocks[sum(layer > threshold for threshold in self.thresholds)]
            states.append(block(states[-1], layer))
        return states


@pytest.fixture(scope="module")
def convert():
    spec = importlib.util.spec_from_file_location("convert_reference_checkpoint", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": DEPTH, "image_size": 28}
    models = {
        "dinov2": Dinov2Model(Dinov2Config(patch_size=14, **sizes)),
        "registers": RegistersModel(RegistersConfig(patch_size=14, num_register_tokens=3, **sizes)),
    }
    folders = {}
    for name, model in models.items():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        folders[name] = tmp_path_factory.mktemp(name)
        model.eval().save_pretrained(folders[name])
    BitImageProcessorPil().save_pretrained(folders["registers"])
    return {name: (model, str(folders[name])) for name, model in models.items()}


def arguments(state_dict, teacher, output_dir, phase_sizes=PHASES):
    sizes = map(str, phase_sizes)
    return ["--state_dict", str(state_dict), "--teacher", teacher, "--phase_sizes", *sizes, "--output_dir", output_dir]


@pytest.mark.parametrize("family", ["dinov2", "registers"])
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@torch.no_grad()
def test_equals_the_formulas(convert, teachers, tmp_path, family, swiglu, scaled):
    torch.manual_seed(1)
    teacher, folder = teachers[family]
    reference = Reference(swiglu, scaled)
    torch.save(reference.state_dict(), tmp_path / "raptor.pt")
    convert(arguments(tmp_path / "raptor.pt", folder, str(tmp_path / "out")))
    model = RaptorModel.from_pretrained(tmp_path / "out").eval()
    pixels = torch.randn(2, 3, 28, 42)
    expected = reference(teacher.embeddings(pixels))
    out = model(pixels, output_hidden_states=True)
    assert len(out.hidden_states) == DEPTH + 1
    for state, target in zip(out.hidden_states, expected):
        torch.testing.assert_close(state, target, rtol=1e-5, atol=1e-5)
    # The layers do something, so that equality means something.
    assert all((a - b).abs().max() > 0.01 for a, b in pairwise(expected))
    assert model.config.hidden_act == ("swiglu" if swiglu else "gelu")
    assert model.config.depth_scaling == scaled
    # Image processor and card come along.
    assert (tmp_path / "out" / "preprocessor_config.json").exists() == (family == "registers")
    card = str(ModelCard.load(tmp_path / "out" / "README.md"))
    assert "| 1 | 1 to 3 | 3 |" in card and folder not in card


def test_nested_and_parallel_state_dicts(convert, teachers, tmp_path):
    torch.manual_seed(2)
    state = Reference().state_dict()
    torch.save(state, tmp_path / "plain.pt")
    wrapped = {"state_dict": {f"module.{key}": value for key, value in state.items()}, "thresholds": [3, 4]}
    torch.save(wrapped, tmp_path / "wrapped.pt")
    for name in ("plain", "wrapped"):
        convert(arguments(tmp_path / f"{name}.pt", teachers["dinov2"][1], str(tmp_path / name)))
    plain, wrapped = (RaptorModel.from_pretrained(tmp_path / name).state_dict() for name in ("plain", "wrapped"))
    assert plain.keys() == wrapped.keys()
    assert all(torch.equal(plain[key], wrapped[key]) for key in plain)


def broken(name):
    """A checkpoint with one fault, phase sizes, and what the message must say."""
    model = Reference()
    state = model.state_dict()
    weight = "blocks.1.attn.in_proj_weight"
    if name == "missing key":
        del state[weight]
        return state, PHASES, ["lacks", weight]
    if name == "half a depth scaling":
        del state["blocks.2.t_proj.2.bias"]
        return state, PHASES, ["lacks", "blocks.2.t_proj.2.bias"]
    if name == "unexpected key":
        return state | {"blocks.0.attn.relative_bias": torch.ones(1)}, PHASES, ["blocks.0.attn.relative_bias"]
    if name == "gap":
        return (
            {key.replace("blocks.1", "blocks.7"): value for key, value in state.items()},
            PHASES,
            ["lacks", "blocks.1"],
        )
    if name == "no blocks":
        return {"weight": torch.ones(1)}, PHASES, ["no blocks", "state dict"]
    if name == "not a dict":
        return [torch.ones(1)], PHASES, ["state dict"]
    if name == "not tensors":
        return state | {weight: 3}, PHASES, ["state dict", weight]
    if name == "whole module":
        return model, PHASES, ["pickled", "state_dict()"]
    if name == "number of phases":
        return state, [3, 2], ["3 blocks", "2 phase sizes"]
    if name == "depth":
        return state, [3, 1, 2], ["sum to 6", "5"]
    if name == "phase size 0":
        return state, [4, 0, 1], ["phase_sizes", "at least 1"]
    if name == "thresholds":
        return {"state_dict": state, "thresholds": [3, 4]}, [2, 2, 1], ["[3, 4]", "--phase_sizes 3 1 1"]
    if name == "width":
        return Reference().state_dict() | {"blocks.0.mlp.2.weight": torch.ones(8, 64)}, PHASES, ["width", "8", "16"]
    if name == "MLP":
        return state | {"blocks.0.mlp.0.weight": torch.ones(96, WIDTH)}, PHASES, ["GELU", "SwiGLU", "96", "64"]
    if name == "1-d matrix":
        return state | {"blocks.0.mlp.2.weight": torch.ones(8)}, PHASES, ["mlp.2.weight has 1 dim"]
    if name == "not finite":
        return state | {weight: torch.full_like(state[weight], torch.nan)}, PHASES, [weight, "finite"]
    if name == "complex":
        return state | {weight: state[weight].to(torch.complex64)}, PHASES, [weight, "real"]
    if name == "nested nothing":
        return {"state_dict": 3}, PHASES, ["no plain state dict"]
    if name == "keys":
        return {3: torch.ones(1)}, PHASES, ["no plain state dict"]
    if name == "no list of thresholds":
        return {"state_dict": state, "thresholds": 2}, PHASES, ["thresholds 2"]
    if name == "threshold at the end":
        return {"state_dict": state, "thresholds": [2, 5]}, PHASES, ["give its own teacher"]
    if name == "shape":
        return state | {weight: torch.ones(3, 3)}, PHASES, [weight, "(3, 3)"]


FAULTS = "missing key|half a depth scaling|unexpected key|gap|no blocks|not a dict|not tensors|whole module"
FAULTS += "|number of phases|depth|phase size 0|thresholds|width|MLP|shape|1-d matrix|not finite|complex"
FAULTS += "|nested nothing|keys|no list of thresholds|threshold at the end"


@pytest.mark.parametrize("fault", FAULTS.split("|"))
def test_faults_are_told_in_one_line(convert, teachers, tmp_path, capsys, fault):
    checkpoint, phase_sizes, words = broken(fault)
    torch.save(checkpoint, tmp_path / "raptor.pt")
    with pytest.raises(SystemExit) as stop:
        convert(arguments(tmp_path / "raptor.pt", teachers["dinov2"][1], str(tmp_path / "out"), phase_sizes))
    assert stop.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    for word in ("convert_reference_checkpoint.py: ", *words):
        assert word in message
    assert not (tmp_path / "out").exists()


def test_bad_files_and_teachers(convert, teachers, tmp_path, capsys):
    (tmp_path / "text.pt").write_text("no checkpoint")
    torch.save(Reference().state_dict(), tmp_path / "raptor.pt")
    whole = (tmp_path / "raptor.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    cases = {
        "absent.pt": (teachers["dinov2"][1], "is not a file"),
        ".": (teachers["dinov2"][1], "is not a file"),
        "text.pt": (teachers["dinov2"][1], "text.pt"),
        "cut.pt": (teachers["dinov2"][1], "cut.pt is damaged"),
        "raptor.pt": (str(tmp_path / "no-teacher"), "no-teacher"),
    }
    for name, (teacher, words) in cases.items():
        with pytest.raises(SystemExit) as stop:
            convert(arguments(tmp_path / name, teacher, str(tmp_path / "out")))
        assert stop.value.code == 2
        assert words in capsys.readouterr().err.splitlines()[-1]


def test_as_a_command(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments(tmp_path / "absent.pt", "teacher", str(tmp_path / "out"))],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "absent.pt is not a file" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
