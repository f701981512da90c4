"""Fidelity: how near a Raptor's trajectory stays to its teacher's, layer by layer and for each token type."""

from collections.abc import Iterable

import torch
from torch.nn.functional import cosine_similarity
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .modeling_raptor import RaptorModel
from .teachers import token_slices, trajectory


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


@torch.no_grad()
def one_step(model: RaptorModel, states: torch.Tensor) -> torch.Tensor:
    """
    Each layer of a Raptor from its teacher's state before that layer, so that errors don't add up.

    Args:
        states: the teacher's trajectory, (batch, L + 1, tokens, hidden_size).

    Returns:
        (batch, L + 1, tokens, hidden_size); index 0 holds the teacher's embeddings.
    """
    steps = [states[:, 0]]
    for layer, (block, depth_step) in enumerate(model.config.schedule()):
        steps.append(model.blocks[block](states[:, layer], torch.tensor(depth_step, device=states.device)))
    return torch.stack(steps, dim=1)


def compare(
    model: RaptorModel, teacher: PreTrainedModel, batches: Iterable[torch.Tensor | dict], progress: bool = False
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """
    A Raptor's fidelity to its teacher in two ways: `closed_loop`, on its own from the embeddings on, and `one_step`,
    see [`one_step`].

    Args:
        batches: pixel values, (batch, channels, height, width), or dictionaries that hold them as `pixel_values`.
        progress: whether to show a progress bar.

    Returns:
        For each way what [`LayerFidelity.compute`] gives of each token type, and of `all` tokens alike.

    Raises:
        ValueError: if the two have another depth, width or tokens, or there are no images.
    """
    check_same_shape(model.config, teacher.config)
    slices = token_slices(model.config) | {"all": slice(None)}
    closed_loop, single = LayerFidelity(slices), LayerFidelity(slices)
    for batch in tqdm(batches, desc="Fidelity", disable=not progress):
        pixel_values = (batch["pixel_values"] if isinstance(batch, dict) else batch).to(model.device)
        target = trajectory(teacher, pixel_values)
        closed_loop.update(trajectory(model, pixel_values), target)
        single.update(one_step(model, target), target)
    return {"closed_loop": closed_loop.compute(), "one_step": single.compute()}


def check_same_shape(config, teacher_config):
    """Raises ValueError if the states of a Raptor and of a teacher can't be compared, by their configurations."""
    for name in ("num_hidden_layers", "hidden_size", "patch_size", "num_register_tokens"):
        own, other = getattr(config, name, 0), getattr(teacher_config, name, 0)
        if own != other:
            raise ValueError(f"The Raptor's {name} is {own}, the teacher's {other}: not a Raptor of it.")


def epsilon_brh(relative_error: list[float]) -> float:
    """
    The epsilon of the Block-Recurrent Hypothesis (arXiv 2512.19941): the largest, over layers, mean relative error
    |x - a| / |a| of a Raptor's own trajectory. From a list of L + 1 errors, the embeddings' left out.
    """
    return max(relative_error[1:])
