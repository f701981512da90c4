"""Training a DINOv2-architecture ViT from scratch on labelled images: small teachers for experiments."""

from dataclasses import dataclass, field

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

from .files import write_json
from .images import CenterCrop, EpochSampler, PixelValues, RandomResizedCrop, check_crop_scale, load_image_dataset
from .parser import ConfigArgumentParser


@dataclass
class TeacherArguments(TrainingArguments):
    """A ViT and its training; the defaults train on scikit-learn's digits in two minutes on two slow CPU cores."""

    output_dir: str = field(default="outputs/teacher", metadata={"help": "Where the teacher goes."})
    dataset: str = field(default="digits", metadata={"help": "Labelled images: Hub name, folder or parquet file."})
    train_split: str = field(default="train", metadata={"help": "Split to train on."})
    test_split: str = field(default="test", metadata={"help": "Split to measure accuracy on."})
    image_column: str | None = field(default=None, metadata={"help": "Column of the images; found if there is one."})
    label_column: str = field(default="label", metadata={"help": "Column of the class indices."})
    image_size: int = field(default=32, metadata={"help": "Pixels of the square images."})
    patch_size: int = field(default=8, metadata={"help": "Pixels of a square patch."})
    hidden_size: int = field(default=64, metadata={"help": "Width."})
    num_hidden_layers: int = field(default=12, metadata={"help": "Depth."})
    num_attention_heads: int = field(default=4, metadata={"help": "Attention heads."})
    drop_path_rate: float = field(default=0.1, metadata={"help": "Stochastic depth, uniform over layers."})
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

    def __post_init__(self):
        super().__post_init__()
        check_crop_scale(self.crop_scale)
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} must be a multiple of patch_size {self.patch_size}.")


class LabelledPixelValues(PixelValues):
    """Rows as `{"pixel_values": ..., "labels": int}`."""

    def __init__(self, dataset, transform, label_column: str, seed: int = 0):
        super().__init__(dataset, transform, seed)
        self.labels = dataset[label_column]

    def __getitem__(self, index: int) -> dict:
        return super().__getitem__(index) | {"labels": int(self.labels[index % len(self)])}


class TeacherTrainer(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return EpochSampler(len(self.train_dataset), self.args.seed, lambda: int(self.state.epoch or 0))


def train_teacher(args: TeacherArguments) -> dict:
    """
    Trains a `Dinov2ForImageClassification` and saves it to `args.output_dir` with its image processor and
    `results.json`.

    Returns:
        What `results.json` holds: `test_accuracy`, `parameters`, `arguments`.

    Raises:
        ValueError: if the data set or its label column can't be found.
    """
    train, test = (
        load_image_dataset(args.dataset, split, image_column=args.image_column)
        for split in (args.train_split, args.test_split)
    )
    if args.label_column not in train.column_names:
        raise ValueError(
            f"{args.dataset} has no column {args.label_column}: set --label_column to one of "
            f"{', '.join(train.column_names)}."
        )
    labels = train[args.label_column]
    if not all(isinstance(label, int) and label >= 0 for label in labels):
        raise ValueError(f"Labels must be class indices, but {args.label_column} holds {labels[0]!r}.")
    names = getattr(train.features[args.label_column], "names", None)
    names = names or [str(label) for label in range(max(labels) + 1)]
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
        train_dataset=LabelledPixelValues(train, crop, args.label_column, args.seed),
        eval_dataset=LabelledPixelValues(test, CenterCrop(processor), args.label_column),
        compute_metrics=accuracy,
    )
    trainer.train()
    metrics = trainer.evaluate()
    results = {
        "test_accuracy": metrics["eval_accuracy"],
        "parameters": model.num_parameters(),
        "arguments": {"dataset": args.dataset, "seed": args.seed, "drop_path_rate": args.drop_path_rate},
    }
    trainer.save_model()
    processor.save_pretrained(args.output_dir)
    write_json(f"{args.output_dir}/results.json", results)
    return results


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
