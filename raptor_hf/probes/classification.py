"""Classes and folds: what the probes of labelled images share."""

import warnings
from dataclasses import dataclass, field

import datasets
import numpy as np
import torch
from evaluate import EvaluationModule
from sklearn.model_selection import StratifiedKFold
from transformers import BaseImageProcessor, PreTrainedModel

from ..images import CenterCrop
from ..teacher_training import class_indices, class_names
from ..teachers import token_slices
from .arguments import EvalArguments
from .features import compute_features

# Choices, and the stored features that they are made of.
FEATURES = {"cls": ("cls",), "mean": ("patch_mean",), "cls_mean": ("cls", "patch_mean")}
FEATURES_FLAG = {
    "help": "The cls token, the mean of the patch tokens, or both side by side.",
    "choices": list(FEATURES),
}


@dataclass(kw_only=True)
class ClassificationArguments(EvalArguments):
    """Flags of the scripts that classify images."""

    features: str = field(default="cls_mean", metadata=FEATURES_FLAG)
    folds: int | None = field(
        default=None,
        metadata={"help": "Cross-validate on the train split in so many parts, for data without a test split."},
    )

    def __post_init__(self):
        super().__post_init__()
        if self.folds is not None and self.folds < 2:
            raise ValueError(f"folds must be at least 2, got {self.folds}.")

    def load_model(self) -> tuple[PreTrainedModel, BaseImageProcessor]:
        model, processor = super().load_model()
        if "cls" in FEATURES[self.features] and "cls" not in token_slices(model.config):
            raise ValueError(f"{self.model} has no cls token: use --features mean.")
        return model, processor


@dataclass
class LabelledImages:
    """
    Images, their labels, and which rows to learn from and which to measure on.

    Args:
        splits: the train split and, unless it is cross-validated, the test split: images in the column `image`.
        labels: class indices (images,) of all splits, one after the other.
        class_names: one for each class index.
        parts: pairs of rows (train, test) among all splits' images: one, or one for each fold.
    """

    splits: list[datasets.Dataset]
    labels: torch.Tensor
    class_names: list[str]
    parts: list[tuple[np.ndarray, np.ndarray]]

    @classmethod
    def load(cls, args: ClassificationArguments) -> "LabelledImages":
        """
        What a script was told to use.

        Raises:
            ValueError: if a data set, split or column is missing, labels aren't class indices, or the test split's
                classes are others than the train split's.
        """
        train = args.load_train()
        names = class_names(train, args.label_column)
        labels = class_indices(train, args.label_column, names)
        if args.folds is not None:
            return cls([train], torch.tensor(labels), names, stratified_folds(labels, args.folds, args.seed))
        test = args.load_test()
        stated = [getattr(dataset.features.get(args.label_column), "names", None) for dataset in (train, test)]
        if None not in stated and stated[0] != stated[1]:
            raise ValueError(
                f"Splits {args.train_split} and {args.test_split} name other classes, or in another order, in column "
                f"{args.label_column}: an index must mean the same in both."
            )
        labels += class_indices(test, args.label_column, names)
        rows = np.arange(len(labels))
        return cls([train, test], torch.tensor(labels), names, [(rows[: len(train)], rows[len(train) :])])

    def features(
        self, args: ClassificationArguments, model: PreTrainedModel, processor: BaseImageProcessor
    ) -> torch.Tensor:
        """The model's features of all images, (images, width); [`compute_features`] says what it raises."""
        return torch.cat([split_features(split, args, model, processor) for split in self.splits])

    def measure(self, metric: EvaluationModule, predictions: torch.Tensor) -> dict:
        """
        What the accuracy metric says of predicted classes, (images,), over the rows that are measured on; how many
        `images` they are, the accuracy's `standard_error`, and `fold_accuracy` where there are several folds.
        """

        def compute(rows):
            return metric.compute(predictions=predictions[rows].tolist(), references=self.labels[rows].tolist())

        rows = self.measured
        result = compute(rows) | {"images": len(rows)}
        result["standard_error"] = (result["accuracy"] * (1 - result["accuracy"]) / len(rows)) ** 0.5
        if len(self.parts) > 1:
            result["fold_accuracy"] = [compute(test)["accuracy"] for _, test in self.parts]
        return result

    @property
    def measured(self) -> np.ndarray:
        """The rows that are measured on, of all folds."""
        return np.concatenate([test for _, test in self.parts])


def split_features(
    split: datasets.Dataset, args: ClassificationArguments, model: PreTrainedModel, processor: BaseImageProcessor
) -> torch.Tensor:
    """The features that `args.features` names, of all images of a data set: (images, width)."""
    store = compute_features(
        model,
        split,
        CenterCrop(processor),
        batch_size=args.batch_size,
        num_workers=args.dataloader_num_workers,
        cache_dir=args.feature_cache,
    )
    return torch.cat([store.tensor(name) for name in FEATURES[args.features]], dim=1)


def stratified_folds(labels, folds: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """
    Cross-validation in shuffled folds that share out each class as evenly as its count allows: (train, test) rows of
    each. A class with fewer images than folds is missing from some folds' test parts.

    Raises:
        ValueError: if no class has as many images as there are folds.
    """
    labels = np.asarray(labels)
    if np.bincount(labels).max() < folds:
        raise ValueError(
            f"No class has {folds} images, one for each of {folds} folds: use fewer folds, or more images."
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The least populated class")
        return list(StratifiedKFold(folds, shuffle=True, random_state=seed).split(labels, labels))
