"""The benchmarks run, compare like with like, and write what they measured."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_teacher

from raptor_hf import RaptorModel

FOLDER = Path(__file__).parents[1] / "benchmarks"
TINY = ["--hidden_size", "64", "--rounds", "2", "--seconds", "0.01", "--memory", "false"]


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("timing", "inference", "training", "phases", "reference"):
        sys.modules.pop(name, None)


def test_compare_tells_how_many_times_as_fast():
    from timing import compare

    small, large = torch.randn(64, 64), torch.randn(512, 512)
    result = compare({"slow": lambda: large @ large, "fast": lambda: small @ small}, rounds=3, seconds=0.02)
    assert result["ratio"]["lowest"] <= result["ratio"]["median"] <= result["ratio"]["highest"]
    assert result["ratio"]["median"] > 2
    assert [len(seconds) for seconds in result["seconds"].values()] == [3, 3]


def allocate(megabytes):
    return lambda: torch.ones(megabytes * 250_000)


def test_peak_memory_is_that_of_the_calls():
    from timing import peak_memory

    # What the process that asks held before is no part of it.
    torch.ones(200_000_000)
    measured = peak_memory(allocate, 200)
    assert measured is None or 190e6 < measured < 260e6


def test_inference(tmp_path, capsys):
    import inference

    settings = ["--num_hidden_layers", "4", "--num_phases", "2", "--batch_sizes", "1", "2", "--image_sizes", "28"]
    inference.main([*TINY, *settings, "--dtypes", "float32", "--modes", "eager", "--output_dir", str(tmp_path)])
    results = json.loads((tmp_path / "inference.json").read_text())
    assert [row["batch_size"] for row in results["results"]] == [1, 2]
    teacher, raptor = (results["stored_bytes_float32"][side] for side in ("Dinov2Model", "RaptorModel"))
    assert raptor < teacher and "Raptor / DINOv2" in capsys.readouterr().out
    with pytest.raises(SystemExit) as error:
        inference.main(["--num_phases", "5"])
    assert error.value.code == 2


@pytest.mark.parametrize(
    "script, flags",
    [
        ("inference", ["--rounds", "0"]),
        ("inference", ["--seconds", "nan"]),
        ("inference", ["--batch_sizes", "0"]),
        ("inference", ["--image_sizes", "0"]),
        ("inference", ["--hidden_size", "0"]),
        ("inference", ["--num_phases", "0"]),
        ("training", ["--phase_sizes", "0"]),
        ("training", ["--teacher_forcing", "2"]),
        ("training", ["--batch_size", "0"]),
        ("phases", ["--num_layers", "1"]),
        ("phases", ["--num_phases", "0"]),
    ],
)
def test_what_can_not_be_measured_is_refused_in_one_line(script, flags, capsys):
    with pytest.raises(SystemExit) as refused:
        importlib.import_module(script).main(flags)
    assert refused.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_inference_of_a_raptor(tmp_path, capsys):
    import inference

    teacher = tiny_teacher(layers=4)
    teacher.save_pretrained(tmp_path / "teacher")
    RaptorModel.from_teacher(teacher, [3, 1]).save_pretrained(tmp_path / "raptor")
    folders = ["--model", str(tmp_path / "raptor"), "--teacher", str(tmp_path / "teacher")]
    settings = ["--batch_sizes", "1", "--image_sizes", "28", "--dtypes", "float32", "--modes", "eager"]
    inference.main([*TINY, *folders, *settings, "--output_dir", str(tmp_path / "measured")])
    results = json.loads((tmp_path / "measured" / "inference.json").read_text())
    stored = sum(parameter.nbytes for parameter in teacher.parameters())
    assert results["stored_bytes_float32"]["Dinov2Model"] == stored and results["machine"]
    for refused in (folders[:2], ["--model", str(tmp_path / "teacher"), *folders[2:]]):
        with pytest.raises(SystemExit) as error:
            inference.main(refused)
        assert error.value.code == 2


def test_both_sides_of_inference_do_the_same_work():
    import inference

    args = inference.Arguments(hidden_size=64, num_hidden_layers=3, num_phases=3)
    outputs = [inference.build(side, args, 1, 28, "float32", "eager")() for side in ("Dinov2Model", "RaptorModel")]
    # Phases of one layer: the Raptor is its teacher.
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def test_training(tmp_path, capsys):
    import training

    settings = ["--phase_sizes", "2", "1", "--image_size", "28", "--batch_size", "2", "--output_dir", str(tmp_path)]
    training.main([*TINY, *settings])
    rows = json.loads((tmp_path / "training.json").read_text())["results"]
    assert [(row["stage"], row["teacher_forcing"]) for row in rows] == [(1, 0.5), (1, 0.0), (2, 0.0)]
    assert "raptor_hf / reference" in capsys.readouterr().out


def test_reference_trains_each_phase():
    import reference

    states, sizes = torch.randn(2, 4, 5, 64), [2, 1]
    blocks = [reference.ReferenceBlock(64, 1) for _ in sizes]
    before = [[parameter.clone() for parameter in block.parameters()] for block in blocks]
    reference.stage1_step(blocks, [torch.optim.AdamW(b.parameters(), lr=1e-2) for b in blocks], states, sizes, 0.5)
    optimizer = torch.optim.AdamW([parameter for block in blocks for parameter in block.parameters()], lr=1e-2)
    reference.stage2_step(blocks, optimizer, states, sizes)
    for block, old in zip(blocks, before):
        assert all(not torch.equal(new, parameter) for new, parameter in zip(block.parameters(), old))


def test_phases(tmp_path, capsys):
    import phases

    torch.manual_seed(0)
    states = torch.nn.functional.normalize(torch.randn(9, 8).cumsum(0), dim=1).double()
    similarity = states @ states.T
    assert phases.try_all_cuts(similarity, 3) == phases.find_phases(similarity, 3)
    settings = ["--num_layers", "6", "--num_phases", "2", "--image_size", "28", "--batch_size", "1", "--rounds", "1"]
    phases.main([*settings, "--output_dir", str(tmp_path)])
    assert set(json.loads((tmp_path / "phases.json").read_text())["results"]["search"]) == {"6"}
