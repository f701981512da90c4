"""What the controls share: a base run, its teacher, and the series of runs that differ from it in a few arguments."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PretrainedConfig, PreTrainedModel

from ..configuration_raptor import RaptorConfig
from ..digits import digits_teacher
from ..distillation import DataArguments, DistillationArguments, ModelArguments
from ..distillation.estimate import EstimateArguments, estimate_run
from ..distillation.run import MIN_PHASE_SIZE, distill
from ..distillation.run_folder import ARGUMENTS_NAME, WEIGHTS_KEY
from ..distillation.student import student_config
from ..files import read_json, weights_sha256, write_json
from ..images import (
    CenterCrop,
    PixelValues,
    crop_size,
    draw_images,
    load_image_dataset,
    load_image_processor,
    without_bad_images,
)
from ..modeling_raptor import RaptorModel
from ..phases import find_phases, layer_similarity
from ..teacher_training import teacher_from_recipe
from ..teachers import load_teacher, load_teacher_config
from .head import head_accuracy, labelled_rows, load_head

SIMILARITY_NAME = "similarity.json"
# Enough that each kind of step has its share.
STEPS_TO_TIME = 1000


@dataclass
class ControlArguments:
    """What a control is told besides the distillation's own arguments."""

    teacher_recipe: str | None = field(
        default=None,
        metadata={"help": "YAML file of train_teacher.py's flags, to train the teacher by where it isn't."},
    )
    test_split: str = field(default="test", metadata={"help": "Split to measure accuracy on."})
    test_dataset: str | None = field(default=None, metadata={"help": "Data set of the test split, if another one."})
    label_column: str = field(default="label", metadata={"help": "Column of the labels."})
    max_samples: int | None = field(default=None, metadata={"help": "Use at most so many test images."})


@dataclass
class Experiment:
    """A base run, as the three dataclasses that [`distill`] takes, and a control's own arguments."""

    own: ControlArguments
    model: ModelArguments
    data: DataArguments
    run: DistillationArguments

    @property
    def output_dir(self) -> Path:
        return Path(self.run.output_dir)

    @cached_property
    def teacher(self) -> str:
        """Folder or Hub name of the teacher; it is trained first where there is a recipe for it."""
        if self.model.teacher == "digits":
            return str(digits_teacher())
        if self.own.teacher_recipe is not None:
            self.train_teacher(self.model.teacher)
        return self.model.teacher

    def train_teacher(self, output_dir: str | Path, **changes) -> dict:
        """Trains a teacher by the recipe, on this experiment's data set, or finds it; see [`teacher_from_recipe`]."""
        own, data, run = self.own, self.data, self.run
        settings = {"use_cpu": run.use_cpu, "disable_tqdm": run.disable_tqdm, "label_column": own.label_column}
        settings |= {name: getattr(data, name) for name in ("dataset", "train_split", "image_column")}
        settings |= {"test_split": own.test_split, "output_dir": output_dir}
        return teacher_from_recipe(own.teacher_recipe, **settings | changes)

    @cached_property
    def teacher_config(self) -> PretrainedConfig:
        return load_teacher_config(self.teacher, self.model.trust_remote_code)

    @property
    def num_layers(self) -> int:
        return self.teacher_config.num_hidden_layers

    def load_teacher(self) -> PreTrainedModel:
        return load_teacher(self.teacher, trust_remote_code=self.model.trust_remote_code).to(self.run.device)

    @cached_property
    def teacher_sha256(self) -> str:
        return weights_sha256(self.load_teacher())

    def phase_batches(self) -> DataLoader:
        """`phase_images` training images, as the teacher's image processor makes them."""
        images = load_image_dataset(self.data.dataset, self.data.train_split, image_column=self.data.image_column)
        images, _ = draw_images(images, self.model.phase_images, self.run.seed)
        rows = PixelValues(images, CenterCrop(load_image_processor(self.teacher, self.data.image_size)))
        return DataLoader(rows, self.run.per_device_eval_batch_size, num_workers=self.run.dataloader_num_workers)

    def changed(self, **changes) -> "Experiment":
        """The same with other values of some fields, of whichever dataclass. Raises ValueError if they are unfit."""
        parts = {}
        for part in ("own", "model", "data", "run"):
            arguments = getattr(self, part)
            names = {f.name for f in fields(arguments)}
            parts[part] = replace(arguments, **{k: changes[k] for k in changes if k in names})
        return Experiment(**parts)

    def series(self, members: dict[str, dict]) -> dict[str, dict]:
        """
        Distils one Raptor for each member, into `<output_dir>/runs/<member>`. Members that are there, finished, are
        found again; one that was interrupted goes on.

        Args:
            members: name to the arguments in which it differs from the base run.

        Returns:
            Name to what the member's `results.json` holds, with `folder` beside it.

        Raises:
            ValueError: if a member's arguments are unfit, before any is trained, or its folder holds another run, or
                one of a teacher of other weights.
        """
        runs = {
            name: self.changed(output_dir=str(self.output_dir / "runs" / name), **changes)
            for name, changes in members.items()
        }
        results = {}
        progress = tqdm(runs.items(), desc="Raptors", disable=self.run.disable_tqdm or self.run.process_index != 0)
        for name, member in progress:
            progress.set_postfix_str(name)
            results[name] = distill(member.model, member.data, member.run) | {"folder": str(member.output_dir)}
            # A finished run is found again by its arguments alone.
            began_with = read_json(member.output_dir / ARGUMENTS_NAME)[WEIGHTS_KEY]["teacher"]
            if began_with != self.teacher_sha256:
                raise ValueError(
                    f"{member.output_dir} holds a Raptor of a teacher of other weights than {self.teacher} has: give "
                    "another --output_dir, or --overwrite_output_dir true."
                )
        return results

    def similarity(self) -> torch.Tensor:
        """The teacher's layer similarity (L, L) on `phase_images` training images; measured once, then kept."""
        path = self.output_dir / SIMILARITY_NAME
        asked = {
            "teacher_sha256": self.teacher_sha256,
            "dataset": self.data.dataset,
            "split": self.data.train_split,
            "image_size": self.data.image_size,
            "images": self.model.phase_images,
            "seed": self.run.seed,
        }
        with self.run.main_process_first(local=False):
            kept = read_json(path) if path.is_file() else {}
            if any(kept.get(name) != value for name, value in asked.items()):
                progress = not self.run.disable_tqdm
                similarity = layer_similarity(self.load_teacher(), self.phase_batches(), progress=progress)
                if self.run.process_index == 0:
                    kept = asked | {"similarity": similarity.tolist()}
                    write_json(path, kept)
                return similarity
        return torch.tensor(kept["similarity"], dtype=torch.float64)

    def phases(self, num_phases: int, objective: str | None = None) -> list[int]:
        """The phase sizes of the teacher, of at least 2 layers each where so many fit."""
        min_size = min(MIN_PHASE_SIZE, self.num_layers // num_phases)
        return find_phases(self.similarity(), num_phases, max(1, min_size), objective or self.model.phase_objective)

    @cached_property
    def student_config(self) -> RaptorConfig:
        """The configuration of the base run's Raptor, its phases found where they aren't given."""
        to_find = self.model.phases_to_find
        sizes = self.phases(to_find) if to_find else self.model.phase_sizes
        return student_config(self.model, self.teacher_config, sizes)

    def steps_in(self, seconds: float) -> int:
        """How many steps the run would do in so many seconds, by the time that a few take on this machine."""
        image_size = crop_size(load_image_processor(self.teacher, self.data.image_size))
        devices = EstimateArguments()
        found = estimate_run(self.teacher_config, self.student_config, self.run, devices, STEPS_TO_TIME, image_size)
        return max(1, round(seconds * STEPS_TO_TIME / (3600 * found["hours"])))

    @cached_property
    def judge(self) -> "Judge":
        return Judge(self)


class Judge:
    """
    What a Raptor keeps of its teacher: the accuracy of the teacher's own head on its features, where the teacher has
    a head and the test images have labels, and the final cosine.

    Raises:
        ValueError: if the teacher has a head, but the test images or their labels don't fit it.
    """

    def __init__(self, experiment: Experiment):
        own, data = experiment.own, experiment.data
        self.experiment = experiment
        self.head = load_head(experiment.teacher)
        self.rows, self.bad_images = None, 0
        if self.head is not None:
            self.head.to(experiment.run.device)
            images = load_image_dataset(
                own.test_dataset or data.dataset, own.test_split, image_column=data.image_column
            )
            if own.max_samples is not None and own.max_samples < len(images):
                images = images.shuffle(seed=0).select(range(own.max_samples))
            images, bad = without_bad_images(images)
            self.bad_images = len(bad)
            processor = load_image_processor(experiment.teacher, data.image_size)
            self.rows = labelled_rows(images, experiment.teacher, own.label_column, processor)

    def teacher_accuracy(self) -> float | None:
        return self._accuracy(load_teacher(self.experiment.teacher))

    def measure(self, member: dict) -> dict:
        """
        Of a member of a series: `accuracy` (or None), `final_cosine`, `r2` (the mean over layers and the token types
        cls and patch), `parameters`, `phase_sizes`, how many `bad_test_images` were left out, and, with
        `--eval_strategy steps`, the `final_cosine` by `step` and `seconds` of training (`curve`).
        """
        curves = list(member["fidelity"].values())[-1]
        return {
            "accuracy": self._accuracy(RaptorModel.from_pretrained(member["folder"], dtype=torch.float32)),
            "final_cosine": float(np.mean([curves[token]["cosine"][-1] for token in ("cls", "patch")])),
            "r2": float(np.mean([curves[token]["r2"][1:] for token in ("cls", "patch")])),
            "parameters": member["parameters"]["raptor"],
            "phase_sizes": member["phase_sizes"],
            "bad_test_images": self.bad_images,
            "curve": [
                {
                    "step": entry["step"],
                    "seconds": entry["eval_train_seconds"],
                    "final_cosine": float(np.mean([entry[f"eval_{token}_cosine"] for token in ("cls", "patch")])),
                }
                for entry in member["during_training"]
            ],
        }

    def _accuracy(self, model) -> float | None:
        if self.head is None:
            return None
        run = self.experiment.run
        model = model.to(run.device).eval()
        batch_size, num_workers = run.per_device_eval_batch_size, run.dataloader_num_workers
        return head_accuracy(model, self.head, self.rows, batch_size, num_workers)
