"""All measures of a model's trajectories together, streaming over batches of images."""

from collections.abc import Sequence

import torch

from .basins import AngularBasins, as_classes, image_directions
from .boundaries import boundary_jumps
from .coherence import mean_field_alignment, update_coherence, update_directions
from .direction import angular_speed, convergence, norms, orthogonal_convergence
from .dmd import LinearMap, dmd_of_depth
from .moments import Moments, SecondMoments, precise
from .rank import effective_rank, gram_singular_values, stable_rank

# Numbers in a float64 copy of states; larger batches are taken in parts.
CHUNK = 2**23


class TokenDynamics:
    """
    The measures of one token type.

    Args:
        num_tokens: an image's tokens of the type. A single one has no coherence with others.
    """

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens
        measures = {
            "convergence": lambda x: convergence(x).mean(2),
            "orthogonal_convergence": lambda x: orthogonal_convergence(x).mean(2),
            "norm": lambda x: norms(x).mean(2),
            "angular_speed": lambda x: angular_speed(x).mean(2),
        }
        if num_tokens > 1:
            measures["coherence"] = update_coherence
            measures["mean_field_alignment"] = lambda x: mean_field_alignment(x).mean(2)
        self._measures = measures
        self.curves = {name: Moments() for name in measures}
        self.directions = Moments()
        self.products = SecondMoments()
        self.basins = AngularBasins()

    def update(self, states: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Adds images, (B, L + 1, T, D) and their classes (B,); returns their [`image_directions`]."""
        for name, measure in self._measures.items():
            self.curves[name].update(measure(states))
        self.directions.update(update_directions(states).mean(2))
        self.products.update(states)
        directions = image_directions(states)
        self.basins.update(directions, labels)
        return directions

    def compute(self, phase_sizes: Sequence[int], num_modes: int) -> dict:
        """As [`TrajectoryDynamics.compute`], of this token type."""
        result = {name: moments.band() for name, moments in self.curves.items()}
        if self.num_tokens > 1:
            result["isotropic_coherence"] = self.num_tokens**-0.5
        result["coherence_across_images"] = self.directions.mean.norm(dim=-1).tolist()
        values = gram_singular_values(self.products.updates).cpu()
        result["stable_rank"] = stable_rank(values).tolist()
        result["effective_rank"] = effective_rank(values).tolist()
        result["largest_rank"] = min(self.products.count, values.shape[-1])
        for key, remove_growth in (("dmd", True), ("dmd_with_growth", False)):
            spans, end = [], 0
            for size in phase_sizes:
                start, end = end, end + size
                spans.append((start, end))
            maps = [dmd_of_depth(self.products, *span, num_modes, remove_growth) for span in [*spans, (0, end)]]
            result[key] = {"phases": [_as_dict(each) for each in maps[:-1]], "depth": _as_dict(maps[-1])}
        result["basins"] = self.basins.compute() | {"projection": self.basins.projection()}
        num_layers = sum(phase_sizes)
        result["boundaries"] = {
            name: boundary_jumps((curve["mean"] if isinstance(curve, dict) else curve)[-num_layers:], phase_sizes)
            for name, curve in result.items()
            if name in (*self._measures, "stable_rank", "effective_rank") and name != "orthogonal_convergence"
        }
        return result


class TrajectoryDynamics:
    """
    Every measure of depth as a dynamical system (arXiv 2512.19941) for each token type of a model. Memory does not
    grow with the images: it is that of 3 L + 1 matrices of D x D, in float64, for each token type.

    Args:
        slices: token types and where they lie, as [`raptor_hf.vision_models.token_slices`] gives them.

    Example:

    ```python
    >>> dynamics = TrajectoryDynamics(token_slices(model.config))
    >>> for pixel_values in batches:
    ...     dynamics.update(trajectory(model, pixel_values))
    >>> dynamics.compute(phase_sizes=[6, 4, 2])["tokens"]["patch"]["coherence"]["mean"]  # L numbers
    ```
    """

    def __init__(self, slices: dict[str, slice]):
        self.slices = slices
        self.tokens: dict[str, TokenDynamics] = {}
        self._similarity, self._num_images = 0, 0

    def update(self, states: torch.Tensor, labels: torch.Tensor | None = None):
        """
        Adds images.

        Args:
            states: (batch, L + 1, tokens, hidden_size), of any dtype and on any device.
            labels: the images' classes, whole numbers, (batch,), in every call or in none.

        Raises:
            ValueError: if states aren't finite, or labels aren't so.
        """
        labels = as_classes(labels, len(states))
        if not torch.isfinite(states).all():
            raise ValueError("The states hold infinities or NaN: run the model in a wider dtype, float32 for one.")
        size = max(1, CHUNK // states[0].numel())
        parts = [None] * len(states) if labels is None else labels.split(size)
        for part, part_labels in zip(states.split(size), parts):
            self._update(part, part_labels)

    def _update(self, states: torch.Tensor, labels: torch.Tensor | None):
        self._num_images += len(states)
        similarity = []
        for name, where in self.slices.items():
            tokens = precise(states[:, :, where])
            directions = self.tokens.setdefault(name, TokenDynamics(tokens.shape[2])).update(tokens, labels)[:, 1:]
            if name != "register":
                similarity.append(torch.einsum("bld,bmd->lm", directions, directions).cpu())
        self._similarity = self._similarity + sum(similarity) / len(similarity)

    @property
    def similarity(self) -> torch.Tensor:
        """Layer similarity, (L, L), as [`raptor_hf.phases.layer_similarity`] defines it."""
        if self._num_images == 0:
            raise ValueError("Dynamics need at least one image.")
        return self._similarity / self._num_images

    def compute(self, phase_sizes: Sequence[int], num_modes: int = 10) -> dict:
        """
        The measures, as numbers and lists that JSON can hold.

        Args:
            phase_sizes: of contiguous phases; they sum to L.
            num_modes: leading modes of the dynamic mode decompositions.

        Returns:
            `images`, `phase_sizes`, `similarity` (L, L) and `tokens`: for each token type

            - bands (`mean`, `low`, `high`: over images, 95 % confidence interval) of L + 1 numbers for `convergence`,
              `orthogonal_convergence`, `norm`, `mean_field_alignment`, and of L for `angular_speed` (radians) and
              `coherence`; the last of both sorts only where an image has several tokens of the type;
            - lists of L: `stable_rank` and `effective_rank` of the updates of all tokens and images, at most
              `largest_rank`; `coherence_across_images`, the length of the mean of all unit updates;
            - `dmd`, and `dmd_with_growth`: `phases` and `depth`, with `eigenvalues` ([real, imaginary], largest
              modulus first), `moduli`, `energy`, `explained` and `by_one_factor` of [`LinearMap`];
            - `basins`, as [`AngularBasins`] gives them; `boundaries`, for each curve what [`boundary_jumps`] gives.

        Raises:
            ValueError: if no images were added, or the phases don't sum to L.
        """
        num_layers = len(self.similarity)
        if sum(phase_sizes) != num_layers or min(phase_sizes) < 1:
            raise ValueError(f"phase_sizes {list(phase_sizes)} must be positive and sum to the {num_layers} layers.")
        return {
            "images": self._num_images,
            "phase_sizes": list(phase_sizes),
            "similarity": self.similarity.tolist(),
            "tokens": {name: token.compute(phase_sizes, num_modes) for name, token in self.tokens.items()},
        }


def _as_dict(linear_map: LinearMap) -> dict:
    return {
        "eigenvalues": torch.view_as_real(linear_map.eigenvalues).tolist(),
        "moduli": linear_map.eigenvalues.abs().tolist(),
        "energy": linear_map.energy,
        "explained": linear_map.explained,
        "by_one_factor": linear_map.by_one_factor,
    }
