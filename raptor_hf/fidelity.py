"""Fidelity: how near a Raptor's trajectory stays to its teacher's, layer by layer and for each token type."""

import torch
from torch.nn.functional import cosine_similarity


class LayerFidelity:
    """
    Streaming layerwise comparison of two trajectories; memory does not grow with the images.

    Args:
        slices: token types and where they lie, as [`raptor_hf.teachers.token_slices`] gives them.
    """

    def __init__(self, slices: dict[str, slice]):
        self.slices = slices
        self._sums: dict[str, dict[str, torch.Tensor]] = {}

    def update(self, states: torch.Tensor, target: torch.Tensor):
        """Adds images: both (batch, L + 1, tokens, hidden_size)."""
        for name, where in self.slices.items():
            x, a = states[:, :, where].float(), target[:, :, where].float()
            error, norm = (x - a).norm(dim=-1), a.norm(dim=-1)
            batch = {
                "tokens": torch.full((x.shape[1],), x.shape[0] * x.shape[2]),
                "cosine": cosine_similarity(x, a, dim=-1).sum((0, 2)),
                "relative_error": (error / norm.clamp_min(1e-12)).sum((0, 2)),
                "squared_error": error.square().sum((0, 2)),
                "sum": a.sum((0, 2)),
                "squared_sum": a.square().sum((0, 2)),
            }
            sums = self._sums.setdefault(name, {})
            for key, value in batch.items():
                sums[key] = sums.get(key, 0) + value.cpu().double()

    def reduce(self, accelerator):
        """Adds up what every process of an `accelerate.Accelerator` has seen, so that `compute` tells the whole."""
        if accelerator.num_processes == 1:
            return
        for sums in self._sums.values():
            for key, value in sums.items():
                sums[key] = accelerator.reduce(value.to(accelerator.device), reduction="sum").cpu()

    def compute(self) -> dict[str, dict[str, list[float]]]:
        """
        For each token type, lists of L + 1 numbers, index 0 being the embeddings:
        `cosine`, the mean over tokens of the cosine to the teacher's state; `relative_error`, the mean of
        |x - a| / |a|; `r2`, one minus the squared error over the variance of the teacher's states around their mean.

        Raises:
            ValueError: if no images were added.
        """
        if not self._sums:
            raise ValueError("Fidelity needs at least one image.")
        results = {}
        for name, sums in self._sums.items():
            count = sums["tokens"]
            variance = (sums["squared_sum"] - sums["sum"].square() / count.unsqueeze(-1)).sum(-1)
            # States that don't vary (the cls embedding, for one) leave nothing to explain.
            unexplained = torch.where(
                variance > 1e-9 * sums["squared_sum"].sum(-1),
                sums["squared_error"] / variance,
                (sums["squared_error"] > 0).double(),
            )
            results[name] = {
                "cosine": (sums["cosine"] / count).tolist(),
                "r2": (1 - unexplained).tolist(),
                "relative_error": (sums["relative_error"] / count).tolist(),
            }
        return results
