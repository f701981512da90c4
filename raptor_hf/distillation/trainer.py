"""`RaptorTrainer`: Transformers' Trainer, with a teacher outside the module that it wraps and two stages."""

import math
import shutil
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.nn.functional import interpolate
from torch.optim.lr_scheduler import SequentialLR
from torch.utils.data import DataLoader, Subset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState, get_scheduler
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME

from ..fidelity import LayerFidelity
from ..files import ASIDE, read_json, write_json, written_aside
from ..images import EpochSampler
from ..modeling_raptor import RaptorModel
from ..teachers import token_slices, trajectory
from .arguments import DistillationArguments
from .checkpoints import is_whole, remove_old_checkpoints, write_checksums
from .faults import FaultCallback, RunInterrupted, RunStopped, ignore_sigterm
from .module import DistillationModule
from .muon import MuonAdamW, parameter_groups
from .run_folder import FIDELITY_NAME
from .sharding import whole_model
from .student import check_fit


class RaptorTrainer(Trainer):
    """
    Distils a teacher into a Raptor in one run of two stages; which one a step belongs to follows from the global step,
    so accumulation and resuming keep it right.

    Args:
        student: the Raptor to train.
        teacher: frozen; it stays outside the module that Accelerate wraps.
        args: the run.
        train_dataset: rows with `pixel_values` (channels, height, width), as [`PixelValues`] gives them.
        eval_dataset: the same, to measure fidelity on: before, after stage 1 and after stage 2.

    Raises:
        ValueError: if the teacher's depth, width, patch size, channels or registers aren't the student's.
    """

    def __init__(
        self, student: RaptorModel, teacher: PreTrainedModel, args: DistillationArguments, eval_dataset=None, **kwargs
    ):
        check_fit(student.config, teacher.config)
        model = DistillationModule(student, args.loss_settings())
        super().__init__(model=model, args=args, eval_dataset=eval_dataset, **kwargs)
        self.teacher = teacher.to(self.args.device).eval()
        self.add_callback(_StageCallback(self))
        self._faults = FaultCallback(self)
        self.add_callback(self._faults)
        self._saving_to = None
        self._continued_log, self._started = [], time.perf_counter()

    def init_hf_repo(self, *args, **kwargs):
        """Nothing: what is pushed is the Raptor with its card, at the end, not checkpoints of the wrapping module."""

    push_to_hub = _push_from_checkpoint = init_hf_repo

    @property
    def student(self) -> RaptorModel:
        return self.accelerator.unwrap_model(self.model).student

    @property
    def stage1_steps(self) -> int:
        return self.args.stage1_steps(self.state.max_steps)

    @property
    def stage(self) -> int:
        return 1 if self.state.global_step < self.stage1_steps else 2

    @property
    def teacher_forcing(self) -> float:
        return self.args.teacher_forcing(self.state.global_step, self.state.max_steps)

    @property
    def faults(self) -> dict:
        """What was passed over so far, see [`FaultCallback.counts`]."""
        return FaultCallback.counts(self.state)

    def train_from(self, checkpoint: str | None):
        """
        Trains, from a checkpoint if one is given. Where that holds the last step, nothing is trained.

        Raises:
            RunStopped: if too many images are bad or steps not finite, or a checkpoint can't be saved.
            RunInterrupted: after SIGTERM, when a checkpoint was saved.
            ValueError: if the data set gives too few images.
        """
        if checkpoint is not None:
            state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
            if state.global_step >= state.max_steps:
                best = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
                if self.args.load_best_model_at_end and is_whole(best):
                    checkpoint = best
                self._load_from_checkpoint(str(checkpoint))
                self.state, self._continued_log = state, state.log_history
                return
        with self._faults.sigterm_handled():
            self.train(resume_from_checkpoint=checkpoint)
        if self.state.global_step < self.state.max_steps:
            if self._faults.interrupted:
                step, steps = self.state.global_step, self.state.max_steps
                saved = is_whole(Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}")
                raise RunInterrupted(
                    f"Stopped by SIGTERM, with a checkpoint at step {step} of {steps}: the same command goes on from "
                    "there."
                    if saved
                    else f"Stopped by SIGTERM at step {step} of {steps}, whose numbers were not finite and are not "
                    "saved: the same command goes on from the checkpoint before."
                )
            raise ValueError(
                f"Training ended at step {self.state.global_step} of {self.state.max_steps}: the data set gave no "
                "more images."
            )

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        pixel_values = inputs["pixel_values"]
        size = self.args.early_image_size
        if size is not None and self.state.global_step < self.args.early_image_ratio * self.state.max_steps:
            pixel_values = interpolate(pixel_values, (size, size), mode="bicubic", antialias=True)
        with self.accelerator.autocast():
            states = trajectory(self.teacher, pixel_values)
        outputs = model(states, stage=self.stage, teacher_forcing=self.teacher_forcing)
        self._faults.observe(inputs, outputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        base = getattr(loader, "base_dataloader", loader)
        base.worker_init_fn = partial(ignore_sigterm, base.worker_init_fn)
        return loader

    def _get_grad_norm(self, model, grad_norm=None):
        self._faults.grad_norm = super()._get_grad_norm(model, grad_norm)
        return self._faults.grad_norm

    def _get_output_dir(self, trial):
        return super()._get_output_dir(trial) if self._saving_to is None else str(self._saving_to)

    def _save_checkpoint(self, model, trial):
        """Trainer's, but written aside and then renamed: a checkpoint is there as a whole, or it isn't there."""
        output_dir = Path(self.args.output_dir)
        folder = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if broadcast_object_list([is_whole(folder)])[0]:
            return
        main = self.is_world_process_zero()
        try:
            with written_aside(output_dir) if main else nullcontext():
                self._saving_to = output_dir / ASIDE
                self.accelerator.wait_for_everyone()
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                if main:
                    write_checksums(self._saving_to / folder.name)
                    shutil.rmtree(folder, ignore_errors=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            reason, free = str(error).strip().splitlines()[0], shutil.disk_usage(output_dir).free / 2**20
            raise RunStopped(
                f"{folder.name} can't be saved, with {free:,.1f} MiB free on its disk ({reason}): make room, or mend "
                "what else it is, then start the same command again; it goes on from the checkpoint before."
            ) from error
        finally:
            self._saving_to = None
        best = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        self.state.best_model_checkpoint = str(best) if best.is_dir() else None
        if main:
            remove_old_checkpoints(output_dir, self.args.save_total_limit, self.state.best_model_checkpoint)
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir=None, state_dict=None):
        """The weights. Trainer would add its arguments as a pickle, with the token for the Hub among them."""
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            weights = self.model.state_dict() if state_dict is None else state_dict
            save_file(weights, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})

    def create_optimizer(self, model=None):
        if not self.args.muon:
            return super().create_optimizer(model)
        self.optimizer = MuonAdamW(
            parameter_groups(model or self.model, self.student.config.num_attention_heads),
            lr=self.args.learning_rate,
            betas=(self.args.adam_beta1, self.args.adam_beta2),
            eps=self.args.adam_epsilon,
            weight_decay=self.args.weight_decay,
        )
        return self.optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        stage1 = self.args.stage1_steps(num_training_steps)
        if not self.args.restart_schedule or stage1 in (0, num_training_steps):
            return super().create_scheduler(num_training_steps, optimizer)
        optimizer = optimizer or self.optimizer
        stages = [
            get_scheduler(
                self.args.lr_scheduler_type,
                optimizer,
                num_warmup_steps=self.args.get_warmup_steps(steps),
                num_training_steps=steps,
                scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
            )
            for steps in (stage1, num_training_steps - stage1)
        ]
        self.lr_scheduler = SequentialLR(optimizer, stages, milestones=[stage1])
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_train_sampler(self, train_dataset=None):
        dataset = self.train_dataset if train_dataset is None else train_dataset
        # state.epoch is whole when an epoch starts, and a fraction when one is resumed.
        args = self.args
        return EpochSampler(
            len(dataset),
            args.seed,
            current_epoch=lambda: int(self.state.epoch or 0),
            multiple_of=args.global_batch_size if args.dataloader_drop_last else 1,
        )

    @property
    def elapsed_seconds(self) -> float:
        """Wall time of training, that of the run which this one continues included."""
        earlier = [entry["elapsed_seconds"] for entry in self._continued_log if "elapsed_seconds" in entry]
        return (earlier[-1] if earlier else 0.0) + time.perf_counter() - self._started

    def log(self, logs, start_time=None):
        if "loss" in logs:
            logs["elapsed_seconds"] = round(self.elapsed_seconds, 2)
            # The step that these logs are of has already been counted.
            step = self.state.global_step - 1
            logs["stage"] = 1 if step < self.stage1_steps else 2
            logs["teacher_forcing"] = self.args.teacher_forcing(step, self.state.max_steps)
            logs |= {name: self.faults[name] for name in ("bad_images", "nonfinite_steps") if self.faults[name]}
            if not math.isfinite(logs["loss"]):
                # Trainer takes the logged sum from the running one, and infinity less itself is never finite again.
                self._tr_loss.zero_()
        super().log(logs, start_time)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """
        Closed-loop fidelity on `eval_dataset`: for each token type the last layer's cosine and R², and the lowest
        cosine; and `train_seconds`, of training alone, without any evaluation.
        """
        started = time.perf_counter()
        fidelity = self.measure_fidelity(eval_dataset)
        evaluated = sum(entry.get(f"{metric_key_prefix}_runtime", 0.0) for entry in self.state.log_history)
        runtime = time.perf_counter() - started
        metrics = {
            f"{metric_key_prefix}_runtime": runtime,
            f"{metric_key_prefix}_train_seconds": self.elapsed_seconds - evaluated - runtime,
        }
        for name, curves in fidelity.items():
            metrics[f"{metric_key_prefix}_{name}_cosine"] = curves["cosine"][-1]
            metrics[f"{metric_key_prefix}_{name}_lowest_cosine"] = min(curves["cosine"])
            metrics[f"{metric_key_prefix}_{name}_r2"] = curves["r2"][-1]
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def measure_fidelity(self, eval_dataset=None) -> dict:
        """What [`LayerFidelity.compute`] gives for the student's closed loop, over all processes' shares."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        # Sharded by hand: Accelerate's loaders repeat images to fill the last batch, which would count twice.
        share = Subset(dataset, range(self.args.process_index, len(dataset), self.args.world_size))
        loader = DataLoader(share, self.args.per_device_eval_batch_size, num_workers=self.args.dataloader_num_workers)
        student, training = whole_model(self.student), self.model.training
        student.to(self.args.device).eval()
        fidelity = LayerFidelity(token_slices(student.config))
        for batch in tqdm(loader, desc="Fidelity", leave=False, disable=self.args.disable_tqdm):
            pixel_values = batch["pixel_values"].to(self.args.device)
            fidelity.update(trajectory(student, pixel_values), trajectory(self.teacher, pixel_values))
        student.train(training)
        fidelity.reduce(self.accelerator)
        return fidelity.compute()

    def recorded_fidelity(self) -> dict[str, dict]:
        """Fidelity by moment, as far as it was measured in this run or the one that it continues."""
        path = Path(self.args.output_dir) / FIDELITY_NAME
        record = read_json(path) if path.is_file() else {}
        length = self.teacher.config.num_hidden_layers + 1
        curves = [curve for found in record.values() for curve in _curves_of(found)]
        if not all(isinstance(c, list) and len(c) == length and all(type(x) is float for x in c) for c in curves):
            raise ValueError(f"{path} is damaged (it holds other things than curves): delete it.")
        return record

    def record_fidelity(self, moment: str) -> dict:
        """Measures fidelity, unless it was, and keeps it in the output folder under the moment's name."""
        record = self.recorded_fidelity()
        if moment not in record and self.eval_dataset is not None:
            record[moment] = self.measure_fidelity()
            self.log({f"{moment}_{name}_cosine": curves["cosine"][-1] for name, curves in record[moment].items()})
            if self.is_world_process_zero():
                write_json(Path(self.args.output_dir) / FIDELITY_NAME, record)
            self.accelerator.wait_for_everyone()
        return record


def _curves_of(fidelity) -> list:
    """The curves of each token type, or what stands in their place."""
    if not isinstance(fidelity, dict) or not fidelity:
        return [fidelity]
    metrics = fidelity.values()
    named = all(isinstance(metric, dict) and {"cosine", "r2", "relative_error"} <= set(metric) for metric in metrics)
    return [curve for metric in metrics for curve in metric.values()] if named else [None]


class _StageCallback(TrainerCallback):
    """What happens at the boundaries of the stages."""

    def __init__(self, trainer: RaptorTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer._continued_log, self.trainer._started = list(state.log_history), time.perf_counter()
        if state.global_step == 0:
            self.trainer.record_fidelity("before")

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.trainer.stage1_steps:
            should_log = control.should_log
            self.trainer.record_fidelity("after_stage1")
            # Logging fidelity has taken back the request to log this step's loss.
            control.should_log = should_log
            if args.restart_schedule:
                self.trainer.optimizer.optimizer.state.clear()
            control.should_save = args.save_strategy != "no"
        return control
