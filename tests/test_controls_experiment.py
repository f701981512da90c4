import json

import numpy as np
import pytest
import torch
from labelled import distil_flags, make_material

from raptor_hf import RaptorModel
from raptor_hf.controls.experiment import ControlArguments, Experiment
from raptor_hf.controls.head import head_accuracy
from raptor_hf.distillation import DataArguments, DistillationArguments, ModelArguments
from raptor_hf.parser import ConfigArgumentParser
from raptor_hf.phases import find_phases, layer_similarity


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(autouse=True)
def no_figures_of_members(monkeypatch):
    # They take longer than a step of training, and other tests look at them.
    monkeypatch.setattr("raptor_hf.distillation.run.save_figure", lambda figure, path: None)


def make(material, output_dir, **changes) -> Experiment:
    parser = ConfigArgumentParser((ControlArguments, ModelArguments, DataArguments, DistillationArguments))
    return Experiment(*parser.parse(distil_flags(material, output_dir, **changes)))


def test_a_series_is_trained_once_and_found_again(material, tmp_path):
    members = {"equal": {"phase_sizes": [2, 2]}, "shuffled": {"block_assignment": [0, 1, 0, 1], "seed": 7}}
    experiment = make(material, tmp_path)
    results = experiment.series(members)
    assert [result["phase_sizes"] for result in results.values()] == [[2, 2], [2, 2]]
    weights = tmp_path / "runs" / "equal" / "model.safetensors"
    modified = weights.stat().st_mtime_ns
    assert make(material, tmp_path).series(members) == results
    assert weights.stat().st_mtime_ns == modified
    with pytest.raises(ValueError, match="another phase_sizes"):
        experiment.series({"equal": {"phase_sizes": [3, 1]}})
    other = make(material, tmp_path)
    other.teacher_sha256 = "that of a teacher trained anew"
    with pytest.raises(ValueError, match="a Raptor of a teacher of other weights"):
        other.series(members)

    judge = experiment.judge
    found = judge.measure(results["equal"])
    raptor = RaptorModel.from_pretrained(results["equal"]["folder"], dtype=torch.float32).eval()
    assert found["accuracy"] == head_accuracy(raptor, judge.head, judge.rows)
    assert found["parameters"] == results["equal"]["parameters"]["raptor"]
    curves = results["equal"]["fidelity"]["after_stage2"]
    assert found["final_cosine"] == pytest.approx(np.mean([curves[t]["cosine"][-1] for t in ("cls", "patch")]))
    assert found["r2"] == pytest.approx(np.mean([curves[t]["r2"][1:] for t in ("cls", "patch")]))


def test_unfit_members_are_refused_before_any_is_trained(material, tmp_path):
    with pytest.raises(ValueError, match="both given"):
        make(material, tmp_path).series({"good": {}, "bad": {"phase_sizes": [2, 2], "num_phases": 2}})
    assert not (tmp_path / "runs").exists()


def test_changes_reach_the_dataclass_that_they_belong_to(material, tmp_path):
    experiment = make(material, tmp_path)
    changed = experiment.changed(phase_sizes=[1, 3], flip=False, stage1_ratio=0.2, test_split="train")
    assert (changed.model.phase_sizes, changed.data.flip) == ([1, 3], False)
    assert (changed.run.stage1_ratio, changed.own.test_split) == (0.2, "train")
    assert experiment.run.stage1_ratio == 0.5 and changed.run.learning_rate == experiment.run.learning_rate


def test_the_similarity_is_measured_once_and_kept(material, tmp_path, monkeypatch):
    first = make(material, tmp_path).similarity()
    assert first.shape == (4, 4) and torch.diagonal(first) == pytest.approx(torch.ones(4, dtype=torch.float64))

    def measured_again(*args, **kwargs):
        raise AssertionError("measured again")

    monkeypatch.setattr("raptor_hf.controls.experiment.layer_similarity", measured_again)
    again = make(material, tmp_path)
    assert torch.equal(again.similarity(), first)
    assert again.phases(2) == find_phases(first, 2) and again.phases(4) == [1, 1, 1, 1]
    monkeypatch.setattr("raptor_hf.controls.experiment.layer_similarity", layer_similarity)
    assert not torch.equal(make(material, tmp_path, phase_images=3).similarity(), first)


def test_labels_that_are_none_of_the_teachers_classes_are_refused(material, tmp_path):
    config = material / "teacher" / "config.json"
    whole = config.read_text()
    fewer = json.loads(whole)
    with pytest.raises(ValueError, match="There is no column class: set --label_column to one of image, label"):
        _ = make(material, tmp_path, label_column="class").judge
    fewer["architectures"] = ["Dinov2Model"]
    config.write_text(json.dumps(fewer))
    try:
        assert make(material, tmp_path, test_split="nowhere").judge.teacher_accuracy() is None
    finally:
        config.write_text(whole)
