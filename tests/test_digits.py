import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageClassification

from raptor_hf import digits
from raptor_hf.images import crop_size, load_image_processor
from raptor_hf.teacher_training import main


def test_digits_are_embedded_and_split_without_overlap():
    train, test = digits.load_digits_dataset("train"), digits.load_digits_dataset("test")
    assert (len(train), len(test)) == (1437, 360)
    assert train[0]["image"].size == (32, 32)
    assert np.bincount(test["label"]).min() >= 34
    with pytest.raises(KeyError):
        digits.load_digits_dataset("dev")


def test_train_teacher_saves_a_classifier_its_processor_and_its_accuracy(tmp_path):
    flags = ["--output_dir", tmp_path, "--max_steps", 40, "--num_hidden_layers", 2, "--learning_rate", 3e-3]
    main([str(flag) for flag in [*flags, "--report_to", "none", "--use_cpu", "true", "--disable_tqdm", "true"]])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["test_accuracy"] > 0.2
    model = AutoModelForImageClassification.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.config.num_labels == 10 and model.config.num_hidden_layers == 2
    assert crop_size(load_image_processor(str(tmp_path))) == 32


def test_train_teacher_refuses_a_missing_label_column(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--output_dir", str(tmp_path), "--label_column", "class", "--use_cpu", "true"])
    assert exit_info.value.code == 2
    assert "set --label_column to one of image, label" in capsys.readouterr().err


def test_the_teacher_is_made_once_then_found(tmp_path, monkeypatch):
    calls = []

    class Done:
        returncode = 0

    def train(command, env):
        calls.append(command)
        assert not {"WORLD_SIZE", "OMP_NUM_THREADS"} & set(env)
        folder = digits.Path(command[command.index("--output_dir") + 1])
        folder.mkdir(parents=True)
        (folder / "results.json").write_text("{}")
        return Done()

    monkeypatch.setattr(digits, "TEACHER", tmp_path / "cache" / "teacher")
    monkeypatch.setattr(digits.subprocess, "run", train)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert digits.digits_teacher() == digits.digits_teacher() == tmp_path / "cache" / "teacher"
    assert len(calls) == 1
