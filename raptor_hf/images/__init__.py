"""Images: from a data set on the Hub or on disk to pixel values."""

from .bad_images import NAMED_IMAGES, count_bad_images, draw_images, read_report, without_bad_images
from .crops import CenterCrop, RandomResizedCrop, check_crop_scale, normalized_pixels, random_box
from .decoding import BadImageError, decode_image, open_image, to_rgb
from .processors import crop_size, load_image_processor
from .rows import EpochSampler, PixelValues, StreamedPixelValues
from .sources import load_image_dataset, split_names, take_images

__all__ = [
    "NAMED_IMAGES",
    "BadImageError",
    "CenterCrop",
    "EpochSampler",
    "PixelValues",
    "RandomResizedCrop",
    "StreamedPixelValues",
    "check_crop_scale",
    "count_bad_images",
    "crop_size",
    "decode_image",
    "draw_images",
    "load_image_dataset",
    "load_image_processor",
    "normalized_pixels",
    "open_image",
    "random_box",
    "read_report",
    "split_names",
    "take_images",
    "to_rgb",
    "without_bad_images",
]
