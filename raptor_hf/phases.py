"""Phases: how alike a teacher's layers are, and where to cut its depth (arXiv 2512.19941, phase discovery)."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch.nn.functional import normalize
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .vision_models import token_slices, trajectory

OBJECTIVES = ("mean", "cut")


def layer_similarity(
    model: PreTrainedModel, batches: Iterable[torch.Tensor | dict], progress: bool = False
) -> torch.Tensor:
    """
    How alike the layers of a model are: the mean over images of the cosine between two layers' cls tokens and that
    between their mean patch tokens, averaged (without a cls token, the patches' alone). Registers take no part. Memory
    does not grow with the images.

    Args:
        model: a teacher, a Raptor or another Vision Transformer, with L layers.
        batches: pixel values, (batch, channels, height, width), or dictionaries that hold them as `pixel_values`.
        progress: whether to show a progress bar.

    Returns:
        S of shape (L, L), float64, on the CPU.

    Raises:
        ValueError: if there are no images.
    """
    slices = token_slices(model.config)
    compared = [slices[name] for name in ("cls", "patch") if name in slices]
    total, num_images = 0.0, 0
    for batch in tqdm(batches, desc="Layer similarity", disable=not progress):
        pixel_values = batch["pixel_values"] if isinstance(batch, dict) else batch
        states = trajectory(model, pixel_values.to(model.device, model.dtype))[:, 1:].float()
        for where in compared:
            token = normalize(states[:, :, where].mean(dim=2), dim=-1)
            total = total + torch.einsum("bld,bmd->lm", token, token).cpu().double() / len(compared)
        num_images += len(pixel_values)
    if num_images == 0:
        raise ValueError("Layer similarity needs at least one image, but the batches were empty.")
    return total / num_images


def find_phases(
    similarity: torch.Tensor | np.ndarray, num_phases: int, min_size: int = 2, objective: str = "mean"
) -> list[int]:
    """
    The best segmentation of depth into contiguous phases, by dynamic programming over the boundaries: exact, in
    O(num_phases L^2). Of equally good ones it gives the one with later cuts.

    Args:
        similarity: the layer similarity S, (L, L).
        num_phases: how many phases.
        min_size: layers that a phase has at least.
        objective: `"mean"` maximises the sum over phases of (1/n) sum of S over the phase's n x n pairs; `"cut"`
            maximises the sum of 1 - S over pairs in different phases.

    Returns:
        The phase sizes; they sum to L.

    Raises:
        ValueError: if the matrix isn't square and finite, the layers can't be cut so, or the objective is unknown.
    """
    similarity = _checked(similarity)
    num_layers = len(similarity)
    check_partition(num_layers, num_phases, min_size)
    # prefix[i, j] is the sum of S[:i, :j], so that the sum over any phase takes four look-ups.
    prefix = np.pad(similarity.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    start, end = np.meshgrid(np.arange(num_layers + 1), np.arange(num_layers + 1), indexing="ij")
    diagonal = np.diagonal(prefix)
    sums = diagonal[end] + diagonal[start] - prefix[start, end] - prefix[end, start]
    sizes = end - start
    score = _phase_score(sums, np.maximum(sizes, 1), objective)
    score[sizes < min_size] = -np.inf

    best = score[0]
    cuts = []
    for _ in range(num_phases - 1):
        # Rounded, so that a tie is one; of equal cuts the later is taken.
        candidates = np.round(best[:, None] + score, 9)
        cuts.append(num_layers - candidates[::-1].argmax(axis=0))
        best = candidates.max(axis=0)
    boundaries = [num_layers]
    for cut in reversed(cuts):
        boundaries.append(int(cut[boundaries[-1]]))
    return [high - low for high, low in pairwise([*boundaries, 0])][::-1]


def partition_objective(
    similarity: torch.Tensor | np.ndarray, block_assignment: Sequence[int], objective: str = "mean"
) -> float:
    """
    What [`find_phases`] maximises, for any assignment of layers to blocks, contiguous or not. For `"cut"` it is
    given without the pairs' constant total: minus the sum of 1 - S over pairs (l < m) in one phase.

    Args:
        similarity: (L, L).
        block_assignment: the block of each of the L layers.

    Raises:
        ValueError: if the matrix isn't square and finite, is of another number of layers, or the objective is unknown.
    """
    similarity, blocks = _checked(similarity), np.asarray(block_assignment)
    if len(blocks) != len(similarity):
        raise ValueError(f"{len(blocks)} layers are assigned, but the similarity is of {len(similarity)} layers.")
    return float(
        sum(
            _phase_score(similarity[np.ix_(blocks == b, blocks == b)].sum(), (blocks == b).sum(), objective)
            for b in np.unique(blocks)
        )
    )


def check_partition(num_layers: int, num_phases: int, min_size: int):
    """Raises ValueError if `num_layers` layers can't be cut into `num_phases` phases of at least `min_size`."""
    if num_phases < 1 or min_size < 1 or num_phases * min_size > num_layers:
        raise ValueError(
            f"{num_layers} layers can't be cut into {num_phases} phases of at least {min_size} layers: ask for fewer, "
            "or for smaller ones."
        )


def random_phases(num_layers: int, num_phases: int, min_size: int = 1, seed: int = 0) -> list[int]:
    """
    Sizes of random contiguous phases, each at least `min_size`, uniform over all such segmentations: a baseline.

    Raises:
        ValueError: if the layers can't be cut so.
    """
    check_partition(num_layers, num_phases, min_size)
    spare = num_layers - num_phases * min_size
    # Stars and bars: each choice of bars among the spare layers is one segmentation.
    bars = np.random.default_rng(seed).choice(spare + num_phases - 1, num_phases - 1, replace=False)
    edges = [-1, *sorted(bars.tolist()), spare + num_phases - 1]
    return [high - low - 1 + min_size for low, high in pairwise(edges)]


def shuffled_assignment(phase_sizes: Sequence[int], seed: int = 0) -> list[int]:
    """
    A random non-contiguous assignment of layers to blocks, with the given number of layers for each: a baseline, for
    `RaptorConfig(block_assignment=...)`.

    Raises:
        ValueError: if every assignment with these sizes is contiguous.
    """
    if len(phase_sizes) < 2 or max(phase_sizes) < 2:
        raise ValueError(f"Every assignment with phase sizes {list(phase_sizes)} is contiguous: none to shuffle.")
    rng = np.random.default_rng(seed)
    blocks = np.repeat(np.arange(len(phase_sizes)), phase_sizes)
    while True:
        shuffled = rng.permutation(blocks)
        if np.count_nonzero(np.diff(shuffled)) >= len(phase_sizes):
            return shuffled.tolist()


def _phase_score(sums: np.ndarray, sizes: np.ndarray, objective: str) -> np.ndarray:
    if objective == "mean":
        return sums / sizes
    if objective == "cut":
        # With a diagonal of ones, n - sum over the diagonal is nought: only pairs count, each once.
        return (sums - sizes**2) / 2.0
    raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {objective!r}.")


def _checked(similarity: torch.Tensor | np.ndarray) -> np.ndarray:
    similarity = np.asarray(similarity, dtype=np.float64)
    if similarity.ndim != 2 or similarity.shape[0] != similarity.shape[1] or not np.isfinite(similarity).all():
        what = "one that holds infinities or NaN" if np.isnan(similarity.sum()) else f"shape {similarity.shape}"
        raise ValueError(f"The similarity must be a square, finite matrix, got {what}.")
    if not np.allclose(np.diagonal(similarity), 1, atol=0.05):
        raise ValueError("The similarity's diagonal must be 1: of a dissimilarity give one minus it.")
    return similarity
