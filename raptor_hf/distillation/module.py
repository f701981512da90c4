"""The distillation module: a Raptor and its losses, in the one `forward` that Accelerate wraps."""

from dataclasses import dataclass

import torch
from torch import nn

from ..modeling_raptor import RaptorModel
from ..teachers import token_slices
from .losses import layer_loss


@dataclass
class LossSettings:
    """
    How the layers' losses are weighed; see [`layer_loss`]. Weights are of cls, registers and patches, `None` for the
    plain MSE over all tokens.

    Args:
        stage1_weights, last_phase_weights: in stage 1, those of all phases but the last, and of the last.
        stage2_weights: in stage 2.
        normalize: whether each layer's loss is relative to the mean square of the teacher's state.
        cosine_weight: of 1 - cosine, which is added to the loss.
        output_only: whether stage 2 compares the last layer alone (the paper's control).
    """

    stage1_weights: list[float] | None = None
    last_phase_weights: list[float] | None = None
    stage2_weights: list[float] | None = None
    normalize: bool = False
    cosine_weight: float = 0.0
    output_only: bool = False


class DistillationModule(nn.Module):
    """
    A Raptor and its losses: it is to reproduce every state of a teacher's trajectory (arXiv 2512.19941, both stages of
    its training). Its embeddings and its final LayerNorm are the teacher's, and are frozen here.

    Args:
        student: the Raptor; its depth must be the teacher's.
        settings: how the losses are weighed.
    """

    def __init__(self, student: RaptorModel, settings: LossSettings):
        super().__init__()
        self.student = student
        self.settings = settings
        self.slices = token_slices(student.config)
        student.embeddings.requires_grad_(False)
        student.layernorm.requires_grad_(False)

    def activation_checkpointing_enable(self, **kwargs):
        self.student.activation_checkpointing_enable(**kwargs)

    def forward(self, states: torch.Tensor, stage: int = 2, teacher_forcing: float = 0.0) -> dict[str, torch.Tensor]:
        """
        Args:
            states: the teacher's trajectory, (batch, L + 1, tokens, hidden_size).
            stage: 1 trains each phase on its own, from the teacher's state at its start; 2 the whole chain, from the
                embeddings.
            teacher_forcing: lambda of stage 1, in 0..1: the share of the loss in which every layer starts from the
                teacher's state before it.

        Returns:
            `loss`, a scalar: in stage 1 the sum over phases of the mean over their layers, in stage 2 the mean over
            layers. `layer_losses`, (L,), detached.
        """
        if stage == 1:
            losses = 0.0
            if teacher_forcing > 0:
                losses = teacher_forcing * self._teacher_forced(states)
            if teacher_forcing < 1:
                losses = losses + (1 - teacher_forcing) * self._autoregressive(states, restart=True)
            sizes, blocks = self.student.config.phase_sizes, self.student.config.layer_blocks
            loss = (losses / torch.tensor([sizes[block] for block in blocks], device=losses.device)).sum()
        else:
            losses = self._autoregressive(states, restart=False)
            loss = losses[-1] if self.settings.output_only else losses.mean()
        return {"loss": loss, "layer_losses": losses.detach()}

    def _layer_loss(self, states: torch.Tensor, target: torch.Tensor, weights: list[float] | None) -> torch.Tensor:
        settings = self.settings
        return layer_loss(states, target, self.slices, weights, settings.normalize, settings.cosine_weight)

    def _layer_weights(self, layer_block: int, stage1: bool) -> list[float] | None:
        if not stage1:
            return self.settings.stage2_weights
        last = layer_block == self.student.config.layer_blocks[-1]
        return self.settings.last_phase_weights if last else self.settings.stage1_weights

    def _teacher_forced(self, states: torch.Tensor) -> torch.Tensor:
        """Each layer from the teacher's state before it, all layers of a block as one batch: losses (L,)."""
        blocks = self.student.config.layer_blocks
        losses = torch.zeros(len(blocks), device=states.device)
        for index, block in enumerate(self.student.blocks):
            layers = [layer for layer, owner in enumerate(blocks) if owner == index]
            layers = torch.tensor(layers, device=states.device)
            inputs, target = states[:, layers], states[:, layers + 1]
            batch = inputs.shape[0]
            depth_steps = (layers + 1.0).repeat(batch)
            outputs = block(inputs.flatten(0, 1), depth_steps)
            weights = self._layer_weights(index, stage1=True)
            loss = self._layer_loss(outputs, target.flatten(0, 1), weights)
            losses = losses.index_put((layers,), loss.view(batch, -1).mean(dim=0))
        return losses

    def _autoregressive(self, states: torch.Tensor, restart: bool) -> torch.Tensor:
        """Each layer from the Raptor's own state before it; `restart` takes the teacher's at a phase's start."""
        blocks = self.student.config.layer_blocks
        depth_steps = torch.arange(1.0, len(blocks) + 1, device=states.device)
        hidden_states, losses = states[:, 0], []
        for layer, block in enumerate(blocks):
            if restart and layer > 0 and block != blocks[layer - 1]:
                hidden_states = states[:, layer]
            hidden_states = self.student.blocks[block](hidden_states, depth_steps[layer])
            if self.settings.output_only and layer < len(blocks) - 1:
                losses.append(hidden_states.new_zeros(()))
                continue
            weights = self._layer_weights(block, stage1=restart)
            target = states[:, layer + 1]
            losses.append(self._layer_loss(hidden_states, target, weights).mean())
        return torch.stack(losses)
