"""Streaming sums over images, in float64: what they hold depends on the model alone, not on how many images come."""

from collections.abc import Callable

import torch
from scipy.stats import t as student_t


def precise(x: torch.Tensor) -> torch.Tensor:
    """In float64; on the CPU where the device has none."""
    return (x.cpu() if x.device.type == "mps" else x).double()


class Moments:
    """
    Mean and variance over images of anything of a fixed shape, merged batch by batch (Chan, Golub and LeVeque, 1983).
    """

    def __init__(self):
        self.count = 0

    def update(self, values: torch.Tensor):
        """Adds images: (B, ...)."""
        values = precise(values)
        count, mean = len(values), values.mean(0)
        squares = (values - mean).square().sum(0)
        if self.count == 0:
            self.count, self.mean, self.squares = count, mean, squares
            return
        total = self.count + count
        delta = mean - self.mean
        self.mean = self.mean + delta * (count / total)
        self.squares = self.squares + squares + delta.square() * (self.count * count / total)
        self.count = total

    def half_width(self, confidence: float = 0.95) -> torch.Tensor:
        """Half of the mean's confidence interval, by Student's t; infinite for a single image."""
        if self.count < 2:
            return torch.full_like(self.mean, float("inf"))
        quantile = float(student_t.ppf((1 + confidence) / 2, self.count - 1))
        return quantile * (self.squares / (self.count - 1) / self.count).sqrt()

    def band(self, select: Callable = lambda x: x, transform: Callable = lambda x: x) -> dict[str, list | None]:
        """
        `mean`, and `low` and `high` of its 95 % confidence interval (None for a single image), as lists: of the part
        that `select` takes, carried over by an increasing `transform`.
        """
        mean, half_width = select(self.mean), select(self.half_width())
        low, high = (
            (None, None) if self.count < 2 else (transform(x).tolist() for x in (mean - half_width, mean + half_width))
        )
        return {"mean": transform(mean).tolist(), "low": low, "high": high}


class SecondMoments:
    """
    The D x D products of a token type's states and updates, from which ranks and linear maps follow.

    With x_l the states of all tokens as (n, D) and d_l = x_l - x_(l-1): `states[l] = x_l' x_l` for l = 0..L, and for
    l = 1..L `pairs[l - 1] = x_l' x_(l-1)` and `updates[l - 1] = d_l' d_l`. Updates have products of their own: as
    differences of the others they would lose their digits where layers change little.
    """

    def __init__(self):
        self.count = 0

    def update(self, states: torch.Tensor):
        """Adds images: (B, L + 1, T, D)."""
        depth, width = states.shape[1], states.shape[3]
        if self.count == 0:
            zeros = precise(states.new_zeros(depth, width, width))
            self.states, self.pairs, self.updates = zeros, zeros[1:].clone(), zeros[1:].clone()
        self.count += states.shape[0] * states.shape[2]
        before = None
        for layer in range(depth):
            x = precise(states[:, layer].reshape(-1, width))
            self.states[layer].addmm_(x.T, x)
            if before is not None:
                step = x - before
                self.pairs[layer - 1].addmm_(x.T, before)
                self.updates[layer - 1].addmm_(step.T, step)
            before = x
