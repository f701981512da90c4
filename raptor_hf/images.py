"""Images: from a data set on the Hub or on disk to pixel values."""

import itertools
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, BaseImageProcessor, BitImageProcessorPil

from .digits import load_digits_dataset

CROP_RATIO = (3 / 4, 4 / 3)


def load_image_dataset(
    name_or_path: str, split: str = "train", streaming: bool = False, image_column: str | None = None
) -> datasets.Dataset | datasets.IterableDataset:
    """
    A split of an image data set, its image column renamed to `image` and decoded on access.

    Args:
        name_or_path: `"digits"` (scikit-learn's, embedded), a Hub name, a folder of images or of parquet files, a
            parquet file, or a folder that `save_to_disk` wrote.
        split: one of [`split_names`].
        streaming: whether rows are read as they are needed, without a copy on disk.
        image_column: the column's name; found if there is only one that holds images.

    Raises:
        ValueError: if there is no such data set, split or column.
    """
    path = Path(name_or_path)
    names = split_names(name_or_path)
    if re.split(r"[\[+]", split)[0] not in names:
        raise ValueError(f"Data set {name_or_path} has no split {split}: it has {', '.join(names)}.")
    with _as_value_error(f"Data set {name_or_path}, split {split}, can't be loaded"):
        if name_or_path == "digits":
            dataset = load_digits_dataset(split)
        elif (path / "dataset_dict.json").is_file():
            dataset = datasets.load_from_disk(path)[split]
        elif (path / "state.json").is_file():
            dataset = datasets.load_from_disk(path)
        elif path.suffix == ".parquet":
            dataset = datasets.load_dataset("parquet", data_files=str(path), split=split)
        else:
            dataset = datasets.load_dataset(name_or_path, split=split, streaming=streaming)
    if streaming and isinstance(dataset, datasets.Dataset):
        dataset = dataset.to_iterable_dataset(num_shards=min(16, max(1, len(dataset))))
    if isinstance(dataset, datasets.Dataset) and len(dataset) == 0:
        raise ValueError(f"Data set {name_or_path}, split {split}, is empty.")
    return _with_image_column(dataset, image_column)


def split_names(name_or_path: str) -> list[str]:
    """
    The splits of a data set. A parquet file, and a folder that `save_to_disk` wrote of one split, have `train` alone.

    Raises:
        ValueError: if there is no such data set.
    """
    path = Path(name_or_path)
    with _as_value_error(f"Data set {name_or_path} can't be loaded"):
        if name_or_path == "digits":
            return ["train", "validation", "test"]
        if (path / "dataset_dict.json").is_file():
            return json.loads((path / "dataset_dict.json").read_text())["splits"]
        if (path / "state.json").is_file() or path.suffix == ".parquet":
            return ["train"]
        return datasets.get_dataset_split_names(name_or_path)


@contextmanager
def _as_value_error(message: str):
    """Whatever the library raises on data that isn't there, as a ValueError of one line."""
    try:
        yield
    except (OSError, KeyError, IndexError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{message} ({str(error).strip().splitlines()[0]}).") from error


def take_images(stream: datasets.IterableDataset, count: int) -> datasets.Dataset:
    """The first `count` images of a stream, as their files' bytes, in memory."""
    rows = list(stream.select_columns("image").cast_column("image", datasets.Image(decode=False)).take(count))
    return datasets.Dataset.from_list(rows, features=datasets.Features({"image": datasets.Image()}))


def _with_image_column(dataset, column: str | None):
    features = dataset.features or next(iter(dataset.take(1)))
    if column is None:
        found = [name for name, feature in features.items() if _holds_images(feature)]
        if len(found) != 1:
            raise ValueError(
                f"The data set has {len(found)} image columns among {', '.join(features)}: name one with "
                "--image_column."
            )
        column = found[0]
    elif column not in features:
        raise ValueError(f"The data set has no column {column}: --image_column must be one of {', '.join(features)}.")
    if column != "image":
        if "image" in features:
            dataset = dataset.remove_columns("image")
        dataset = dataset.rename_column(column, "image")
    return dataset.cast_column("image", datasets.Image())


def _holds_images(feature) -> bool:
    if isinstance(feature, dict):
        return "bytes" in feature
    return isinstance(feature, datasets.Image) or getattr(feature, "dtype", None) == "binary"


def load_image_processor(name_or_path: str, image_size: int | None = None) -> BaseImageProcessor:
    """
    A model's image processor; DINOv2's own (resize to 8/7 bicubic, centre crop, ImageNet's mean and deviation)
    where the model brings none.

    Args:
        name_or_path: a Hub name or a folder.
        image_size: pixels of the centre crop; by default the processor's own.
    """
    try:
        processor = AutoImageProcessor.from_pretrained(name_or_path)
    except (OSError, ValueError):
        processor = BitImageProcessorPil(
            size={"shortest_edge": 256},
            image_mean=[0.485, 0.456, 0.406],
            image_std=[0.229, 0.224, 0.225],
        )
    if image_size is not None and crop_size(processor) != image_size:
        square = {"height": image_size, "width": image_size}
        if "height" in processor.size:
            processor.size = square
        else:
            scale = processor.size["shortest_edge"] / crop_size(processor)
            processor.size = {"shortest_edge": round(image_size * scale)}
            processor.do_center_crop = True
        processor.crop_size = square
    return processor


def crop_size(processor: BaseImageProcessor) -> int:
    """Height, in pixels, of the images that a processor makes."""
    crop = processor.crop_size if getattr(processor, "do_center_crop", False) else processor.size
    return crop["height"] if "height" in crop else crop["shortest_edge"]


def to_rgb(image: Image.Image) -> Image.Image:
    """An image of any PIL mode (grey, palette, alpha, CMYK, 16 bit, float in 0..1 or 0..255) as 8-bit RGB."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith(("I", "F")):
        # PIL clips these modes to 255 rather than scaling them.
        pixels = np.asarray(image, dtype=np.float32)
        highest = pixels.max(initial=0.0)
        full_scale = 1.0 if image.mode == "F" and highest <= 1.0 else 255.0 if highest <= 255 else 65535.0
        image = Image.fromarray((pixels * (255.0 / full_scale)).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


class CenterCrop:
    """The image processor's own way: resize, centre crop, normalise. Row -> (channels, height, width)."""

    def __init__(self, processor: BaseImageProcessor):
        self.processor = processor

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> torch.Tensor:
        return self.processor(to_rgb(image), return_tensors="pt")["pixel_values"][0]


class RandomResizedCrop:
    """
    A random crop of a share `scale` of the area at an aspect ratio of `CROP_RATIO`, resized bicubically to a square,
    flipped half the time, normalised as the image processor does. Image -> (channels, image_size, image_size).
    """

    def __init__(self, processor: BaseImageProcessor, image_size: int, scale=(0.25, 1.0), flip: bool = True):
        self.image_size, self.scale = image_size, scale
        self.flip = flip
        self.mean = torch.tensor(processor.image_mean).view(-1, 1, 1)
        self.std = torch.tensor(processor.image_std).view(-1, 1, 1)

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> torch.Tensor:
        image = to_rgb(image)
        width, height = image.size
        area = width * height * rng.uniform(*self.scale)
        ratio = math.exp(rng.uniform(*(math.log(edge) for edge in CROP_RATIO)))
        crop_width, crop_height = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
        left, top = rng.uniform(0, width - crop_width), rng.uniform(0, height - crop_height)
        box = (left, top, left + crop_width, top + crop_height)
        size = (self.image_size, self.image_size)
        image = image.resize(size, Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
        if self.flip and rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return (pixels - self.mean) / self.std


def check_crop_scale(scale):
    """Raises ValueError unless `scale` is two area shares, 0 < low <= high <= 1."""
    if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
        raise ValueError(f"crop_scale must be two shares, 0 < low <= high <= 1, got {scale}.")


class PixelValues(torch.utils.data.Dataset):
    """
    Rows of a data set as `{"pixel_values": (channels, height, width)}`. Index `epoch * len + i` is row i in that
    epoch: what is random of it depends on the seed and on that index alone, so a resumed run sees the same crops.
    """

    def __init__(self, dataset: datasets.Dataset, transform, seed: int = 0):
        self.dataset, self.transform, self.seed = dataset.select_columns("image"), transform, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image = self.dataset[index % len(self)]["image"]
        return {"pixel_values": self.transform(image, np.random.default_rng((self.seed, index)))}


class StreamedPixelValues(torch.utils.data.IterableDataset):
    """
    The same of a stream, without an end: epoch after epoch, each shuffled anew within a buffer. As one long pass it
    can be resumed by passing over what was seen.
    """

    def __init__(self, dataset: datasets.IterableDataset, transform, seed: int = 0, buffer_size: int = 1000):
        self.dataset = dataset.select_columns("image").shuffle(seed=seed, buffer_size=buffer_size)
        self.transform, self.seed = transform, seed

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        index = 0
        for epoch in itertools.count():
            self.dataset.set_epoch(epoch)
            before = index
            for row in self.dataset:
                rng = np.random.default_rng((self.seed, worker.id if worker else 0, index))
                yield {"pixel_values": self.transform(row["image"], rng)}
                index += 1
            if index == before:
                return


class EpochSampler(torch.utils.data.Sampler):
    """
    Indices `epoch * size + i` for [`PixelValues`], in an order that the seed and the epoch alone decide.

    Args:
        size: rows of the data set.
        current_epoch: called when an epoch begins, to tell its number.
        multiple_of: what doesn't fill so many is left out of an epoch: the global batch, so that an epoch has the same
            steps however a batch is split.
    """

    def __init__(self, size: int, seed: int, current_epoch, multiple_of: int = 1):
        self.size, self.seed, self.current_epoch, self.multiple_of = size, seed, current_epoch, multiple_of

    def __len__(self) -> int:
        return self.size // self.multiple_of * self.multiple_of

    def __iter__(self) -> Iterator[int]:
        epoch = self.current_epoch()
        order = np.random.default_rng((self.seed, epoch)).permutation(self.size)[: len(self)]
        return iter((epoch * self.size + order).tolist())
