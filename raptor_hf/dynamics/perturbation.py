"""Self-correction: whether a trajectory that was pushed aside comes back to where it would have been."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import normalize

from .direction import angle
from .moments import Moments, precise
from .run_on import RecordedLayers


def perturb(states: torch.Tensor, eps: float, noise: torch.Tensor | None = None) -> torch.Tensor:
    """
    Each token pushed by eps times its length in a random direction at a right angle to it, so that it turns by
    arctan(eps): (..., D) -> (..., D), in the states' dtype.

    Args:
        noise: normal numbers, shaped as the states, that give the directions; drawn by default.
    """
    x = precise(states)
    noise = torch.randn_like(x) if noise is None else noise.to(x)
    direction = normalize(x, dim=-1)
    tangent = noise - (noise * direction).sum(-1, keepdim=True) * direction
    pushed = x + eps * x.norm(dim=-1, keepdim=True) * normalize(tangent, dim=-1)
    return pushed.to(device=states.device, dtype=states.dtype)


def deviation(layers: RecordedLayers, start: int, eps: float, noise: torch.Tensor | None = None) -> torch.Tensor:
    """
    The angle, in radians, to the clean trajectory after all tokens were pushed at depth `start` (arXiv 2512.19941), in
    the directions that the `noise` gives, as [`perturb`] takes it.

    Returns:
        (B, L + 1 - start, T), float64; index 0 is the push itself, arctan(eps).
    """
    pushed = layers(perturb(layers.states[:, start], eps, noise), start)
    return angle(pushed, layers.states[:, start:])


class SelfCorrection:
    """
    Streaming deviations after pushes of several sizes at several depths.

    Args:
        slices: token types, as [`raptor_hf.vision_models.token_slices`] gives them.
        starts: states that are pushed, from 0, the embeddings, to L - 1.
        epsilons: sizes of the pushes, relative to a token's length.
        seed: of the random directions. Those of an image depend on its place among all images, not on the batches.
    """

    def __init__(self, slices: dict[str, slice], starts: Sequence[int], epsilons: Sequence[float], seed: int = 0):
        if not starts or min(starts) < 0:
            raise ValueError(f"Start layers must be numbers from 0, got {list(starts)}.")
        if not epsilons or not all(0 < eps < math.inf for eps in epsilons):
            raise ValueError(f"The sizes of pushes, eps, must be positive and finite, got {list(epsilons)}.")
        self.slices, self.seed = slices, seed
        self.starts, self.epsilons = list(dict.fromkeys(starts)), list(dict.fromkeys(epsilons))
        self._num_seen = 0
        # Of each image and token type the logarithms of angle_j / angle_i, for all depths i and j from the start.
        self._ratios = {(name, start, eps): Moments() for name in slices for start in starts for eps in epsilons}

    @property
    def num_images(self) -> int:
        return max(ratios.count for ratios in self._ratios.values())

    def update(self, layers: RecordedLayers):
        """Adds images."""
        for start in self.starts:
            for eps in self.epsilons:
                angles = deviation(layers, start, eps, self._noise(layers.states[:, start], start, eps))
                for name, where in self.slices.items():
                    mean = angles[:, :, where].mean(2)
                    # Register tokens may start as 0, which no push turns.
                    mean = mean[mean[:, 0] > 0]
                    if len(mean):
                        log = mean.clamp_min(torch.finfo(mean.dtype).tiny).log()
                        self._ratios[name, start, eps].update(log[:, None, :] - log[:, :, None])

        self._num_seen += len(layers.states)

    def _noise(self, states: torch.Tensor, start: int, eps: float) -> torch.Tensor:
        bits = int(np.float64(eps).view(np.uint64))
        keys = ((self.seed, self._num_seen + i, start, bits) for i in range(len(states)))
        noise = [np.random.default_rng(key).standard_normal(states.shape[1:]) for key in keys]
        return torch.from_numpy(np.stack(noise))

    def compute(self, phase_sizes: Sequence[int]) -> dict[str, list[dict]]:
        """
        For each token type, one entry for each start and size (none where the tokens are 0, which nothing turns), with
        `start`, `eps` and, as bands (`mean`, `low`, `high`: geometric mean over images, 95 % confidence interval):

        - `angle`, in radians, at each layer from `start` to L;
        - `contraction`, by what each layer start + 1..L multiplies it;
        - `phases`, the same for each phase, by the layer (of a phase only the layers after `start`; None before);
        - `total`, by what all layers together multiply it.

        Raises:
            ValueError: if no images were added.
        """
        if self.num_images == 0:
            raise ValueError("Self-correction needs at least one image.")
        results = {name: [] for name in self.slices}
        for (name, start, eps), ratios in self._ratios.items():
            if ratios.count == 0:
                continue
            results[name].append(
                {
                    "start": start,
                    "eps": eps,
                    "angle": ratios.band(lambda x: x[0], lambda x, eps=eps: x.exp() * math.atan(eps)),
                    "contraction": ratios.band(lambda x: x.diagonal(1), torch.exp),
                    "phases": _phases(ratios, start, phase_sizes),
                    "total": ratios.band(lambda x: x[0, -1], torch.exp),
                }
            )
        return results


def _phases(ratios: Moments, start: int, phase_sizes: Sequence[int]) -> list[dict | None]:
    phases, end = [], 0
    for size in phase_sizes:
        begin, end = max(end, start), end + size
        if begin < end:
            span = begin - start, end - start
            phases.append(ratios.band(lambda x, span=span: x[span] / (span[1] - span[0]), torch.exp))
        else:
            phases.append(None)
    return phases
