import json
import math

import datasets
import numpy as np
import pytest
import torch
from tiny import picture, tiny_teacher

from raptor_hf import RaptorModel
from raptor_hf.distillation import DistillationArguments, RaptorTrainer
from raptor_hf.distillation.module import DistillationModule, LossSettings
from raptor_hf.distillation.muon import MuonAdamW, orthogonalize, parameter_groups
from raptor_hf.images import CenterCrop, PixelValues, RandomResizedCrop, load_image_processor


@pytest.fixture(scope="module")
def rows():
    features = datasets.Features({"image": datasets.Image()})
    dataset = datasets.Dataset.from_dict({"image": [picture(seed) for seed in range(24)]}, features=features)
    processor = load_image_processor("no model here", 28)
    return PixelValues(dataset, RandomResizedCrop(processor, 28)), PixelValues(dataset, CenterCrop(processor))


def make_trainer(rows, output_dir, phase_sizes=(3, 3), **kwargs):
    settings = dict(
        output_dir=str(output_dir),
        max_steps=8,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    teacher = tiny_teacher()
    student = RaptorModel.from_teacher(teacher, list(phase_sizes))
    args = DistillationArguments(**(settings | kwargs))
    return RaptorTrainer(student, teacher, args, train_dataset=rows[0], eval_dataset=rows[1])


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def weights(trainer):
    return torch.cat([p.flatten() for p in trainer.student.parameters()])


def test_stages_follow_from_the_global_step_also_under_accumulation(rows, tmp_path):
    trainer = make_trainer(
        rows,
        tmp_path,
        stage1_ratio=0.5,
        teacher_forcing_ratio=1.0,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    trainer.train()
    assert logged(trainer, "stage") == [1] * 4 + [2] * 4
    assert logged(trainer, "teacher_forcing") == [1.0, 0.75, 0.5, 0.25, 0, 0, 0, 0]
    assert set(trainer.recorded_fidelity()) == {"before", "after_stage1"}


@pytest.mark.parametrize(
    ("mode", "stages", "teacher_forcing"),
    [
        ("teacher_forcing", [1] * 4, [1.0] * 4),
        ("autoregressive", [1, 1, 2, 2], [0.0] * 4),
        ("output_only", [2] * 4, [0.0] * 4),
    ],
)
def test_training_modes(rows, tmp_path, mode, stages, teacher_forcing):
    trainer = make_trainer(rows, tmp_path, training_mode=mode, max_steps=4, save_strategy="no")
    trainer.train()
    assert logged(trainer, "stage") == stages
    assert logged(trainer, "teacher_forcing") == teacher_forcing


@pytest.mark.parametrize("muon", [False, True])
def test_training_lowers_the_loss(rows, tmp_path, muon):
    trainer = make_trainer(rows, tmp_path, muon=muon, max_steps=30, learning_rate=5e-3, save_strategy="no")
    before = trainer.measure_fidelity()
    embeddings = trainer.student.embeddings.cls_token.clone()
    trainer.train()
    after = trainer.measure_fidelity()
    for token in ("cls", "patch"):
        assert after[token]["cosine"][-1] > before[token]["cosine"][-1] + 0.05
    torch.testing.assert_close(trainer.student.embeddings.cls_token, embeddings, rtol=0, atol=0)


def test_accumulated_micro_batches_do_not_change_the_result(rows, tmp_path):
    whole = make_trainer(rows, tmp_path / "a", save_strategy="no")
    parts = make_trainer(
        rows, tmp_path / "b", save_strategy="no", per_device_train_batch_size=1, gradient_accumulation_steps=4
    )
    whole.train(), parts.train()
    assert logged(whole, "loss") == pytest.approx(logged(parts, "loss"), rel=1e-4)
    torch.testing.assert_close(weights(whole), weights(parts), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("stop", [2, 4, 7])
def test_a_resumed_run_ends_as_an_uninterrupted_one(rows, tmp_path, stop):
    """Also inside the second epoch (steps 6 and later), whose order must not be the first one's."""
    trainer = make_trainer(rows, tmp_path / "whole", save_steps=1, save_total_limit=None)
    trainer.train()
    resumed = make_trainer(rows, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{stop}"))
    torch.testing.assert_close(weights(resumed), weights(trainer), rtol=0, atol=0)
    assert logged(resumed, "loss") == logged(trainer, "loss")
    assert logged(resumed, "elapsed_seconds")[-1] > logged(trainer, "elapsed_seconds")[stop - 1]


def test_schedule_can_start_anew_with_stage_2(rows, tmp_path):
    schedule = dict(
        save_strategy="no",
        learning_rate=1e-3,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": 1e-6},
        warmup_steps=2,
        stage1_ratio=0.5,
        max_steps=16,
    )
    trainer = make_trainer(rows, tmp_path / "a", restart_schedule=True, **schedule)
    trainer.train()
    rates = logged(trainer, "learning_rate")
    cosine = [1e-6 + (1e-3 - 1e-6) * (1 + math.cos(math.pi * i / 6)) / 2 for i in range(6)]
    assert rates == pytest.approx([0, 5e-4, *cosine] * 2, abs=1e-8)
    joint = make_trainer(rows, tmp_path / "b", restart_schedule=False, **schedule)
    joint.train()
    assert np.argmax(logged(joint, "learning_rate")) == 2 and logged(joint, "learning_rate")[8] > 0


def test_images_are_smaller_in_the_first_part(rows, tmp_path, monkeypatch):
    trainer = make_trainer(rows, tmp_path, save_strategy="no", early_image_size=14, early_image_ratio=0.25)
    tokens = []
    forward = trainer.model.forward
    monkeypatch.setattr(
        trainer.model, "forward", lambda states, **kw: tokens.append(states.shape[2]) or forward(states, **kw)
    )
    trainer.train()
    assert tokens == [1 + 1] * 2 + [1 + 4] * 6


def test_evaluate_reports_the_closed_loop(rows, tmp_path):
    trainer = make_trainer(rows, tmp_path, save_strategy="no", phase_sizes=(1,) * 6)
    metrics = trainer.evaluate()
    assert metrics["eval_cls_cosine"] == pytest.approx(1) and metrics["eval_patch_r2"] == pytest.approx(1)
    assert json.dumps(metrics)


def test_gradient_checkpointing_changes_nothing(rows, tmp_path):
    plain = make_trainer(rows, tmp_path / "a", save_strategy="no", max_steps=3)
    checkpointed = make_trainer(rows, tmp_path / "b", save_strategy="no", max_steps=3, activation_checkpointing=True)
    plain.train(), checkpointed.train()
    assert checkpointed.student.blocks[0].gradient_checkpointing
    torch.testing.assert_close(weights(plain), weights(checkpointed))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage1_ratio": 1.5}, "stage1_ratio is a share"),
        ({"teacher_forcing_ratio": -1}, "teacher_forcing_ratio is a share"),
        ({"stage2_weights": [1.0, 1.0]}, "stage2_weights must be three weights"),
        ({"stage1_weights": [0.0, 1.0, 0.0]}, "stage1_weights must be three weights"),
    ],
)
def test_refuses_wrong_arguments(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        DistillationArguments(output_dir=str(tmp_path), use_cpu=True, **arguments)


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24), (3, 24, 8)])
def test_orthogonalize_brings_singular_values_near_one(shape):
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    matrices = u @ torch.linspace(0.05, 1.0, 8).diag() @ v
    result = orthogonalize(matrices)
    # As written by its author: the whole matrix in each iteration.
    plain = matrices.double() / torch.linalg.matrix_norm(matrices.double(), keepdim=True)
    for _ in range(5):
        gram = plain @ plain.mT
        plain = 3.4445 * plain + (-4.7750 * gram + 2.0315 * gram @ gram) @ plain
    torch.testing.assert_close(result, plain.float(), rtol=1e-3, atol=1e-3)
    singular = torch.linalg.svdvals(result)
    assert singular.min() > 0.6 and singular.max() < 1.3
    assert torch.cosine_similarity(result.flatten(), (u @ v).flatten(), dim=0) > 0.97


def test_muon_update_has_an_adamw_updates_size_and_leaves_the_rest_to_adamw():
    torch.manual_seed(0)
    qkv, bias = torch.nn.Parameter(torch.zeros(24, 8)), torch.nn.Parameter(torch.zeros(8))
    reference = torch.nn.Parameter(torch.zeros(8))
    optimizer = MuonAdamW([{"params": [qkv], "muon": True, "parts": 3}, {"params": [bias]}], lr=0.1, weight_decay=0.0)
    adamw = torch.optim.AdamW([reference], lr=0.1, weight_decay=0.0)
    qkv.grad, bias.grad = torch.randn(24, 8), torch.randn(8)
    qkv.grad[:8] *= 1e-3
    reference.grad = bias.grad.clone()
    optimizer.step(), adamw.step()
    torch.testing.assert_close(bias, reference)
    for part in qkv.detach().chunk(3):
        assert part.square().mean().sqrt().item() == pytest.approx(0.1 * 0.2, rel=0.2)


def test_muon_treats_attention_head_by_head():
    torch.manual_seed(0)
    student = RaptorModel.from_teacher(tiny_teacher(), [3, 3]).train()
    config, size = student.config, student.config.hidden_size // student.config.num_attention_heads
    module = DistillationModule(student, LossSettings())
    module(torch.randn(2, 7, 5, config.hidden_size), stage=2, teacher_forcing=0.0)["loss"].backward()
    block = student.blocks[0]
    before = [weight.detach().clone() for weight in (block.attention.qkv.weight, block.attention.o_proj.weight)]
    gradient = block.attention.o_proj.weight.grad[:, size : 2 * size].clone()
    groups = parameter_groups(module, config.num_attention_heads)
    assert {id(p) for group in groups for p in group["params"]} == {
        id(p) for p in module.parameters() if p.requires_grad
    }
    assert all(p.ndim == 2 for group in groups if group.get("muon") for p in group["params"])
    MuonAdamW(groups, lr=0.1, weight_decay=0.0).step()
    qkv, o_proj = (
        old - new.detach() for old, new in zip(before, (block.attention.qkv.weight, block.attention.o_proj.weight))
    )
    for head in (*qkv.split(size, dim=0), *o_proj.split(size, dim=1)):
        assert torch.linalg.matrix_norm(head).item() == pytest.approx(0.1 * 0.2 * head.numel() ** 0.5, rel=0.3)
    expected = orthogonalize(gradient) * 0.1 * 0.2 * max(gradient.shape) ** 0.5
    torch.testing.assert_close(o_proj[:, size : 2 * size], expected, rtol=1e-2, atol=1e-4)
