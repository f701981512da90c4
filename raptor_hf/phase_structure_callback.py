"""Whether phases emerge while a model is trained: a callback for any Trainer (arXiv 2512.19941, Figure 4)."""

import logging
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset
from transformers import Trainer, TrainerCallback

from .files import read_json, write_json
from .phases import check_partition, find_phases, layer_similarity, partition_objective, random_phases
from .vision_models import token_slices

logger = logging.getLogger(__name__)
PHASE_STRUCTURE_NAME = "phase_structure.json"


class PhaseStructureCallback(TrainerCallback):
    """
    Measures a model's phases during training, for any Trainer of a Vision Transformer whose tokens are known (see
    [`raptor_hf.vision_models.token_slices`]), with a classifier on top or not:

        trainer.add_callback(PhaseStructureCallback(trainer, images, every=100))

    Logged through the Trainer: `layer_similarity`, the mean similarity of two different layers; `phase_objective`,
    what [`find_phases`] reaches; `random_objective` and `random_objective_std`, what random contiguous segmentations
    reach. The best segmentation is above the random ones by its making; what tells of phases is how far. The matrices
    and phase sizes go to a JSON file, a list with an entry for each measurement. Training itself is not changed: no
    random number is drawn from its streams.

    Args:
        trainer: the Trainer that it is added to.
        dataset: rows with `pixel_values`, (channels, height, width).
        every: measure after every so many steps, and before the first and after the last.
        num_phases, min_size, objective: see [`find_phases`].
        num_random: random segmentations to compare with.
        num_images: of the data set, the first so many are used.
        batch_size: images a forward pass.
        path: the JSON file. Default: `phase_structure.json` in the Trainer's output folder.

    Raises:
        ValueError: if `every` is not positive, the model's layers can't be cut so, or its tokens aren't known.
    """

    def __init__(
        self,
        trainer: Trainer,
        dataset,
        every: int,
        num_phases: int = 3,
        min_size: int = 2,
        objective: str = "mean",
        num_random: int = 100,
        num_images: int = 256,
        batch_size: int = 64,
        path: str | Path | None = None,
    ):
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}.")
        # What can't be measured is told before the training, not at its first measurement.
        token_slices(trainer.model.config)
        self.num_layers = trainer.model.config.num_hidden_layers
        check_partition(self.num_layers, num_phases, min_size)
        self.trainer, self.every = trainer, every
        self.images = Subset(dataset, range(min(num_images, len(dataset))))
        self.batch_size = batch_size
        self.num_phases, self.min_size, self.objective = num_phases, min_size, objective
        self.random_sizes = [random_phases(self.num_layers, num_phases, min_size, seed) for seed in range(num_random)]
        self.path = Path(path or Path(trainer.args.output_dir) / PHASE_STRUCTURE_NAME)
        self.measured: list[dict] = []

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step and self.path.is_file():
            # A continued run: what the interrupted one measured after its last checkpoint is measured again.
            earlier = read_json(self.path, list)
            self.measured = [entry for entry in earlier if entry["step"] <= state.global_step]
        if not state.global_step:
            self._measure(state)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            should_log = control.should_log
            self._measure(state)
            # Logging takes back the request to log this step's loss.
            control.should_log = should_log
        return control

    def _measure(self, state):
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        training = model.training
        # A generator of its own: a DataLoader draws from the global one that dropout uses.
        loader = DataLoader(self.images, self.batch_size, generator=torch.Generator())
        model.to(self.trainer.args.device).eval()
        similarity = layer_similarity(model, loader)
        model.train(training)
        if not torch.isfinite(similarity).all():
            logger.warning("The hidden states are not finite at step %s: no phases.", state.global_step)
            return
        scalars, sizes = self.phase_structure(similarity)
        self.trainer.log(dict(scalars))
        entry = {"step": state.global_step, "epoch": state.epoch, "phase_sizes": sizes}
        self.measured.append(entry | scalars | {"similarity": similarity.tolist()})
        if self.trainer.is_world_process_zero():
            write_json(self.path, self.measured)

    def phase_structure(self, similarity: torch.Tensor) -> tuple[dict[str, float], list[int]]:
        """What is logged of a layer similarity (L, L), and the phase sizes."""
        sizes = find_phases(similarity, self.num_phases, self.min_size, self.objective)
        best, *random = (
            partition_objective(similarity, np.repeat(range(self.num_phases), s), self.objective)
            for s in (sizes, *self.random_sizes)
        )
        scalars = {
            "layer_similarity": mean_off_diagonal(similarity),
            "phase_objective": best,
            "random_objective": float(np.mean(random)),
            "random_objective_std": float(np.std(random)),
        }
        return scalars, sizes


def mean_off_diagonal(matrix) -> float:
    """Mean of a square matrix, (L, L), without its diagonal."""
    matrix = np.asarray(matrix)
    return float(matrix[~np.eye(len(matrix), dtype=bool)].mean())
