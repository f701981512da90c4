"""Faults while a run trains: it loses nothing, and what it says is what went wrong."""

import errno
import io
import math
import shutil
import signal
from pathlib import Path

import datasets
import psutil
import pytest
import torch
from safetensors import SafetensorError
from tiny import picture, tiny_teacher
from transformers import TrainerCallback
from transformers.trainer_pt_utils import safe_globals

from raptor_hf import RaptorConfig, RaptorModel
from raptor_hf.distillation import DistillationArguments, RaptorTrainer
from raptor_hf.distillation.checkpoints import is_whole, last_whole_checkpoint
from raptor_hf.distillation.faults import RunInterrupted, RunStopped, told_in_one_line
from raptor_hf.files import ASIDE
from raptor_hf.images import PixelValues, RandomResizedCrop, load_image_processor

TOKEN = "hf_thisisnotmytoken"


def rows(bad: int = 0) -> PixelValues:
    pictures = []
    for seed in range(24):
        buffer = io.BytesIO()
        picture(seed).save(buffer, "PNG")
        pictures.append({"bytes": buffer.getvalue()[:-60] if seed < bad else buffer.getvalue(), "path": f"{seed}.png"})
    dataset = datasets.Dataset.from_dict({"image": pictures}, features=datasets.Features({"image": datasets.Image()}))
    return PixelValues(dataset, RandomResizedCrop(load_image_processor("no model here", 28), 28), replace_bad=True)


def make_trainer(output_dir, bad=0, model=None, **kwargs) -> RaptorTrainer:
    """A run of 8 steps of 4 images, 6 of them an epoch, that goes on from its last whole checkpoint."""
    settings = dict(
        output_dir=str(output_dir),
        max_steps=8,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        hub_token=TOKEN,
    )
    teacher = tiny_teacher()
    student = RaptorModel.from_teacher(teacher, [3, 3], **(model or {}))
    return RaptorTrainer(student, teacher, DistillationArguments(**(settings | kwargs)), train_dataset=rows(bad))


def run(trainer) -> RaptorTrainer:
    trainer.train_from(last_whole_checkpoint(Path(trainer.args.output_dir)))
    return trainer


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.student.parameters()])


def steps(output_dir) -> list[int]:
    return sorted(int(folder.name.split("-")[1]) for folder in output_dir.glob("checkpoint-*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("whole")
    return run(make_trainer(output_dir, save_total_limit=None)), output_dir


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
)
@pytest.mark.parametrize("fault", ["cut short", "empty", "missing"])
def test_a_torn_checkpoint_is_passed_over(whole, tmp_path, name, fault):
    for step in (4, 6):
        shutil.copytree(whole[1] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    file = tmp_path / "checkpoint-6" / name
    assert is_whole(file.parent)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 9 // 10 if fault == "cut short" else 0])
    if fault == "missing":
        file.unlink()
    assert last_whole_checkpoint(tmp_path).endswith("checkpoint-4")


def test_a_checkpoint_of_which_one_bit_has_changed_is_passed_over(whole, tmp_path):
    for step in (4, 6):
        shutil.copytree(whole[1] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    file = tmp_path / "checkpoint-6" / "optimizer.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert last_whole_checkpoint(tmp_path).endswith("checkpoint-4")


def test_another_file_beside_those_that_were_saved_does_no_harm(whole, tmp_path):
    shutil.copytree(whole[1] / "checkpoint-6", tmp_path / "checkpoint-6")
    (tmp_path / "checkpoint-6" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "checkpoint-7").write_bytes(b"no folder")
    assert last_whole_checkpoint(tmp_path).endswith("checkpoint-6")


def test_without_a_whole_checkpoint_a_run_begins_anew(whole, tmp_path):
    assert last_whole_checkpoint(tmp_path) is None
    shutil.copytree(whole[1] / "checkpoint-8", tmp_path / "checkpoint-8")
    (tmp_path / "checkpoint-8" / "optimizer.pt").unlink()
    (tmp_path / ASIDE / "checkpoint-10").mkdir(parents=True)
    assert torch.equal(weights(run(make_trainer(tmp_path))), weights(whole[0]))
    assert steps(tmp_path) == [6, 8] and not (tmp_path / ASIDE).exists()


def test_a_checkpoint_holds_no_pickled_arguments_and_no_token(whole):
    for folder in whole[1].glob("checkpoint-*"):
        assert not (folder / "training_args.bin").exists()
        for file in folder.iterdir():
            assert TOKEN.encode() not in file.read_bytes(), file
            if file.suffix in (".pt", ".pth"):
                with safe_globals():
                    torch.load(file, weights_only=True)


def test_dropout_and_workers_are_resumed_too(tmp_path):
    settings = dict(model={"drop_path_rate": 0.3}, dataloader_num_workers=1, save_total_limit=None)
    uninterrupted = run(make_trainer(tmp_path, **settings))
    for step in (8, 6, 4):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    assert torch.equal(weights(run(make_trainer(tmp_path, **settings))), weights(uninterrupted))


def at_step(step, action):
    """Has `compute_loss` do something first, at one step."""

    def compute_loss(self, *args, original=RaptorTrainer.compute_loss, **kwargs):
        if self.state.global_step == step:
            action()
        return original(self, *args, **kwargs)

    return compute_loss


def terminate():
    """SIGTERM to this process and to those that it has started, as schedulers send it."""
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        process.send_signal(signal.SIGTERM)


def test_sigterm_saves_a_checkpoint_and_says_so(whole, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(RaptorTrainer, "compute_loss", at_step(2, terminate))
        with pytest.raises(RunInterrupted, match="with a checkpoint at step 3 of 8: the same command") as info:
            run(make_trainer(tmp_path, dataloader_num_workers=1))
    assert info.value.exit_code == 75 and steps(tmp_path) == [2, 3]
    assert signal.getsignal(signal.SIGTERM) == before
    assert torch.equal(weights(run(make_trainer(tmp_path))), weights(whole[0]))


def test_sigterm_where_the_numbers_are_not_finite_promises_no_checkpoint(tmp_path, monkeypatch):
    def spoil():
        with torch.no_grad():
            trainer.student.blocks[0].mlp.fc1.weight.fill_(math.inf)
        psutil.Process().send_signal(signal.SIGTERM)

    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(RaptorTrainer, "compute_loss", at_step(2, spoil))
    with pytest.raises(RunInterrupted, match=r"not finite and are not saved: .* from the checkpoint before"):
        run(trainer)
    assert steps(tmp_path) == [2]


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("raptor_hf.distillation.trainer.save_file", SafetensorError("Error while serializing: No space left")),
        ("torch.save", RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")),
    ],
)
def test_a_full_disk_leaves_the_checkpoint_before(whole, tmp_path, monkeypatch, target, error):
    def full(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(RaptorTrainer, "compute_loss", at_step(3, lambda: patch.setattr(target, full)))
        with pytest.raises(RunStopped, match=r"checkpoint-4 can't be saved, with .* MiB free .*: make room"):
            run(make_trainer(tmp_path, save_total_limit=1))
    assert steps(tmp_path) == [2] and not (tmp_path / ASIDE).exists()
    assert torch.equal(weights(run(make_trainer(tmp_path))), weights(whole[0]))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "Out of memory: lower --per_device_train_batch_size"),
        (MemoryError(), "Out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "Out of memory"),
        (OSError(errno.ENOSPC, "No space left on device"), "The disk is full"),
    ],
)
def test_what_can_be_helped_is_said_in_one_line(error, message):
    with pytest.raises(RunStopped, match=message) as info, told_in_one_line():
        raise error
    assert "\n" not in str(info.value)


def poison(trainer, layer: int, at: set[int]):
    """From a layer of the teacher on, states that are not finite, at some steps."""

    def hook(module, inputs, output):
        return output * (float("nan") if trainer.state.global_step in at else 1.0)

    trainer.teacher.encoder.layer[layer - 1].register_forward_hook(hook)
    return trainer


def test_a_step_that_is_not_finite_is_counted_not_applied(tmp_path, caplog):
    trainer = poison(make_trainer(tmp_path, save_strategy="no"), 4, {3})
    before_and_after = {}

    def compute_loss(*args, original=trainer.compute_loss, **kwargs):
        before_and_after[trainer.state.global_step] = weights(trainer)
        return original(*args, **kwargs)

    trainer.compute_loss = compute_loss
    run(trainer)
    changed = [not torch.equal(before_and_after[s], before_and_after[s + 1]) for s in range(7)]
    assert changed == [True, True, True, False, True, True, True]
    assert trainer.faults["nonfinite_steps"] == 1 and trainer.faults["first_nonfinite"] == "the loss of layer 4"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [math.isfinite(loss) for loss in losses] == [step != 3 for step in range(8)]
    assert weights(trainer).isfinite().all()


def test_too_many_such_steps_in_a_row_stop_the_run(tmp_path):
    trainer = poison(make_trainer(tmp_path, save_steps=1, max_nonfinite_steps=3), 5, {1, 3, 4, 5, 6, 7})
    with pytest.raises(RunStopped, match=r"3 steps in a row, up to step 6, .*: first the loss of layer 5") as info:
        run(trainer)
    assert info.value.exit_code == 3
    assert steps(tmp_path) == [1, 3]
    resumed = make_trainer(tmp_path)
    run(resumed)
    assert resumed.faults["nonfinite_steps"] == 1


def test_a_gradient_alone_that_is_not_finite_is_found(tmp_path):
    trainer = make_trainer(tmp_path, max_nonfinite_steps=1)
    trainer.student.blocks[0].attention.register_full_backward_hook(
        lambda module, gradients, _: tuple(None if g is None else g * float("inf") for g in gradients)
    )
    with pytest.raises(RunStopped, match="first the gradient, not a layer's loss, was not"):
        run(trainer)


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    class Overflow(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 3:
                trainer.student.blocks[1].norm1.weight.data.fill_(float("inf"))

    trainer = make_trainer(tmp_path, max_nonfinite_steps=2)
    trainer.add_callback(Overflow())
    with pytest.raises(RunStopped, match="2 steps in a row, up to step 6"):
        run(trainer)
    assert steps(tmp_path) == [2]


def test_bad_images_are_counted_named_and_remembered(tmp_path):
    settings = dict(bad=1, max_bad_image_share=0.05, save_total_limit=None, max_steps=12)
    trainer = run(make_trainer(tmp_path, **settings))
    assert trainer.faults["bad_images"] == 2
    assert [name.split(":")[0] for name in trainer.faults["bad_image_names"]] == ["0.png"] * 2
    seen = [entry.get("bad_images", 0) for entry in trainer.state.log_history if "loss" in entry]
    assert seen == sorted(seen) and seen[-1] == 2
    for step in (12, 10, 8):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    resumed = run(make_trainer(tmp_path, dataloader_num_workers=1, **settings))
    assert resumed.faults == trainer.faults and torch.equal(weights(resumed), weights(trainer))


def test_more_bad_images_than_allowed_stop_the_run(tmp_path):
    settings = dict(max_steps=6, save_steps=1)
    with pytest.raises(RunStopped, match=r"2 of \d+ training images can't be read, more than .* 0\.05"):
        run(make_trainer(tmp_path, bad=2, max_bad_image_share=0.05, **settings))
    # Two of 24 are 8.3 %. The same run goes on when that is allowed.
    trainer = run(make_trainer(tmp_path, bad=2, max_bad_image_share=0.09, **settings))
    assert trainer.faults["bad_images"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phase_sizes": [3, 2]}, "depth of 5, but its teacher one of 6"),
        ({"hidden_size": 32}, "hidden_size of 32, but its teacher one of 16"),
        ({"patch_size": 7}, r"patch_size of \(7, 7\), but its teacher one of \(14, 14\)"),
        ({"num_channels": 1}, "num_channels of 1, but its teacher one of 3"),
        ({"num_register_tokens": 2}, "num_register_tokens of 2, but its teacher one of 0"),
    ],
)
def test_a_raptor_of_another_teacher_is_refused(tmp_path, changes, message):
    teacher = tiny_teacher()
    config = RaptorModel.from_teacher(teacher, [3, 3]).config.to_dict() | changes
    student = RaptorModel(RaptorConfig.from_dict(config))
    with pytest.raises(ValueError, match=f"The Raptor has a {message}"):
        RaptorTrainer(student, teacher, DistillationArguments(output_dir=str(tmp_path), use_cpu=True))
