"""
A plain way to train the blocks, as a yardstick: float32, one run for each phase, `nn.MultiheadAttention` as it comes,
a SwiGLU four widths wide, a loop over the layers. Written from the paper's formulas (arXiv 2512.19941).
"""

import torch
from torch import nn


class ReferenceBlock(nn.Module):
    def __init__(self, hidden_size: int, num_attention_heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.attention = nn.MultiheadAttention(hidden_size, num_attention_heads, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(hidden_size, 8 * hidden_size), nn.Linear(4 * hidden_size, hidden_size)
        self.layer_scale1 = nn.Parameter(torch.full((hidden_size,), 1e-5))
        self.layer_scale2 = nn.Parameter(torch.full((hidden_size,), 1e-5))
        self.depth_scaling = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 3 * hidden_size))

    def forward(self, hidden_states: torch.Tensor, depth_step: float) -> torch.Tensor:
        depth_step = hidden_states.new_full((len(hidden_states), 1), depth_step)
        t1, t2, t3 = (1 + self.depth_scaling(depth_step)).unsqueeze(1).chunk(3, dim=-1)
        normed = self.norm1(hidden_states)
        attended = self.attention(normed, normed, normed)[0]
        hidden_states = hidden_states + t1 * self.layer_scale1 * attended
        gate, up = self.fc1(self.norm2(hidden_states)).chunk(2, dim=-1)
        hidden_states = hidden_states + t2 * self.layer_scale2 * self.fc2(nn.functional.silu(gate) * up)
        return t3 * hidden_states


def stage1_step(blocks, optimizers, states: torch.Tensor, phase_sizes: list[int], teacher_forcing: float):
    """One step of each phase's own run, from stored activations: states (batch, L + 1, tokens, hidden_size)."""
    start = 0
    for block, optimizer, size in zip(blocks, optimizers, phase_sizes):
        loss, hidden_states = 0.0, states[:, start]
        for layer in range(start, start + size):
            target = states[:, layer + 1]
            if teacher_forcing > 0:
                forced = block(states[:, layer], layer + 1.0)
                loss = loss + teacher_forcing * nn.functional.mse_loss(forced, target) / size
            if teacher_forcing < 1:
                hidden_states = block(hidden_states, layer + 1.0)
                loss = loss + (1 - teacher_forcing) * nn.functional.mse_loss(hidden_states, target) / size
        _update(loss, [block], optimizer)
        start += size


def stage2_step(blocks, optimizer, states: torch.Tensor, phase_sizes: list[int]):
    """One step of the whole chain: the sum of both token types' errors at each layer."""
    loss, hidden_states, layer = 0.0, states[:, 0], 0
    for block, size in zip(blocks, phase_sizes):
        for _ in range(size):
            layer += 1
            hidden_states = block(hidden_states, float(layer))
            error = (hidden_states - states[:, layer]).square()
            loss = loss + (error[:, :1].mean() + error[:, 1:].mean()) / (2 * sum(phase_sizes))
    _update(loss, blocks, optimizer)


def _update(loss: torch.Tensor, blocks, optimizer):
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for block in blocks for p in block.parameters()], 1.0)
    optimizer.step()
