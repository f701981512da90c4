"""What can go wrong while a run trains: it is counted, and ends the run where it is too much."""

import errno
import math
import signal
import threading
from contextlib import contextmanager

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from transformers import TrainerCallback, TrainerState
from transformers.utils import logging

from ..images import NAMED_IMAGES, BadImageError, read_report
from .sharding import own_part

logger = logging.get_logger(__name__)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Of a stream the length isn't known: its bad images are a share of so many.
STREAM_PERIOD = 1000


class RunStopped(RuntimeError):
    """A run that can't go on. Its checkpoints are whole, and the same command goes on from the last of them."""

    exit_code = 3


class RunInterrupted(RunStopped):
    """A run that was asked to stop by SIGTERM, and has saved a checkpoint."""

    exit_code = 75


class Terminated(BaseException):
    """SIGTERM while nothing is trained. Like KeyboardInterrupt, it is no error that code on the way would handle."""

    exit_code = RunInterrupted.exit_code


@contextmanager
def on_sigterm(handler):
    """Calls `handler(signal, frame)` at SIGTERM; by the main thread, as signals are its alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def terminate(*_):
    """Handles a signal by raising [`Terminated`]."""
    raise Terminated


class FaultCallback(TrainerCallback):
    """
    Watches over each optimizer step of a [`RaptorTrainer`]. All processes decide alike, on what all of them have seen.

    - Images that can't be read are counted and the first few named; beyond `max_bad_image_share` the run stops.
    - A step whose loss or gradient isn't finite is not applied; after `max_nonfinite_steps` in a row the run stops.
    - After SIGTERM a checkpoint is saved at the end of the step, and training ends.

    The counts are part of Trainer's state, and so of its checkpoints.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.signalled = self.interrupted = False
        self._micro_batches, self.grad_norm = [], None

    @staticmethod
    def counts(state: TrainerState) -> dict:
        """`bad_images`, `bad_image_names`, `nonfinite_steps`, `nonfinite_in_a_row`, `first_nonfinite` of a run."""
        nothing = {"bad_images": 0, "bad_image_names": [], "nonfinite_steps": 0, "nonfinite_in_a_row": 0}
        return state.stateful_callbacks.setdefault("faults", nothing)

    def sigterm_handled(self):
        """SIGTERM no longer ends the program, but training, at the end of the step."""
        return on_sigterm(lambda *_: setattr(self, "signalled", True))

    def observe(self, inputs: dict, outputs: dict):
        """Keeps what is needed of a micro-batch: nothing is waited for here."""
        report = {name: inputs[name] for name in ("bad_images", "bad_image") if name in inputs}
        self._micro_batches.append((report, outputs["layer_losses"], outputs["loss"].detach()))

    def on_step_begin(self, args, state, control, **kwargs):
        self._micro_batches.clear()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        depth = len(self.trainer.student.config.layer_blocks)
        bad_layers = sum((~losses.isfinite()).view(-1, depth).sum(0) for _, losses, _ in self._micro_batches)
        bad_losses = sum((~loss.isfinite()).sum() for _, _, loss in self._micro_batches)
        reports = [report for report, _, _ in self._micro_batches if report]
        bad_images = sum(report["bad_images"].sum() for report in reports)
        bad_gradient = (~own_part(torch.as_tensor(self.grad_norm)).isfinite()).sum()
        own = [torch.as_tensor(n, device=bad_layers.device) for n in (bad_images, self.signalled, bad_gradient)]
        seen = torch.cat((torch.stack([own[0], own[1].long(), own[2] + bad_losses]), bad_layers))
        seen = self.trainer.accelerator.reduce(seen, reduction="sum").tolist()
        (bad_images, signalled, nonfinite), bad_layers = seen[:3], seen[3:]
        self.interrupted = signalled > 0
        if bad_images:
            self._count_bad_images(bad_images, reports)
        if nonfinite or any(bad_layers):
            model.zero_grad(set_to_none=True)
            self._count_nonfinite(bad_layers)
        else:
            self.counts(state)["nonfinite_in_a_row"] = 0

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.interrupted:
            control.should_save = control.should_training_stop = True
        # What training left behind in a state that goes wrong must not take the place of the last good checkpoint.
        wrong = self.counts(state)["nonfinite_in_a_row"] > 0 and not self.interrupted
        if control.should_save and (wrong or not self._finite(model)):
            self._warn(f"No checkpoint is saved at step {state.global_step}: its numbers are not finite.")
            control.should_save = False
        return control

    def _warn(self, message: str):
        if self.trainer.is_world_process_zero():
            logger.warning(message)

    def _finite(self, model) -> bool:
        bad = sum((~own_part(parameter).isfinite()).sum() for parameter in model.parameters())
        return self.trainer.accelerator.reduce(bad, reduction="sum").item() == 0

    def _count_bad_images(self, number: int, reports: list[dict]):
        state, args = self.trainer.state, self.trainer.args
        counts = self.counts(state)
        counts["bad_images"] += number
        missing = NAMED_IMAGES - len(counts["bad_image_names"])
        names = gather_object([name for report in reports for name in read_report(report)])
        for name in names[: max(0, missing)]:
            self._warn(f"Passed over an image that can't be read, {name}.")
            counts["bad_image_names"].append(name)
        dataset = self.trainer.train_dataset
        period = len(dataset) if hasattr(dataset, "__len__") else STREAM_PERIOD
        images = (state.global_step + 1) * args.global_batch_size
        # Whole passes, so that a share which the data set doesn't exceed is never exceeded on the way.
        allowed = args.max_bad_image_share * period * math.ceil(images / period)
        if counts["bad_images"] > allowed + 1e-6:
            raise RunStopped(
                f"{counts['bad_images']} of {images} training images can't be read, more than max_bad_image_share "
                f"{args.max_bad_image_share}. The first: {'; '.join(counts['bad_image_names'])}. Mend the data set, "
                "or allow more with --max_bad_image_share: the run then goes on from its last checkpoint."
            )

    def _count_nonfinite(self, bad_layers: list[int]):
        state, args = self.trainer.state, self.trainer.args
        counts, step = self.counts(state), state.global_step + 1
        if counts["nonfinite_in_a_row"] == 0:
            layer = next((layer for layer, bad in enumerate(bad_layers, start=1) if bad), None)
            counts["first_nonfinite"] = f"the loss of layer {layer}" if layer else "the gradient, not a layer's loss,"
            self._warn(f"Step {step} is not applied: {counts['first_nonfinite']} is not finite.")
        counts["nonfinite_steps"] += 1
        counts["nonfinite_in_a_row"] += 1
        if counts["nonfinite_in_a_row"] >= args.max_nonfinite_steps:
            raise RunStopped(
                f"{counts['nonfinite_in_a_row']} steps in a row, up to step {step}, were not finite, and not applied: "
                f"first {counts['first_nonfinite']} was not. The last checkpoint is from before. Lower "
                "--learning_rate, or train in float32, with --overwrite_output_dir true."
            )


def ignore_sigterm(worker_init_fn, worker_id: int):
    """
    The start of a data loader's worker. Schedulers send SIGTERM to every process: a worker that it ended would take
    training down before the checkpoint is saved. Workers end with the process that they work for.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


@contextmanager
def told_in_one_line():
    """What ends a run from outside, and can be helped, as a [`RunStopped`]."""
    try:
        yield
    except BadImageError as error:
        # From a worker of the data loader it comes with the worker's traceback.
        raise RunStopped(str(error).strip().splitlines()[-1].split("BadImageError: ")[-1]) from error
    except (MemoryError, RuntimeError) as error:
        memory_full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
        if not memory_full:
            raise
        raise RunStopped(
            "Out of memory: lower --per_device_train_batch_size and raise --gradient_accumulation_steps by the same "
            "factor, or, where images are large, lower --dataloader_num_workers; the run then goes on from its last "
            "checkpoint, at the same global batch."
        ) from error
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) not in DISK_FULL and "No space left" not in str(error):
            raise
        raise RunStopped(
            f"The disk is full ({error}): make room, then start the same command again; it goes on from its last "
            "checkpoint."
        ) from error
