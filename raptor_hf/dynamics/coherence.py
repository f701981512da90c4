"""Coherence: whether tokens move the same way, and whether they point where their mean points."""

import torch
from torch.nn.functional import normalize

from .moments import precise


def update_directions(states: torch.Tensor) -> torch.Tensor:
    """Unit vectors along x_l - x_(l-1), 0 where nothing moves: (B, L + 1, T, D) -> (B, L, T, D), float64."""
    return normalize(precise(states).diff(dim=1), dim=-1)


def update_coherence(states: torch.Tensor) -> torch.Tensor:
    """
    The length of the mean, over an image's tokens, of their unit update directions (arXiv 2512.19941): 1 if all move
    the same way; n independent directions give about 1 / sqrt(n).

    Args:
        states: tokens of one type, (B, L + 1, T, D).

    Returns:
        (B, L); index 0 is the first layer's.
    """
    return update_directions(states).mean(2).norm(dim=-1)


def mean_field_alignment(states: torch.Tensor) -> torch.Tensor:
    """
    The cosine between each token and the mean of its image's token directions (arXiv 2512.19941). Averaged over the
    tokens it is the length of that mean.

    Args:
        states: tokens of one type, (B, L + 1, T, D).

    Returns:
        (B, L + 1, T).
    """
    directions = normalize(precise(states), dim=-1)
    field = normalize(directions.mean(2, keepdim=True), dim=-1)
    return (directions * field).sum(-1)
