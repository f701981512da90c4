"""What a distillation run can be told. Each field is a flag of `training/distill.py` and a key of its YAML files."""

import math
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from huggingface_hub.utils import validate_repo_id
from transformers import TrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import SaveStrategy, SchedulerType

from ..images import check_crop_scale
from ..parser import check_at_least_one
from .module import LossSettings

# Three ways to say what the phases are: only one of them at a time.
PHASE_FLAGS = ("phase_sizes", "num_phases", "block_assignment")
# Of [`RaptorTrainer.evaluate`].
METRICS = [f"{token}_{name}" for token in ("cls", "register", "patch") for name in ("cosine", "lowest_cosine", "r2")]
MAX_EPOCHS = 1_000_000
TRAINING_MODES = ("two_stage", "teacher_forcing", "autoregressive", "output_only")


@dataclass
class ModelArguments:
    """The teacher and the Raptor to be made of it."""

    teacher: str = field(
        default="digits",
        metadata={
            "help": "Hub name or folder of a DINOv2 model, with or without registers. 'digits' is a small ViT "
            "that is trained on scikit-learn's digits on first use."
        },
    )
    phase_sizes: list[int] | None = field(
        default=None, metadata={"help": "Layers of each phase. Found from the teacher if not given."}
    )
    num_phases: int | None = field(default=None, metadata={"help": "How many phases to find. Default: 3."})
    phase_objective: str = field(
        default="mean", metadata={"help": "What find_phases maximises.", "choices": ["mean", "cut"]}
    )
    phase_images: int = field(default=512, metadata={"help": "Training images that the layer similarity is taken of."})
    block_assignment: list[int] | None = field(
        default=None, metadata={"help": "The block of each layer, for assignments that are not contiguous."}
    )
    init: str = field(
        default="teacher",
        metadata={
            "help": "What blocks start from: 'teacher', a layer of it; 'random'; or the name or folder of a Raptor "
            "of the same teacher, to train it further."
        },
    )
    source_layers: list[int] | None = field(
        default=None, metadata={"help": "The teacher layer that each block starts from. Default: its phase's middle."}
    )
    hidden_act: str | None = field(
        default=None, metadata={"help": "Activation of the MLP, 'swiglu' for a gated one. Default: the teacher's."}
    )
    intermediate_size: int | None = field(
        default=None, metadata={"help": "Inner width of the MLP. Default: the teacher's, or 4 * hidden_size."}
    )
    layerscale_value: float | None = field(
        default=None, metadata={"help": "LayerScale of blocks that start at random. Default: 1e-5."}
    )
    layer_norm_eps: float | None = field(default=None, metadata={"help": "LayerNorm epsilon. Default: the teacher's."})
    drop_path_rate: float | None = field(default=None, metadata={"help": "Stochastic depth. Default: none."})
    depth_scaling: bool = field(default=True, metadata={"help": "Whether blocks see the depth step."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Whether code that comes with the teacher may be run."}
    )

    def __post_init__(self):
        given = [name for name in PHASE_FLAGS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} are both given: leave one out.")
        check_at_least_one(self, "num_phases", "phase_images", "intermediate_size")
        if self.init_raptor is not None:
            settled = given + ["source_layers"] * (self.source_layers is not None) + list(self.block_settings())
            name = next((name for name in settled if name != "depth_scaling" or not self.depth_scaling), None)
            if name is not None:
                raise ValueError(f"{name} goes with init teacher or random: the Raptor {self.init} has its own.")
        if self.phase_sizes is not None and min(self.phase_sizes, default=0) < 1:
            raise ValueError(f"phase_sizes must be one or more sizes of at least 1, got {self.phase_sizes}.")
        if self.source_layers is not None:
            if self.init == "random":
                raise ValueError("source_layers goes with init teacher: random blocks have no source.")
            if self.phase_sizes is not None and len(self.source_layers) != len(self.phase_sizes):
                raise ValueError(
                    f"source_layers must name a layer for each of the {len(self.phase_sizes)} phases, got "
                    f"{self.source_layers}."
                )

    @property
    def init_raptor(self) -> str | None:
        """The Raptor whose training goes on, if there is one."""
        return None if self.init in ("teacher", "random") else self.init

    @property
    def phases_to_find(self) -> int | None:
        """How many phases are to be found; `None` where they are given."""
        given = any(value is not None for value in (self.phase_sizes, self.block_assignment, self.init_raptor))
        return None if given else self.num_phases or 3

    def block_settings(self) -> dict:
        """Fields of [`RaptorConfig`] that are not simply the teacher's."""
        settings = {
            "block_assignment": self.block_assignment,
            "hidden_act": self.hidden_act,
            "intermediate_size": self.intermediate_size,
            "layerscale_value": self.layerscale_value,
            "layer_norm_eps": self.layer_norm_eps,
            "drop_path_rate": self.drop_path_rate,
        }
        return {"depth_scaling": self.depth_scaling} | {k: v for k, v in settings.items() if v is not None}


@dataclass
class DataArguments:
    """The images."""

    dataset: str = field(
        default="digits",
        metadata={
            "help": "Hub name, folder of images or parquet files, parquet file, or save_to_disk folder. "
            "'digits' is embedded."
        },
    )
    train_split: str = field(default="train", metadata={"help": "Split to train on."})
    validation_split: str | None = field(
        default=None,
        metadata={
            "help": "Split to measure on. Default: 'validation', or else images held out of the training split."
        },
    )
    validation_dataset: str | None = field(
        default=None, metadata={"help": "Data set of the validation split, if another one."}
    )
    image_column: str | None = field(default=None, metadata={"help": "Column of the images; found if there is one."})
    image_size: int | None = field(
        default=None, metadata={"help": "Pixels, a multiple of the patch. Default: the teacher's processor's."}
    )
    crop: str = field(
        default="random",
        metadata={
            "help": "Random resized crops, or the image processor's centre crop as in the paper.",
            "choices": ["random", "center"],
        },
    )
    crop_scale: list[float] = field(
        default_factory=lambda: [0.25, 1.0], metadata={"help": "Smallest and largest area share of a random crop."}
    )
    flip: bool = field(default=True, metadata={"help": "Whether random crops are flipped half the time."})
    augment_ratio: float = field(
        default=0.0,
        metadata={"help": "Share of the random crops that TrivialAugment alters: where images are few, or all alike."},
    )
    streaming: bool = field(default=False, metadata={"help": "Whether rows are read only as they are needed."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only so many training images."})
    max_eval_samples: int = field(default=256, metadata={"help": "Measure fidelity on so many images at most."})

    def __post_init__(self):
        check_crop_scale(self.crop_scale)
        if not 0 <= self.augment_ratio <= 1:
            raise ValueError(f"augment_ratio is a share from 0 to 1, got {self.augment_ratio}.")
        if self.augment_ratio and self.crop != "random":
            raise ValueError("augment_ratio goes with random crops: leave one of it and --crop center out.")
        check_at_least_one(self, "image_size", "max_train_samples", "max_eval_samples")


@dataclass
class DistillationArguments(TrainingArguments):
    """`TrainingArguments`, with the two stages. Steps and epochs count both stages together."""

    output_dir: str = field(default="outputs/distill", metadata={"help": "Where checkpoints and results go."})
    learning_rate: float = field(default=5e-4, metadata={"help": "Peak learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Transformers' learning-rate schedule."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Images a step on each device."})
    per_device_eval_batch_size: int = field(default=32, metadata={"help": "Images a batch when measuring."})
    num_train_epochs: float = field(default=20.0, metadata={"help": "Epochs of both stages together."})
    weight_decay: float = field(default=1e-4, metadata={"help": "AdamW's weight decay."})
    logging_steps: float = field(default=10, metadata={"help": "Log every so many steps."})
    save_steps: float = field(default=500, metadata={"help": "Save a checkpoint every so many steps."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints to keep."})
    dataloader_drop_last: bool = field(default=True, metadata={"help": "Drop an epoch's last incomplete batch."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Not used: rows hold pixel values alone."})
    training_mode: str = field(
        default="two_stage",
        metadata={
            "help": "two_stage: teacher forcing annealed to autoregressive, then the whole chain. teacher_forcing: "
            "nothing but it. autoregressive: no teacher forcing. output_only: the whole chain, on the last layer's "
            "loss alone.",
            "choices": list(TRAINING_MODES),
        },
    )
    stage1_ratio: float = field(default=0.5, metadata={"help": "Share of the steps that stage 1 takes."})
    teacher_forcing_ratio: float = field(
        default=0.25, metadata={"help": "Share of stage 1 in which teacher forcing falls from 1 to 0."}
    )
    restart_schedule: bool = field(
        default=False, metadata={"help": "Whether stage 2 starts warm-up, schedule and optimizer anew."}
    )
    early_image_size: int | None = field(
        default=None, metadata={"help": "Shrink the images to so many pixels in the first part: cheaper steps."}
    )
    early_image_ratio: float = field(default=0.5, metadata={"help": "Share of the steps at early_image_size."})
    stage1_weights: list[float] | None = field(
        default=None, metadata={"help": "Loss weights of cls, registers, patches in stage 1. Default: plain MSE."}
    )
    last_phase_weights: list[float] | None = field(
        default=None, metadata={"help": "The same for the last phase in stage 1. Default: as stage1_weights."}
    )
    stage2_weights: list[float] | None = field(
        default=None, metadata={"help": "The same for stage 2. Default: plain MSE."}
    )
    normalize_loss: bool = field(
        default=True, metadata={"help": "Whether each image's loss is divided by its target's mean square."}
    )
    cosine_weight: float = field(
        default=0.0, metadata={"help": "Weight of 1 - cosine to the target, added to each layer's loss."}
    )
    muon: bool = field(
        default=True,
        metadata={"help": "Whether the blocks' weight matrices are trained by Muon; AdamW trains the rest."},
    )
    max_bad_image_share: float = field(
        default=0.01,
        metadata={"help": "Stop if more than this share of the training images can't be read; they are passed over."},
    )
    max_nonfinite_steps: int = field(
        default=20,
        metadata={"help": "Stop after so many steps in a row whose loss or gradient is not finite; none is applied."},
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Whether losses that are not finite are left out of the logged ones."}
    )
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Start anew even if output_dir holds a run."})

    def __post_init__(self):
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{one.name} must be a finite number, got {value}.")
        if self.deepspeed:
            # Before Transformers keeps its configuration for every model of the process.
            raise ValueError("deepspeed is not supported: to divide a model, see training/accelerate/fsdp2.yaml.")
        super().__post_init__()
        for name in ("stage1_ratio", "teacher_forcing_ratio", "early_image_ratio", "max_bad_image_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share from 0 to 1, got {getattr(self, name)}.")
        for name in ("stage1_weights", "last_phase_weights", "stage2_weights"):
            weights = getattr(self, name)
            good = weights is None or (len(weights) == 3 and all(0 <= w < math.inf for w in weights))
            if not good or (weights and weights[0] + weights[2] <= 0):
                raise ValueError(
                    f"{name} must be three weights of at least 0, cls, registers, patches, got {weights}."
                )
        if self.cosine_weight < 0:
            raise ValueError(f"cosine_weight must be at least 0, got {self.cosine_weight}.")
        check_at_least_one(self, "early_image_size", "max_nonfinite_steps", "per_device_train_batch_size")
        check_at_least_one(self, "per_device_eval_batch_size", "gradient_accumulation_steps", "save_total_limit")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1, got {self.seed}.")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be a positive number, got {self.learning_rate}.")
        if self.max_steps < 1 and not 0 < self.num_train_epochs <= MAX_EPOCHS:
            raise ValueError(f"num_train_epochs must be above 0, at most {MAX_EPOCHS}, got {self.num_train_epochs}.")
        for name in ("save_steps", "logging_steps"):
            if getattr(self, name) <= 0:
                raise ValueError(
                    f"{name} must be a positive number of steps, or a share of them, got {getattr(self, name)}."
                )
        missing = [name for name in self.report_to if name not in get_available_reporting_integrations()]
        if missing:
            raise ValueError(f"report_to {missing[0]} is not installed, or unknown: install it, or leave it out.")
        if self.dataloader_num_workers < 0:
            raise ValueError(f"dataloader_num_workers must be at least 0, got {self.dataloader_num_workers}.")
        if self.dataloader_persistent_workers and not self.dataloader_num_workers:
            raise ValueError("dataloader_persistent_workers needs dataloader_num_workers of at least 1.")
        check_at_least_one(self, "dataloader_prefetch_factor")
        by_metric = {
            "load_best_model_at_end": self.load_best_model_at_end,
            "save_strategy best": self.save_strategy == SaveStrategy.BEST,
            "lr_scheduler_type reduce_lr_on_plateau": self.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU,
        }
        metric = (self.metric_for_best_model or "").removeprefix("eval_")
        if any(by_metric.values()) and metric not in METRICS:
            raise ValueError(
                f"{next(name for name, asked in by_metric.items() if asked)} needs --metric_for_best_model, one of "
                f"{', '.join(METRICS)}, and --greater_is_better true."
            )
        for name in ("label_smoothing_factor", "neftune_noise_alpha", "use_liger_kernel"):
            if getattr(self, name):
                raise ValueError(f"{name} has no meaning in distillation: leave it out.")
        # Refuse what optimizer and schedule don't take before anything is loaded.
        optimizer = torch.optim.AdamW(
            [torch.zeros(1)],
            lr=self.learning_rate,
            betas=(self.adam_beta1, self.adam_beta2),
            eps=self.adam_epsilon,
            weight_decay=self.weight_decay,
        )
        for name, value in (self.lr_scheduler_kwargs or {}).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"lr_scheduler_kwargs: {name} must be a finite number, got {value}.")
        try:
            get_scheduler(self.lr_scheduler_type, optimizer, 0, 1, scheduler_specific_kwargs=self.lr_scheduler_kwargs)
        except ArithmeticError as error:
            raise ValueError(f"lr_scheduler_kwargs {self.lr_scheduler_kwargs} give no schedule ({error}).") from error
        if getattr(self.accelerator_config, "gradient_accumulation_kwargs", None):
            raise ValueError(
                "accelerator_config: gradient_accumulation_kwargs are --gradient_accumulation_steps here."
            )
        if self.push_to_hub:
            validate_repo_id(self.repo_id)
        if self.save_only_model:
            raise ValueError("save_only_model would leave checkpoints that a run can't go on from: leave it out.")
        default_optim = next(f.default for f in fields(TrainingArguments) if f.name == "optim")
        if self.muon and self.optim != default_optim:
            raise ValueError(
                f"optim {getattr(self.optim, 'value', self.optim)} goes with --muon false: otherwise Muon and AdamW "
                "are used."
            )
        if self.resume_from_checkpoint is not None:
            raise ValueError(
                "resume_from_checkpoint is not needed: a run goes on from the last one in its output_dir."
            )

    @property
    def repo_id(self) -> str:
        """The repository that `push_to_hub` pushes to: `hub_model_id`, or one that is named after the folder."""
        return self.hub_model_id or Path(self.output_dir).resolve().name

    def loss_settings(self) -> LossSettings:
        return LossSettings(
            stage1_weights=self.stage1_weights,
            last_phase_weights=self.last_phase_weights or self.stage1_weights,
            stage2_weights=self.stage2_weights,
            normalize=self.normalize_loss,
            cosine_weight=self.cosine_weight,
            output_only=self.training_mode == "output_only",
        )

    @property
    def global_batch_size(self) -> int:
        """Images that one optimizer step sees, over all processes and micro-batches."""
        return self.train_batch_size * self.gradient_accumulation_steps * self.world_size

    def stage1_steps(self, max_steps: int) -> int:
        """How many of `max_steps` optimizer steps belong to stage 1."""
        ratio = {"teacher_forcing": 1.0, "output_only": 0.0}.get(self.training_mode, self.stage1_ratio)
        return round(ratio * max_steps)

    def teacher_forcing(self, step: int, max_steps: int) -> float:
        """Lambda at an optimizer step: 1 to 0 over the first `teacher_forcing_ratio` of stage 1."""
        annealed = self.teacher_forcing_ratio * self.stage1_steps(max_steps)
        if self.training_mode == "teacher_forcing":
            return 1.0
        if self.training_mode != "two_stage" or step >= annealed:
            return 0.0
        return 1.0 - step / annealed
