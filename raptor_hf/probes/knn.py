"""Weighted nearest neighbours, as DINO evaluates frozen features (arXiv 2104.14294)."""

import math
from collections.abc import Sequence

import torch
from torch.nn.functional import normalize, one_hot
from tqdm.auto import tqdm

# Similarities and votes held at a time, in numbers.
BUDGET = 2**25


def knn_predict(
    train_features: torch.Tensor,
    train_labels: torch.Tensor,
    test_features: torch.Tensor,
    num_classes: int,
    k: Sequence[int] = (10, 20),
    temperature: float = 0.07,
    progress: bool = False,
) -> dict[int, torch.Tensor]:
    """
    The class with the most votes among the k training images of highest cosine similarity s, each voting with weight
    exp(s / temperature). Memory beside the features is bounded: test images are taken in batches.

    Args:
        train_features: (train images, width).
        train_labels: (train images,) class indices.
        test_features: (test images, width).
        num_classes: how many classes there are.
        k: numbers of neighbours.
        temperature: of the votes.
        progress: whether to show a progress bar.

    Returns:
        For each k the predicted classes, (test images,).

    Raises:
        ValueError: if a k is not from 1 to the number of training images, or the temperature not positive.
    """
    check_neighbours(k, len(train_features))
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    train_features = normalize(train_features, dim=1)
    batch_size = max(1, BUDGET // max(len(train_features), max(k) * num_classes))
    predictions = {count: [] for count in k}
    for batch in tqdm(test_features.split(batch_size), desc="kNN", disable=not progress):
        similarity, neighbours = (normalize(batch, dim=1) @ train_features.T).topk(max(k), dim=1)
        # Relative to the nearest: the same winner, and no overflow at low temperatures.
        weights = ((similarity - similarity[:, :1]) / temperature).exp()
        votes = one_hot(train_labels[neighbours], num_classes) * weights.unsqueeze(-1)
        for count in k:
            predictions[count].append(votes[:, :count].sum(dim=1).argmax(dim=1))
    return {count: torch.cat(parts) for count, parts in predictions.items()}


def check_neighbours(k: Sequence[int], num_images: int):
    """Raises ValueError if there are fewer training images than neighbours."""
    if min(k) < 1 or max(k) > num_images:
        raise ValueError(f"k must be from 1 to {num_images}, the number of training images, got {list(k)}.")
