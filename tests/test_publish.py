"""model_cards/publish.py takes no measurement for another's."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
from tiny import tiny_teacher

from raptor_hf import RaptorModel
from raptor_hf.files import weights_sha256

PATH = Path(__file__).parents[1] / "model_cards" / "publish.py"
COUNTS = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("--value")
parser.add_argument("--output_dir", type=pathlib.Path)
args = parser.parse_args()
args.output_dir.mkdir(parents=True, exist_ok=True)
(args.output_dir / "counts.json").write_text(json.dumps(args.value))
sys.exit(args.value == "stopped")
"""


@pytest.fixture(scope="module")
def publish():
    spec = importlib.util.spec_from_file_location("publish", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_measurement_that_was_stopped_is_none(publish, tmp_path, monkeypatch):
    (tmp_path / "counts.py").write_text(COUNTS)
    monkeypatch.setattr(publish, "read_json", lambda path: json.loads(path.read_text()))
    with pytest.raises(subprocess.CalledProcessError):
        publish.measure("counts", tmp_path / "a", of=tmp_path, value="stopped")
    assert publish.measure("counts", tmp_path / "a", of=tmp_path, value="first") == "first"
    assert publish.measure("counts", tmp_path / "a", of=tmp_path, value="second") == "first"


def test_another_teacher_than_the_runs_is_refused(publish, tmp_path, capsys):
    teacher, run = tiny_teacher(), tmp_path / "run"
    for name, model in (("teacher", teacher), ("other", tiny_teacher(seed=1))):
        model.save_pretrained(tmp_path / name)
    RaptorModel.from_teacher(teacher, [3, 3]).save_pretrained(run)
    (run / "results.json").write_text("{}")
    (run / "arguments.json").write_text(json.dumps({"weights_sha256": {"teacher": weights_sha256(teacher)}}))
    flags = {"run": run, "data_dir": tmp_path, "output_dir": tmp_path / "out", "teacher_name": "me/teacher"}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with pytest.raises(SystemExit) as refused:
        publish.main([*words, "--teacher", str(tmp_path / "other")])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert refused.value.code == 2 and "isn't the one that" in error and not (tmp_path / "out").exists()
