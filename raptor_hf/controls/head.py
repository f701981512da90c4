"""The head that a teacher was trained with, on the features of other backbones."""

import datasets
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForImageClassification, BaseImageProcessor, PreTrainedModel

from ..images import CenterCrop
from ..probes.features import pool_tokens
from ..teacher_training import LabelledPixelValues, class_indices
from ..teachers import load_teacher_config, token_slices


def load_head(teacher: str) -> nn.Linear | None:
    """The linear head of a teacher that was saved as a classifier, (2 * hidden_size) -> classes; otherwise None."""
    config = load_teacher_config(teacher)
    if not any(name.endswith("ForImageClassification") for name in config.architectures or []):
        return None
    model = AutoModelForImageClassification.from_pretrained(teacher, dtype=torch.float32, use_safetensors=True)
    return model.classifier.eval().requires_grad_(False)


def labelled_rows(
    images: datasets.Dataset, teacher: str, label_column: str, processor: BaseImageProcessor
) -> LabelledPixelValues:
    """
    Images with their class indices among the teacher's classes.

    Raises:
        ValueError: if there is no such column, or a label is none of the teacher's classes.
    """
    names = load_teacher_config(teacher).id2label
    labels = class_indices(images, label_column, [names[index] for index in sorted(names)])
    return LabelledPixelValues(images, CenterCrop(processor), labels)


def classify(head: nn.Linear, tokens: torch.Tensor, slices: dict[str, slice]) -> torch.Tensor:
    """Classes (batch,) by a head on [cls, mean of patches] of normed tokens (batch, tokens, hidden_size)."""
    features = pool_tokens(tokens, slices)
    return head(torch.cat((features["cls"], features["patch_mean"]), dim=1)).argmax(dim=1)


@torch.no_grad()
def head_accuracy(
    model: PreTrainedModel, head: nn.Linear, rows: LabelledPixelValues, batch_size: int = 64, num_workers: int = 0
) -> float:
    """Share of rows that a head puts into the right class on a backbone's features."""
    slices = token_slices(model.config)
    right = 0
    for batch in DataLoader(rows, batch_size, num_workers=num_workers):
        tokens = model(batch["pixel_values"].to(model.device)).last_hidden_state
        right += (classify(head, tokens, slices).cpu() == batch["labels"]).sum().item()
    return right / len(rows)
