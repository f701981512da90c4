"""What a model costs: parameters, bytes, operations."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel


def parameters(model: PreTrainedModel) -> int:
    """How many numbers a model learns; weights that are tied count once."""
    return model.num_parameters()


def stored_bytes(model: PreTrainedModel) -> int:
    """Bytes of a model's tensors in its present dtype, as a safetensors file holds them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


@torch.no_grad()
def flops(model: PreTrainedModel, image_size: int) -> int:
    """
    Floating-point operations of a forward pass on one square image, a multiply-add being two. Matrix products and
    convolutions count, attention's included; what is done element by element doesn't.
    """
    pixel_values = torch.zeros(1, model.config.num_channels, image_size, image_size, device=model.device)
    # Of the fused attention of a CPU the counter knows nothing.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(pixel_values.to(model.dtype))
    return counter.get_total_flops()


def cost(model: PreTrainedModel, image_size: int) -> dict[str, int]:
    """`parameters`, `stored_bytes` and, for one image, `flops`: see the functions of these names."""
    return {
        "parameters": parameters(model),
        "stored_bytes": stored_bytes(model),
        "flops": flops(model, image_size),
    }
