"""Directions: where the states of tokens point through depth, how fast they turn, how long they grow."""

import torch
from torch.nn.functional import normalize

from .moments import precise


def angle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """
    The angle between vectors, in radians, float64: (..., D) and (..., D) -> (...). It keeps its digits near 0 and near
    pi, where the arc cosine loses half of them (Kahan, 2006).
    """
    u, v = normalize(precise(x), dim=-1), normalize(precise(y), dim=-1)
    return 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))


def norms(states: torch.Tensor) -> torch.Tensor:
    """|x_l|: (B, L + 1, T, D) -> (B, L + 1, T)."""
    return precise(states).norm(dim=-1)


def convergence(states: torch.Tensor) -> torch.Tensor:
    """
    Directional convergence, cos(x_l, x_L), of each token to its own last state (arXiv 2512.19941).

    Args:
        states: a trajectory, (B, L + 1, T, D).

    Returns:
        (B, L + 1, T), 1 at the last layer.
    """
    directions = normalize(precise(states), dim=-1)
    return (directions * directions[:, -1:]).sum(-1)


def orthogonal_convergence(states: torch.Tensor) -> torch.Tensor:
    """
    What [`convergence`] would be if all that is added after layer l stood at a right angle to x_l: |x_l| / |x_L|, at
    most 1. A walk of random steps in many dimensions does that; convergence beyond it is the model's own.
    """
    length = norms(states)
    return (length / length[:, -1:].clamp_min(torch.finfo(length.dtype).tiny)).clamp_max(1.0)


def angular_speed(states: torch.Tensor) -> torch.Tensor:
    """
    The angle, in radians, by which each layer turns each token (arXiv 2512.19941).

    Args:
        states: a trajectory, (B, L + 1, T, D).

    Returns:
        (B, L, T); index 0 is the first layer's.
    """
    return angle(states[:, 1:], states[:, :-1])
