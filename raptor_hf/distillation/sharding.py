"""Tensors and models of which each process holds a part, as FSDP2 makes them. Others pass through as they are."""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ..modeling_raptor import RaptorModel


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor. Every process must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def divided_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A tensor that every process holds as a whole, divided among them as another of its shape is."""
    if not isinstance(other, DTensor):
        return tensor
    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)


def whole_model(model: RaptorModel) -> RaptorModel:
    """A Raptor that can be used by itself: a copy, if it is divided. Every process must call this."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model
    weights = {name: whole_tensor(value) for name, value in model.state_dict().items()}
    copy = RaptorModel(model.config).to(next(iter(weights.values())))
    copy.load_state_dict(weights)
    return copy
