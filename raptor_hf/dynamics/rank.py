"""Rank: in how many dimensions the updates of a layer live."""

import torch

from .moments import precise


def stable_rank(singular_values: torch.Tensor) -> torch.Tensor:
    """|M|_F^2 / |M|_2^2 of a matrix from its singular values, largest first: (..., r) -> (...). 0 for M = 0."""
    squares = precise(singular_values).square()
    return squares.sum(-1) / squares[..., 0].clamp_min(torch.finfo(squares.dtype).tiny)


def effective_rank(singular_values: torch.Tensor) -> torch.Tensor:
    """The exponential of the entropy of the singular values' shares (Roy and Vetterli, 2007): (..., r) -> (...)."""
    values = precise(singular_values)
    shares = values / values.sum(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    return torch.special.entr(shares).sum(-1).exp() * (values[..., 0] > 0)


def update_singular_values(states: torch.Tensor) -> torch.Tensor:
    """
    Singular values of each layer's matrix of updates, whose rows are all tokens of all images.

    Args:
        states: tokens of one type, (B, L + 1, T, D).

    Returns:
        (L, min(B * T, D)), largest first.
    """
    return torch.linalg.svdvals(precise(states).diff(dim=1).transpose(0, 1).flatten(1, 2))


def gram_singular_values(gram: torch.Tensor) -> torch.Tensor:
    """The singular values of M from M' M, so that no matrix is larger than D x D: (..., D, D) -> (..., D)."""
    return torch.linalg.svdvals(gram).sqrt()
