"""Training a DINOv2-architecture ViT from scratch on labelled images: small teachers for experiments."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import numpy as np
import torch
from transformers import (
    BitImageProcessorPil,
    Dinov2Config,
    Dinov2ForImageClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

from .decisive import decisive_arguments
from .files import check_apart, check_holds_no_model, read_json, write_json
from .images import (
    CenterCrop,
    EpochSampler,
    PixelValues,
    RandomResizedCrop,
    check_crop_scale,
    count_bad_images,
    load_image_dataset,
    without_bad_images,
)
from .parser import ConfigArgumentParser, check_at_least_one
from .phase_structure_callback import PhaseStructureCallback

logger = logging.getLogger(__name__)
RESULTS_NAME = "results.json"


@dataclass
class TeacherArguments(TrainingArguments):
    """A ViT and its training; the defaults train on scikit-learn's digits in two minutes on two slow CPU cores."""

    output_dir: str = field(default="outputs/teacher", metadata={"help": "Where the teacher goes."})
    dataset: str = field(default="digits", metadata={"help": "Labelled images: Hub name, folder or parquet file."})
    train_split: str = field(default="train", metadata={"help": "Split to train on."})
    test_split: str = field(default="test", metadata={"help": "Split to measure accuracy on."})
    image_column: str | None = field(default=None, metadata={"help": "Column of the images; found if there is one."})
    label_column: str = field(default="label", metadata={"help": "Column of the classes, as indices or names."})
    image_size: int = field(default=32, metadata={"help": "Pixels of the square images."})
    patch_size: int = field(default=8, metadata={"help": "Pixels of a square patch."})
    hidden_size: int = field(default=64, metadata={"help": "Width."})
    num_hidden_layers: int = field(default=12, metadata={"help": "Depth."})
    num_attention_heads: int = field(default=4, metadata={"help": "Attention heads."})
    drop_path_rate: float = field(
        default=0.1, metadata={"help": "Stochastic depth, from 0 to below 1, the same for every layer."}
    )
    crop_scale: list[float] = field(
        default_factory=lambda: [0.7, 1.0], metadata={"help": "Area share of the random crops."}
    )
    flip: bool = field(default=False, metadata={"help": "Whether crops are flipped half the time."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Peak learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Transformers' learning-rate schedule."})
    warmup_steps: float = field(default=0.1, metadata={"help": "Warm-up, in steps or as a share."})
    weight_decay: float = field(default=0.05, metadata={"help": "AdamW's weight decay."})
    num_train_epochs: float = field(default=20.0, metadata={"help": "Epochs."})
    per_device_train_batch_size: int = field(default=64, metadata={"help": "Images a step on each device."})
    per_device_eval_batch_size: int = field(default=128, metadata={"help": "Images a batch when measuring."})
    save_strategy: str = field(default="no", metadata={"help": "When to save checkpoints."})
    logging_steps: float = field(default=50, metadata={"help": "Log every so many steps."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Not used."})
    phase_structure_steps: int | None = field(
        default=None, metadata={"help": "Measure the phase structure on test images every so many steps."}
    )
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Train anew even if output_dir is taken."})

    def __post_init__(self):
        super().__post_init__()
        check_crop_scale(self.crop_scale)
        check_at_least_one(self, "image_size", "patch_size", "hidden_size", "num_hidden_layers")
        check_at_least_one(self, "num_attention_heads", "phase_structure_steps")
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} must be a multiple of patch_size {self.patch_size}.")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of num_attention_heads {self.num_attention_heads}."
            )
        if not 0 <= self.drop_path_rate < 1:
            raise ValueError(f"drop_path_rate is a probability below 1, got {self.drop_path_rate}.")

    def decisive(self) -> dict:
        """The arguments that decide what is trained: two runs that agree in them are the same run."""
        return decisive_arguments(
            self,
            indifferent=("overwrite_output_dir", "phase_structure_steps"),
            more=("train_batch_size", "world_size", "gradient_accumulation_steps", "label_smoothing_factor"),
        )


class LabelledPixelValues(PixelValues):
    """Rows as `{"pixel_values": ..., "labels": int}`; `labels` are the rows' class indices."""

    def __init__(self, dataset: datasets.Dataset, transform, labels: Sequence[int], seed: int = 0):
        super().__init__(dataset, transform, seed)
        self.labels = labels

    def __getitem__(self, index: int) -> dict:
        return super().__getitem__(index) | {"labels": self.labels[index % len(self)]}


def class_names(dataset: datasets.Dataset, label_column: str) -> list[str]:
    """
    Names of the classes of a labelled data set: a `ClassLabel` column's, the sorted values of a column of strings, or
    the numbers up to the highest index.

    Raises:
        ValueError: if there is no such column, or it holds anything else.
    """
    if label_column not in dataset.column_names:
        raise ValueError(
            f"There is no column {label_column}: set --label_column to one of {', '.join(dataset.column_names)}."
        )
    feature, labels = dataset.features[label_column], list(dataset[label_column])
    if isinstance(feature, datasets.ClassLabel):
        return feature.names
    if all(isinstance(label, str) for label in labels):
        return sorted(set(labels))
    if all(isinstance(label, int) and label >= 0 for label in labels):
        return [str(label) for label in range(max(labels) + 1)]
    kind = str if isinstance(labels[0], str) else int
    odd = next((label for label in labels if not isinstance(label, kind) or (kind is int and label < 0)), labels[0])
    raise ValueError(f"Labels must be class indices or names, but {label_column} holds {odd!r}.")


def class_indices(dataset: datasets.Dataset, label_column: str, names: Sequence[str]) -> list[int]:
    """
    The class index of every row, among the classes that a model knows by `names`.

    Raises:
        ValueError: if there is no such column, or a row has no label or one of another class.
    """
    class_names(dataset, label_column)
    index = {name: i for i, name in enumerate(names)}
    dataset = dataset.select_columns(label_column)
    own = getattr(dataset.features[label_column], "names", None)
    if own is not None and set(own) == set(names):
        # By name: another data set may number the same classes in another order.
        index |= {number: index[name] for number, name in enumerate(own)}
        labels = [index.get(label, -1) for label in dataset[label_column]]
    else:
        labels = [index.get(label, -1) if isinstance(label, str) else label for label in dataset[label_column]]
    unknown = [row for row, label in enumerate(labels) if label is None or not 0 <= label < len(names)]
    if unknown:
        raise ValueError(
            f"{len(unknown)} rows have no class among the {len(names)} known ones in column {label_column}, row "
            f"{unknown[0]} ({dataset[unknown[0]][label_column]!r}) for one: leave them out."
        )
    return [int(label) for label in labels]


class TeacherTrainer(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return EpochSampler(len(self.train_dataset), self.args.seed, lambda: int(self.state.epoch or 0))

    def _save(self, output_dir=None, state_dict=None):
        """The model. Trainer would add its arguments as a pickle, with the token for the Hub among them."""
        model = self.accelerator.unwrap_model(self.model)
        model.save_pretrained(output_dir or self.args.output_dir, state_dict=state_dict)


def train_teacher(args: TeacherArguments) -> dict:
    """
    Trains a `Dinov2ForImageClassification` and saves it to `args.output_dir` with its image processor and
    `results.json`. A teacher of the same arguments that is there already is not trained again.

    Returns:
        What `results.json` holds: `test_accuracy`, `parameters`, `arguments`.

    Raises:
        ValueError: if the data set or its label column can't be found, the folder holds another teacher, or the
            weights are not finite after training.
    """
    check_apart(args.output_dir, {"dataset": args.dataset})
    finished = _finished(args)
    if finished is not None:
        return finished
    train, test = (
        load_image_dataset(args.dataset, split, image_column=args.image_column)
        for split in (args.train_split, args.test_split)
    )
    (train, bad_train), (test, bad_test) = without_bad_images(train), without_bad_images(test)
    names = class_names(train, args.label_column)
    labels = class_indices(train, args.label_column, names)
    test_labels = class_indices(test, args.label_column, names)
    processor = BitImageProcessorPil(
        size={"height": args.image_size, "width": args.image_size},
        do_center_crop=False,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    set_seed(args.seed)
    model = Dinov2ForImageClassification(
        Dinov2Config(
            image_size=args.image_size,
            patch_size=args.patch_size,
            hidden_size=args.hidden_size,
            num_hidden_layers=args.num_hidden_layers,
            num_attention_heads=args.num_attention_heads,
            drop_path_rate=args.drop_path_rate,
            # Transformers' 0.02 suits widths near 768; narrow models would start almost linear with it.
            initializer_range=max(0.02, 0.7 * args.hidden_size**-0.5),
            id2label=dict(enumerate(names)),
            label2id={name: index for index, name in enumerate(names)},
        )
    )
    crop = RandomResizedCrop(processor, args.image_size, scale=tuple(args.crop_scale), flip=args.flip)
    trainer = TeacherTrainer(
        model=model,
        args=args,
        train_dataset=LabelledPixelValues(train, crop, labels, args.seed),
        eval_dataset=LabelledPixelValues(test, CenterCrop(processor), test_labels),
        compute_metrics=accuracy,
    )
    if args.phase_structure_steps:
        trainer.add_callback(PhaseStructureCallback(trainer, trainer.eval_dataset, args.phase_structure_steps))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = trainer.evaluate()
    results = {
        "test_accuracy": metrics["eval_accuracy"],
        "parameters": model.num_parameters(),
        "bad_images": count_bad_images({"train": bad_train, "test": bad_test}),
        "arguments": args.decisive(),
    }
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise ValueError("The teacher's weights are not finite after training, and not saved: lower --learning_rate.")
    trainer.save_model()
    if trainer.is_world_process_zero():
        processor.save_pretrained(args.output_dir)
        write_json(Path(args.output_dir) / RESULTS_NAME, results)
    trainer.accelerator.wait_for_everyone()
    return results


def _finished(args: TeacherArguments) -> dict | None:
    """The results of a teacher that is there already, trained with the same arguments."""
    path = Path(args.output_dir) / RESULTS_NAME
    if args.overwrite_output_dir:
        return None
    if not path.is_file():
        check_holds_no_model(args.output_dir)
        return None
    results, wanted = read_json(path), args.decisive()
    earlier = results.get("arguments")
    if not isinstance(earlier, dict) or "test_accuracy" not in results:
        raise ValueError(f"{path} is damaged (it lacks what was trained): delete it, or give another --output_dir.")
    for name, value in wanted.items():
        if earlier.get(name) != value:
            raise ValueError(
                f"output_dir {args.output_dir} holds a teacher of another {name} ({earlier.get(name)}, not {value}): "
                "give another --output_dir, or --overwrite_output_dir true."
            )
    logger.warning("%s holds this teacher, trained: nothing to do.", args.output_dir)
    return results


def teacher_from_recipe(recipe: str | Path, **changes) -> dict:
    """
    Trains a teacher, or finds it again, by a YAML file of `training/train_teacher.py`'s flags.

    Args:
        recipe: the file.
        **changes: flags that differ from it, `output_dir` for one. What is None is left as the recipe has it.

    Returns:
        What [`train_teacher`] returns.
    """
    flags = [word for name, value in changes.items() if value is not None for word in (f"--{name}", str(value))]
    (args,) = ConfigArgumentParser(TeacherArguments).parse(["--config", str(recipe), *flags])
    return train_teacher(args)


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(TeacherArguments, description="Trains a small DINOv2-architecture ViT from scratch.")
    (args,) = parser.parse(argv)
    try:
        results = train_teacher(args)
    except ValueError as error:
        parser.error(str(error))
    print(f"Test accuracy {results['test_accuracy']:.4f}, saved to {args.output_dir}")


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
