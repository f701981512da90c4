"""Tiny teachers and images, made on the spot."""

import numpy as np
import torch
from PIL import Image
from transformers import Dinov2Config, Dinov2Model, Dinov2WithRegistersConfig, Dinov2WithRegistersModel


def tiny_teacher(registers: int = 0, layers: int = 6, seed: int = 0):
    """A random DINOv2 model, 16 wide, for 28-pixel images of 4 patches, with layers that differ."""
    torch.manual_seed(seed)
    settings = dict(
        hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, image_size=28, patch_size=14, mlp_ratio=2
    )
    if registers:
        config = Dinov2WithRegistersConfig(**settings, num_register_tokens=registers)
        model = Dinov2WithRegistersModel(config)
    else:
        model = Dinov2Model(Dinov2Config(**settings))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval().requires_grad_(False)


def picture(seed: int, size: tuple[int, int] = (40, 32), mode: str = "RGB") -> Image.Image:
    """A smooth random picture of (width, height) pixels."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode)
