"""Other blocks to start from than a phase's middle layer, as arguments of a run."""

import numpy as np
import torch
from tqdm.auto import tqdm

from ..distillation.arguments import PHASE_FLAGS
from ..modeling_raptor import RaptorModel
from ..teachers import trajectory
from .experiment import Experiment

# Blocks that are the teacher's own in kind.
AS_TEACHER = dict.fromkeys(("hidden_act", "intermediate_size", "layerscale_value", "layer_norm_eps"))


def mean_of_layers(experiment: Experiment) -> dict:
    """Each block starts with the mean of its phase's weights; saved as a Raptor in the experiment's folder."""
    folder = experiment.output_dir / "mean_of_layers"
    with experiment.run.main_process_first(local=False):
        if experiment.run.process_index == 0:
            teacher = experiment.load_teacher()
            assigned = {"block_assignment": experiment.student_config.layer_blocks}
            raptor, layers = RaptorModel.from_teacher(teacher, **assigned), as_blocks(teacher)
            for block, members in zip(raptor.blocks, members_of(experiment)):
                states = [layers[layer - 1].state_dict() for layer in members]
                # The depth scaling is the same at the start of every one.
                names = [name for name in states[0] if not name.startswith("depth_scaling.")]
                mean = {name: torch.stack([state[name] for state in states]).mean(0) for name in names}
                block.load_state_dict(mean, strict=False)
            raptor.save_pretrained(folder)
    # Which has its phases.
    return AS_TEACHER | dict.fromkeys((*PHASE_FLAGS, "source_layers")) | {"init": str(folder)}


def best_layers(experiment: Experiment) -> dict:
    """
    Each block starts from the layer that, put in the place of every layer of its phase, has the least relative error
    one step from the teacher's states.
    """
    teacher, run = experiment.load_teacher(), experiment.run
    layers, members = as_blocks(teacher), members_of(experiment)
    errors = np.zeros((len(layers), len(layers)))
    for batch in tqdm(experiment.phase_batches(), desc="One-step errors", disable=run.disable_tqdm):
        states = trajectory(teacher, batch["pixel_values"].to(run.device))
        for phase in members:
            for source in phase:
                for place in phase:
                    errors[source - 1, place - 1] += one_step_error(layers[source - 1], states, place)
    best = [min(phase, key=lambda source: sum(errors[source - 1, place - 1] for place in phase)) for phase in members]
    return AS_TEACHER | {"init": "teacher", "source_layers": best}


@torch.no_grad()
def one_step_error(block: torch.nn.Module, states: torch.Tensor, layer: int) -> float:
    """The sum over images and tokens of a block's relative error in a layer's place; states (batch, L + 1, ...)."""
    step = torch.tensor(float(layer), device=states.device)
    target = states[:, layer]
    error = (block(states[:, layer - 1], step) - target).norm(dim=-1) / target.norm(dim=-1)
    return error.sum().item()


def as_blocks(teacher) -> torch.nn.ModuleList:
    """A teacher's layers as a Raptor's blocks, one each."""
    return RaptorModel.from_teacher(teacher, [1] * teacher.config.num_hidden_layers).blocks


def members_of(experiment: Experiment) -> list[list[int]]:
    """The layers, from 1, of each block."""
    owners = experiment.student_config.layer_blocks
    return [[layer for layer, owner in enumerate(owners, 1) if owner == block] for block in range(max(owners) + 1)]
