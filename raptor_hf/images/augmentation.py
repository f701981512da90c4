"""TrivialAugment: one random operation at a random strength for each image (arXiv 2103.10158)."""

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps


def trivial_augment(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """
    An 8-bit RGB image after one of `OPERATIONS`, of the same size. A teacher sees the same image as the Raptor, so
    what an operation leaves of a picture need not look like a photograph: it only has to be something new.
    """
    operation = list(OPERATIONS.values())[rng.integers(len(OPERATIONS))]
    strength, sign = rng.uniform(), rng.choice((-1, 1))
    fill = tuple(rng.integers(256, size=3).tolist())
    return operation(image, strength, sign, fill)


def _enhanced(enhancer):
    return lambda image, strength, sign, fill: enhancer(image).enhance(1 + 0.9 * sign * strength)


def _sheared(image, fill, matrix):
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=fill)


def _shrunk(image, scale, fill):
    """A small picture in the middle of a plain one, as cut-out objects are shown."""
    small = image.resize([max(1, round(scale * side)) for side in image.size], Image.Resampling.BICUBIC)
    plain = Image.new("RGB", image.size, fill)
    plain.paste(small, [(outer - inner) // 2 for outer, inner in zip(image.size, small.size)])
    return plain


# Each takes an image, a strength in 0..1, a sign, and the colour of what an image doesn't cover.
OPERATIONS = {
    "identity": lambda image, strength, sign, fill: image,
    "auto_contrast": lambda image, strength, sign, fill: ImageOps.autocontrast(image),
    "equalize": lambda image, strength, sign, fill: ImageOps.equalize(image),
    "grayscale": lambda image, strength, sign, fill: image.convert("L").convert("RGB"),
    "invert": lambda image, strength, sign, fill: ImageOps.invert(image),
    "posterize": lambda image, strength, sign, fill: ImageOps.posterize(image, 8 - round(6 * strength)),
    "solarize": lambda image, strength, sign, fill: ImageOps.solarize(image, round(256 * (1 - strength))),
    "blur": lambda image, strength, sign, fill: image.filter(ImageFilter.GaussianBlur(3 * strength)),
    "color": _enhanced(ImageEnhance.Color),
    "contrast": _enhanced(ImageEnhance.Contrast),
    "brightness": _enhanced(ImageEnhance.Brightness),
    "sharpness": _enhanced(ImageEnhance.Sharpness),
    "rotate": lambda image, strength, sign, fill: image.rotate(
        sign * 135 * strength, Image.Resampling.BILINEAR, fillcolor=fill
    ),
    "shear_x": lambda image, strength, sign, fill: _sheared(image, fill, (1, sign * strength, 0, 0, 1, 0)),
    "shear_y": lambda image, strength, sign, fill: _sheared(image, fill, (1, 0, 0, sign * strength, 1, 0)),
    "shrink": lambda image, strength, sign, fill: _shrunk(image, 1 - 0.7 * strength, fill),
}
