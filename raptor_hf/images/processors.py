"""Image processors: a model's own, at the size that is asked for."""

import math
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoImageProcessor, BaseImageProcessor, BitImageProcessorPil
from transformers.utils import IMAGE_PROCESSOR_NAME


def load_image_processor(name_or_path: str, image_size: int | None = None) -> BaseImageProcessor:
    """
    A model's image processor; DINOv2's own (resize to 8/7 bicubic, centre crop, ImageNet's mean and deviation)
    where the model brings none.

    Args:
        name_or_path: a Hub name or a folder.
        image_size: pixels of the centre crop; by default the processor's own.

    Raises:
        ValueError: if the model brings one that is damaged, or such images would have more pixels than may be opened.
    """
    if image_size is not None and image_size**2 > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise ValueError(
            f"image_size {image_size} is more than the {math.isqrt(Image.MAX_IMAGE_PIXELS)} pixels of the largest "
            "image that is opened: give a smaller one."
        )
    file = Path(name_or_path) / IMAGE_PROCESSOR_NAME
    try:
        processor = _of_images(AutoImageProcessor.from_pretrained(name_or_path))
        _check_image_processor(processor)
    # A damaged file leads the library to errors of any kind.
    except Exception as error:
        if file.is_file() or not isinstance(error, (OSError, ValueError)):
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"The image processor in {file} can't be used ({reason}): mend or remove it.") from error
        processor = BitImageProcessorPil(
            size={"shortest_edge": 256},
            image_mean=[0.485, 0.456, 0.406],
            image_std=[0.229, 0.224, 0.225],
        )
    if image_size is not None and (crop_size(processor) != image_size or not _makes_squares(processor)):
        square = {"height": image_size, "width": image_size}
        if "height" in processor.size:
            processor.size = square
        else:
            scale = processor.size["shortest_edge"] / crop_size(processor)
            processor.size = {"shortest_edge": round(image_size * scale)}
            processor.do_center_crop = True
        processor.crop_size = square
    if not _makes_squares(processor):
        raise ValueError(
            f"The image processor of {name_or_path} makes images that are not square ({dict(_made(processor))}): give "
            "--image_size."
        )
    return processor


def _of_images(processor: BaseImageProcessor) -> BaseImageProcessor:
    """SigLIP 2's makes patches of an image's own shape; models here take images and cut them themselves."""
    if not getattr(processor, "max_num_patches", None):
        return processor
    side = processor.patch_size * math.isqrt(processor.max_num_patches)
    return BitImageProcessorPil(
        size={"shortest_edge": side},
        crop_size={"height": side, "width": side},
        image_mean=processor.image_mean,
        image_std=processor.image_std,
    )


def _check_image_processor(processor: BaseImageProcessor):
    if _made(processor) is not processor.size and "height" not in processor.crop_size:
        raise ValueError(f"its crop_size {dict(processor.crop_size)} has no height and width")
    sides = [*dict(processor.size).values(), *dict(_made(processor)).values()]
    if min(sides) < 1 or max(sides) ** 2 > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise ValueError(f"it makes images of {max(sides)} pixels")
    mean, std = (torch.tensor(values, dtype=torch.float) for values in (processor.image_mean, processor.image_std))
    factor = processor.rescale_factor if processor.do_rescale else 1.0
    black, white = ((level * factor - mean) / std for level in (0, 255))
    if mean.numel() != 3 or std.numel() != 3 or not (white > black).all() or not (white - black).isfinite().all():
        raise ValueError(
            f"it normalises by rescale_factor {factor}, mean {processor.image_mean} and deviation "
            f"{processor.image_std}"
        )


def crop_size(processor: BaseImageProcessor) -> int:
    """Height, in pixels, of the images that a processor makes."""
    made = _made(processor)
    return made["height"] if "height" in made else made["shortest_edge"]


def _made(processor: BaseImageProcessor):
    """What a processor says of the size of the images that it makes."""
    return processor.crop_size if getattr(processor, "do_center_crop", False) else processor.size


def _makes_squares(processor: BaseImageProcessor) -> bool:
    return _made(processor).get("height") == _made(processor).get("width")
