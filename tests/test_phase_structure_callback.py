import json

import numpy as np
import pytest
import torch
from labelled import tiny_classifier
from transformers import Trainer, TrainingArguments, set_seed

from raptor_hf.phase_structure_callback import PhaseStructureCallback, mean_off_diagonal
from raptor_hf.phases import find_phases, layer_similarity

ROWS = [
    {"pixel_values": torch.randn(3, 28, 28, generator=torch.Generator().manual_seed(i)), "labels": i % 3}
    for i in range(8)
]


def make_trainer(folder, **changes) -> Trainer:
    set_seed(0)
    model = tiny_classifier()
    model.config.drop_path_rate = 0.5
    model = type(model)(model.config)
    settings = dict(max_steps=4, per_device_train_batch_size=4, logging_steps=1, report_to="none", use_cpu=True)
    settings |= dict(output_dir=str(folder), save_strategy="no", disable_tqdm=True)
    args = TrainingArguments(**settings | changes)
    return Trainer(model=model, args=args, train_dataset=ROWS)


def test_it_logs_scalars_keeps_matrices_and_leaves_training_as_it_is(tmp_path):
    plain, watched = make_trainer(tmp_path / "plain"), make_trainer(tmp_path / "watched")
    watched.add_callback(PhaseStructureCallback(watched, ROWS, every=3, num_phases=2, num_images=5, batch_size=2))
    for trainer in (plain, watched):
        set_seed(0)
        trainer.train()
    for one, other in zip(plain.model.parameters(), watched.model.parameters()):
        assert torch.equal(one, other)
    assert watched.model.training == plain.model.training

    entries = json.loads((tmp_path / "watched" / "phase_structure.json").read_text())
    assert [entry["step"] for entry in entries] == [0, 3, 4]
    logged = [entry for entry in watched.state.log_history if "phase_objective" in entry]
    assert [entry["step"] for entry in logged] == [0, 3, 4]
    # All steps' losses are logged beside it.
    assert sum("loss" in entry for entry in watched.state.log_history) == 4
    last = entries[-1]
    similarity = layer_similarity(watched.model.eval(), [torch.stack([row["pixel_values"] for row in ROWS[:5]])])
    assert np.allclose(last["similarity"], similarity, atol=1e-6)
    assert last["phase_sizes"] == find_phases(similarity, 2) == [2, 2]
    # The one segmentation in two phases of at least 2 of 4 layers is also every random one.
    assert last["phase_objective"] == pytest.approx(last["random_objective"]) and last["random_objective_std"] < 1e-9
    assert last["layer_similarity"] == logged[-1]["layer_similarity"] == pytest.approx(mean_off_diagonal(similarity))


def test_the_best_segmentation_is_above_random_ones_where_there_are_phases(tmp_path):
    trainer = make_trainer(tmp_path)
    callback = PhaseStructureCallback(trainer, ROWS, every=1, num_phases=2, min_size=1)
    blocks = np.array([0, 0, 0, 1])
    scalars, sizes = callback.phase_structure(torch.tensor((blocks[:, None] == blocks[None, :]) * 1.0))
    assert sizes == [3, 1] and scalars["phase_objective"] == 4
    assert scalars["random_objective"] < 4 and scalars["random_objective_std"] > 0
    assert scalars["layer_similarity"] == 0.5


def test_a_continued_run_keeps_what_was_measured_before_its_checkpoint(tmp_path):
    first = make_trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    first.add_callback(PhaseStructureCallback(first, ROWS, every=1, num_phases=2))
    first.train()
    whole = json.loads((tmp_path / "phase_structure.json").read_text())
    again = make_trainer(tmp_path, max_steps=4)
    again.add_callback(PhaseStructureCallback(again, ROWS, every=1, num_phases=2))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    entries = json.loads((tmp_path / "phase_structure.json").read_text())
    assert [entry["step"] for entry in entries] == [0, 1, 2, 3, 4]
    assert entries[:3] == whole[:3]


def test_states_that_are_not_finite_are_passed_over(tmp_path, caplog):
    trainer = make_trainer(tmp_path)
    callback = PhaseStructureCallback(trainer, ROWS, every=1, num_phases=2)
    with torch.no_grad():
        trainer.model.dinov2.embeddings.cls_token.fill_(float("nan"))
    callback._measure(trainer.state)
    assert callback.measured == [] and "not finite" in caplog.text


@pytest.mark.parametrize(
    "settings, message", [({"every": 0}, "every"), ({"every": 1, "num_phases": 3}, "can't be cut")]
)
def test_what_does_not_fit_is_refused(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        PhaseStructureCallback(make_trainer(tmp_path), ROWS, **settings)
