"""Linear probes: how far one linear layer on a frozen backbone's features gets."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn
from tqdm.auto import tqdm
from transformers import (
    AutoModelForImageClassification,
    BaseImageProcessor,
    PreTrainedModel,
    TrainingArguments,
    set_seed,
)

from ..images import RandomResizedCrop, check_crop_scale, crop_size
from ..parser import check_at_least_one
from ..teacher_training import LabelledPixelValues, TeacherTrainer
from .classification import FEATURES, ClassificationArguments, stratified_folds
from .features import forward_features

# Inverse regularisation strengths, for features of unit variance.
STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
VALIDATION_FOLDS = 5
# Of classes without a training image. Finite, and within half precision.
NEVER = -1e4
# What the heads of Transformers' classifiers take.
HEAD_FEATURES = {
    "raptor": "cls_mean",
    "dinov2": "cls_mean",
    "dinov2_with_registers": "cls_mean",
    "vit": "cls",
    "deit": "cls",
}


@dataclass(kw_only=True)
class LinearProbeArguments(ClassificationArguments):
    """Flags of `eval/linear_probe.py`. Those of the protocol `paper` default to arXiv 2512.19941's on ImageNet-1k."""

    protocol: str = field(
        default="fast",
        metadata={
            "help": "fast: logistic regression on stored features. paper: AdamW on augmented images, epoch by epoch.",
            "choices": ["fast", "paper"],
        },
    )
    strengths: list[float] = field(
        default_factory=lambda: list(STRENGTHS),
        metadata={
            "help": "fast: inverse regularisation strengths (scikit-learn's C). The best on a fifth of the train "
            "split, which is held out for that, is used."
        },
    )
    head: str | None = field(
        default=None, metadata={"help": "paper: start from this classifier's linear head. Hub name or folder."}
    )
    learning_rate: float = field(default=1e-4, metadata={"help": "paper: peak learning rate."})
    weight_decay: float = field(default=1e-2, metadata={"help": "paper: AdamW's weight decay."})
    num_train_epochs: float = field(default=15.0, metadata={"help": "paper: epochs."})
    train_batch_size: int = field(default=512, metadata={"help": "paper: images a step on each device."})
    warmup_steps: int = field(default=100, metadata={"help": "paper: steps of linear warm-up."})
    crop_scale: list[float] = field(
        default_factory=lambda: [0.08, 1.0], metadata={"help": "paper: area share of the random crops."}
    )
    flip: bool = field(default=True, metadata={"help": "paper: whether crops are flipped half the time."})
    save_model: bool = field(
        default=True, metadata={"help": "Whether the classifier is saved, in the folder classifier of output_dir."}
    )

    def __post_init__(self):
        super().__post_init__()
        check_crop_scale(self.crop_scale)
        if not self.strengths or not all(strength > 0 for strength in self.strengths):
            raise ValueError(f"strengths must be positive, got {self.strengths}.")
        check_at_least_one(self, "train_batch_size")
        if not 0 < self.num_train_epochs < math.inf:
            raise ValueError(f"num_train_epochs must be a positive number, got {self.num_train_epochs}.")
        if self.protocol == "paper" and self.folds is not None:
            raise ValueError("folds goes with --protocol fast: name a test split for the other.")
        if self.protocol == "fast" and self.head is not None:
            raise ValueError("head goes with --protocol paper: logistic regression has no use for a start.")


def fit_logistic(
    features: torch.Tensor,
    labels: torch.Tensor,
    num_classes: int,
    strengths: Sequence[float] = STRENGTHS,
    seed: int = 0,
    progress: bool = False,
) -> tuple[nn.Linear, dict]:
    """
    Logistic regression (scikit-learn's, by L-BFGS) on standardised features. The regularisation is chosen on a fifth
    of the images, stratified as far as class counts allow; the head is then fitted on all.

    Args:
        features: (images, width).
        labels: (images,) class indices.
        num_classes: outputs of the head. Classes without an image are never predicted.
        strengths: inverse regularisation strengths to choose from. Of equally good ones the smallest is taken.
        seed: decides which images are held out.
        progress: whether to show a progress bar.

    Returns:
        The head, which takes the features as they are, and `{"strength": ..., "validation_accuracy": {strength:
        accuracy}}`.

    Raises:
        ValueError: if there are fewer than two classes, or no class has two images.
    """
    x, y = features.cpu().numpy(), labels.cpu().numpy()
    counts = np.bincount(y)
    if np.count_nonzero(counts) < 2 or counts.max() < 2:
        raise ValueError("A linear probe needs at least two classes, and one of them with two images to hold out one.")
    folds = stratified_folds(y, min(VALIDATION_FOLDS, counts.max()), seed)
    # The fold that is held out may have the only image of a class: then another one is.
    fit, held_out = max(folds, key=lambda parts: len(set(y[parts[0]])))

    def regression(strength: float) -> Pipeline:
        return make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))

    accuracy = {
        strength: float(regression(strength).fit(x[fit], y[fit]).score(x[held_out], y[held_out]))
        for strength in tqdm(sorted(strengths), desc="Regularisation", disable=not progress)
    }
    best = max(accuracy, key=accuracy.get)
    head = _as_linear(regression(best).fit(x, y), num_classes)
    return head, {"strength": best, "validation_accuracy": accuracy}


@torch.no_grad()
def _as_linear(regression: Pipeline, num_classes: int) -> nn.Linear:
    """The scaler and the regression as one layer whose largest output is the predicted class."""
    scaler, logistic = regression
    weight = logistic.coef_ / scaler.scale_
    bias = logistic.intercept_ - weight @ scaler.mean_
    if len(weight) == 1:
        # Of two classes scikit-learn keeps the log odds alone.
        weight, bias = np.stack([-weight[0] / 2, weight[0] / 2]), np.stack([-bias[0] / 2, bias[0] / 2])
    head = nn.Linear(weight.shape[1], num_classes)
    head.weight.zero_()
    head.bias.fill_(NEVER)
    head.weight[logistic.classes_] = torch.from_numpy(weight).float()
    head.bias[logistic.classes_] = torch.from_numpy(bias).float()
    return head.requires_grad_(False)


class LinearProbe(nn.Module):
    """
    A linear head on the features of a frozen backbone, which stays in evaluation mode.

    Args:
        backbone: any vision model that [`raptor_hf.teachers.load_vision_model`] gives.
        features: `"cls"`, `"mean"` or `"cls_mean"`.
        num_classes: outputs of the head.
    """

    def __init__(self, backbone: PreTrainedModel, features: str, num_classes: int):
        super().__init__()
        self.backbone, self.features = backbone.requires_grad_(False).eval(), features
        self.head = nn.Linear(len(FEATURES[features]) * backbone.config.hidden_size, num_classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def train(self, mode: bool = True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """
        Args:
            pixel_values: (batch, channels, height, width).
            labels: (batch,) class indices.

        Returns:
            `logits` (batch, num_classes), and the cross-entropy `loss` if there are labels.
        """
        features = forward_features(self.backbone, pixel_values)
        logits = self.head(torch.cat([features[name] for name in FEATURES[self.features]], dim=1))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train_augmented(
    model: PreTrainedModel,
    processor: BaseImageProcessor,
    train: datasets.Dataset,
    labels: Sequence[int],
    num_classes: int,
    args: LinearProbeArguments,
) -> nn.Linear:
    """
    The paper's protocol: AdamW on random crops, linear warm-up, cosine to 1 % of the learning rate, clipping at 1.

    Args:
        train: images in the column `image`.
        labels: their class indices.

    Returns:
        The head.

    Raises:
        ValueError: if `args.head` names no classifier whose head fits.
    """
    set_seed(args.seed)
    probe = LinearProbe(model, args.features, num_classes)
    if args.head is not None:
        probe.head.load_state_dict(load_head(args.head, probe.head).state_dict())
    crop = RandomResizedCrop(processor, crop_size(processor), scale=tuple(args.crop_scale), flip=args.flip)
    trainer = TeacherTrainer(
        model=probe,
        args=TrainingArguments(
            output_dir=args.output_dir,
            per_device_train_batch_size=args.train_batch_size,
            learning_rate=args.learning_rate,
            weight_decay=args.weight_decay,
            num_train_epochs=args.num_train_epochs,
            warmup_steps=args.warmup_steps,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.01},
            max_grad_norm=1.0,
            seed=args.seed,
            dataloader_num_workers=args.dataloader_num_workers,
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=LabelledPixelValues(train, crop, labels, args.seed),
    )
    trainer.train()
    return probe.head.cpu().requires_grad_(False)


def load_head(name_or_path: str, like: nn.Linear) -> nn.Linear:
    """The linear head of a classifier. Raises ValueError if there is none of the shape of `like`."""
    try:
        classifier = AutoModelForImageClassification.from_pretrained(
            name_or_path, dtype=torch.float32, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"Head {name_or_path} can't be loaded ({reason}): give an image classifier.") from error
    head = getattr(classifier, "classifier", None)
    if not isinstance(head, nn.Linear) or head.weight.shape != like.weight.shape:
        shape = tuple(head.weight.shape) if isinstance(head, nn.Linear) else "no linear layer"
        raise ValueError(
            f"The head of {name_or_path} is {shape}, but the probe's is {tuple(like.weight.shape)}: (classes, width)."
        )
    return head


@torch.no_grad()
def to_classifier(
    backbone: PreTrainedModel, head: nn.Linear, features: str, class_names: Sequence[str]
) -> PreTrainedModel | None:
    """
    A classifier of a backbone and a linear head (`RaptorForImageClassification`, `Dinov2ForImageClassification`, ...);
    None where Transformers has none for the family that takes these features.
    """
    width, model_type = backbone.config.hidden_size, backbone.config.model_type
    taken = FEATURES.get(HEAD_FEATURES.get(model_type), ())
    if not set(FEATURES[features]) <= set(taken):
        return None
    config = copy.deepcopy(backbone.config)
    # Of what the backbone was saved as, Transformers would choose a class with another head.
    config.architectures = []
    config.id2label = dict(enumerate(class_names))
    config.label2id = {name: index for index, name in enumerate(class_names)}
    classifier = AutoModelForImageClassification.from_config(config)
    state = {name: value for name, value in backbone.state_dict().items() if not name.startswith("pooler.")}
    classifier.base_model.load_state_dict(state)
    classifier.classifier.weight.zero_()
    classifier.classifier.bias.copy_(head.bias)
    # Side by side; what the probe didn't see has no weight.
    for name, weight in zip(FEATURES[features], head.weight.split(width, dim=1)):
        classifier.classifier.weight[:, taken.index(name) * width :][:, :width] = weight
    return classifier.eval()


def save_classifier(classifier: PreTrainedModel, processor: BaseImageProcessor, folder: str | Path):
    """Writes a classifier and its image processor, ready for `pipeline("image-classification", folder)`."""
    classifier.save_pretrained(folder)
    processor.save_pretrained(folder)
