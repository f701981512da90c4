"""From an image to pixel values: the image processor's centre crop, and random crops."""

import math

import numpy as np
import torch
from PIL import Image
from transformers import BaseImageProcessor

from .augmentation import trivial_augment
from .decoding import to_rgb

CROP_RATIO = (3 / 4, 4 / 3)


class CenterCrop:
    """The image processor's own way: resize, centre crop, normalise. Image -> (channels, height, width), float32."""

    def __init__(self, processor: BaseImageProcessor):
        self.processor = processor

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> torch.Tensor:
        return self.processor(to_rgb(image), return_tensors="pt")["pixel_values"][0]


class RandomResizedCrop:
    """
    A random crop of a share `scale` of the area at an aspect ratio of `CROP_RATIO`, resized bicubically to a square,
    flipped half the time, normalised as the image processor does. Image -> (channels, image_size, image_size).

    Args:
        processor: whose mean and standard deviation pixels are normalised by.
        image_size: side of the crops, in pixels.
        scale: lowest and highest share of the area, in 0..1.
        flip: whether half the crops are mirrored.
        augment_ratio: share of the crops that [`trivial_augment`] alters, in 0..1.

    Raises:
        ValueError: if the image processor doesn't take pixels of 0..1 and normalise them.
    """

    def __init__(
        self,
        processor: BaseImageProcessor,
        image_size: int,
        scale=(0.25, 1.0),
        flip: bool = True,
        augment_ratio: float = 0.0,
    ):
        for name, expected in (("do_rescale", True), ("do_normalize", True), ("rescale_factor", 1 / 255)):
            value = getattr(processor, name, expected)
            if value is None or abs(value - expected) > 1e-6:
                raise ValueError(
                    f"The image processor's {name} is {value}, but random crops are normalised from pixels in 0..1: "
                    f"make it {expected}, or train on its own crops, --crop center."
                )
        self.image_size, self.scale = image_size, scale
        self.flip, self.augment_ratio = flip, augment_ratio
        self.mean, self.std = processor.image_mean, processor.image_std

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> torch.Tensor:
        image = to_rgb(image)
        box = random_box(*image.size, self.scale, rng)
        size = (self.image_size, self.image_size)
        image = image.resize(size, Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
        if self.flip and rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.augment_ratio and rng.random() < self.augment_ratio:
            image = trivial_augment(image, rng)
        return normalized_pixels(image, self.mean, self.std)


def random_box(width: int, height: int, scale, rng: np.random.Generator) -> tuple[float, float, float, float]:
    """
    (left, top, right, bottom) of a random crop, in pixels: a share `scale` (low, high) of the area at an aspect ratio
    of `CROP_RATIO`, within the image.
    """
    area = width * height * rng.uniform(*scale)
    ratio = math.exp(rng.uniform(*(math.log(edge) for edge in CROP_RATIO)))
    crop_width, crop_height = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, top = rng.uniform(0, width - crop_width), rng.uniform(0, height - crop_height)
    return left, top, left + crop_width, top + crop_height


def normalized_pixels(image: Image.Image, mean, std) -> torch.Tensor:
    """An 8-bit RGB image as (3, height, width), less the channels' `mean` and over their `std`, of pixels in 0..1."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 - mean) / std


def check_crop_scale(scale):
    """Raises ValueError unless `scale` is two area shares, 0 < low <= high <= 1."""
    if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
        raise ValueError(f"crop_scale must be two shares, 0 < low <= high <= 1, got {scale}.")
