"""Everything that is measured of one model, from its images on."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..vision_models import token_slices, trajectory
from .claims import check_claims
from .perturbation import SelfCorrection
from .recurrence import Recurrence
from .run_on import RecordedLayers
from .trajectory_dynamics import TrajectoryDynamics


class ModelDynamics:
    """
    [`TrajectoryDynamics`] of a model, its [`SelfCorrection`] and, of a Raptor, its [`Recurrence`].

    Args:
        model: as [`raptor_hf.vision_models.load_vision_model`] gives it.
        epsilons, starts: as [`SelfCorrection`] takes them; by default four starts, evenly spread.
        num_perturbed: images whose trajectories are pushed, the first ones.
        num_iterations: applications of each of a Raptor's blocks; by default 4 times the longest phase, at least 48.
        num_iterated: images that are iterated so, the first ones.
        seed: of the pushes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        epsilons: Sequence[float] = (0.01, 0.03, 0.1),
        starts: Sequence[int] | None = None,
        num_perturbed: int = 32,
        num_iterations: int | None = None,
        num_iterated: int = 8,
        seed: int = 0,
    ):
        depth, slices = model.config.num_hidden_layers, token_slices(model.config)
        starts = even_starts(depth) if starts is None else starts
        if starts and max(starts) >= depth:
            raise ValueError(f"Start layers must be below the model's {depth} layers, got {list(starts)}.")
        self.model = model
        self.dynamics = TrajectoryDynamics(slices)
        self.correction = SelfCorrection(slices, starts, epsilons, seed)
        self.recurrence = None
        if model.config.model_type == "raptor" and model.config.block_assignment is None:
            longest = max(model.config.phase_iterations or model.config.phase_sizes)
            self.recurrence = Recurrence(model, slices, num_iterations or max(48, 4 * longest))
        self._to_push, self._to_iterate = num_perturbed, num_iterated
        self._not_run_on = None

    def update(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Adds images, (batch, channels, height, width), and their classes (batch,); returns their trajectory."""
        pixel_values = pixel_values.to(self.model.device, self.model.dtype)
        states = trajectory(self.model, pixel_values)
        self.dynamics.update(states, labels)
        if self._to_push > 0 and self._not_run_on is None:
            try:
                self.correction.update(RecordedLayers(self.model, pixel_values[: self._to_push]))
            except ValueError as error:
                self._not_run_on = str(error)
            self._to_push -= len(pixel_values)
        if self.recurrence is not None and self._to_iterate > 0:
            self.recurrence.update(states[: self._to_iterate])
            self._to_iterate -= len(states)
        return states

    def compute(self, phase_sizes: Sequence[int], num_modes: int = 10) -> dict:
        """
        What [`TrajectoryDynamics.compute`] gives, and what was measured of `self_correction`, `recurrence` and
        `claims`; `not_run_on` says why the model couldn't be run on from pushed states, if so.
        """
        result = self.dynamics.compute(phase_sizes, num_modes)
        if self.correction.num_images:
            result["self_correction"] = self.correction.compute(phase_sizes)
        if self._not_run_on is not None:
            result["not_run_on"] = self._not_run_on
        if self.recurrence is not None and self.recurrence.num_images:
            result["recurrence"] = self.recurrence.compute()
        return result | {"claims": check_claims(result)}


def even_starts(depth: int) -> list[int]:
    """Four layers, from 0, evenly spread."""
    return sorted({i * depth // 4 for i in range(4)})
