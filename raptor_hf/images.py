"""Images: from a data set on the Hub or on disk to pixel values."""

import io
import itertools
import json
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pyarrow.compute as pc
import torch
from datasets.fingerprint import Hasher
from PIL import Image
from transformers import AutoImageProcessor, BaseImageProcessor, BitImageProcessorPil
from transformers.utils import IMAGE_PROCESSOR_NAME

from .augmentation import trivial_augment
from .digits import load_digits_dataset
from .photographs import load_photographs_dataset

# What loads each, and its splits.
EMBEDDED = {
    "digits": (load_digits_dataset, ["train", "validation", "test"]),
    "photographs": (load_photographs_dataset, ["test"]),
}
CROP_RATIO = (3 / 4, 4 / 3)
# Resizing the short side of a longer strip to that of a crop would take any amount of memory.
MAX_ASPECT_RATIO = 100
# Where so many rows in a row can't be read, it isn't single images that are bad.
MAX_REPLACEMENTS = 100
# Of a file that is opened. Of the largest image that may be decoded the pixels take some 700 MB.
MAX_FILE_BYTES = 2**30
REPORT_BYTES = 120
# How `datasets` names a file of a streamed folder, or in an archive there.
STREAMED_FROM_HUB = re.compile(r"^((zip|tar|gzip)://[^:]*::)?hf://datasets/[^:]*$")
# So many bad images are named.
NAMED_IMAGES = 5
# Those that Pillow decodes itself: PostScript, for one, it hands to an interpreter.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "MPO", "JPEG2000", "AVIF", "TGA", "ICO", "HEIF")


class BadImageError(ValueError):
    """An image that can't be read, or holds nothing that can be learnt from."""


def load_image_dataset(
    name_or_path: str, split: str = "train", streaming: bool = False, image_column: str | None = None
) -> datasets.Dataset | datasets.IterableDataset:
    """
    A split of an image data set, its image column renamed to `image` and decoded on access.

    Args:
        name_or_path: an embedded one (`"digits"`, `"photographs"`), a Hub name, a folder of images or of parquet
            files, a parquet file, or a folder that `save_to_disk` wrote.
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
        if name_or_path in EMBEDDED:
            dataset = EMBEDDED[name_or_path][0](split)
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
    dataset = _with_image_column(dataset, image_column)
    if isinstance(dataset, datasets.Dataset):
        _tell_files_apart(dataset)
    return dataset


def split_names(name_or_path: str) -> list[str]:
    """
    The splits of a data set. A parquet file, and a folder that `save_to_disk` wrote of one split, have `train` alone.

    Raises:
        ValueError: if there is no such data set.
    """
    path = Path(name_or_path)
    with _as_value_error(f"Data set {name_or_path} can't be loaded"):
        if name_or_path in EMBEDDED:
            return EMBEDDED[name_or_path][1]
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
    rows = [{"image": _with_streamed_bytes(row["image"])} for row in _undecoded(stream).take(count)]
    # What has neither bytes nor path can't be stored: no image, and so a bad one.
    rows = [row if row["image"] and any(row["image"].values()) else {"image": None} for row in rows]
    return datasets.Dataset.from_list(rows, features=datasets.Features({"image": datasets.Image()}))


def _with_image_column(dataset, column: str | None):
    features = dataset.features or next(iter(dataset.take(1)), {})
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
    if dataset.features and isinstance(dataset.features["image"], datasets.Array3D):
        dataset = _with_encoded_arrays(dataset)
    return dataset.cast_column("image", datasets.Image())


def _tell_files_apart(dataset: datasets.Dataset):
    """Lets the fingerprint, by which what is computed of a data set is found again, tell of the files that rows name."""
    column = dataset.data.column("image")
    named = column.filter(pc.is_null(pc.struct_field(column, "bytes")))
    paths = [Path(path) for path in pc.struct_field(named, "path").drop_null().to_pylist()]
    states = []
    for path in paths:
        with suppress(OSError, ValueError):
            state = path.stat()
            states.append((str(path), state.st_mtime_ns, state.st_size))
    if paths:
        dataset._fingerprint = Hasher.hash((dataset._fingerprint, states))


def _with_encoded_arrays(dataset: datasets.Dataset) -> datasets.Dataset:
    """A data set whose `image` holds numbers, channels first or last, from 0 to 1 or to 255, with images in place."""

    dtype = dataset.features["image"].dtype

    def encode(row):
        if row["image"] is None:
            return row
        pixels = np.asarray(row["image"], dtype=dtype)
        if not np.isfinite(pixels).all():
            # No image, and so a bad one.
            return {"image": None}
        pixels = pixels.transpose(1, 2, 0) if pixels.shape[0] in (1, 3) else pixels
        if np.issubdtype(pixels.dtype, np.floating):
            pixels = pixels * 255 if pixels.max() <= 1 else pixels
            pixels = pixels.round().clip(0, 255)
        return {"image": Image.fromarray(pixels.astype(np.uint8).squeeze())}

    features = datasets.Features({"image": datasets.Image()})
    if isinstance(dataset, datasets.IterableDataset):
        # Of a stream's columns nothing but images is used.
        return dataset.select_columns("image").map(encode, features=features)
    images = dataset.select_columns("image").with_format("numpy").map(encode, features=features).with_format(None)
    rest = dataset.remove_columns("image")
    return datasets.concatenate_datasets([rest, images], axis=1) if rest.column_names else images


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
    if crop_size(processor) < 1:
        raise ValueError(f"it makes images of {crop_size(processor)} pixels")
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
    crop = processor.crop_size if getattr(processor, "do_center_crop", False) else processor.size
    return crop["height"] if "height" in crop else crop["shortest_edge"]


def decode_image(value: dict | Image.Image | None) -> Image.Image:
    """
    An image as 8-bit RGB.

    Args:
        value: `{"bytes": ..., "path": ...}`, as data sets store a file, or a decoded image.

    Raises:
        BadImageError: if it is missing, of no known format, cut short, a decompression bomb (more pixels than
            `PIL.Image.MAX_IMAGE_PIXELS`), a strip of more than `MAX_ASPECT_RATIO`, or has pixels that aren't finite.
    """
    image = open_image(value)
    if max(image.size) > MAX_ASPECT_RATIO * min(image.size):
        raise BadImageError(f"a strip of {image.width} x {image.height} pixels")
    with _as_bad_image():
        return to_rgb(image)


def open_image(value: dict | Image.Image | None) -> Image.Image:
    """The same of an image whose mode stays, such as a map of labels or of depth."""
    if value is None:
        raise BadImageError("no image")
    with _as_bad_image(), warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return value if isinstance(value, Image.Image) else _open_image(value)


@contextmanager
def _as_bad_image():
    try:
        yield
    except (BadImageError, MemoryError):
        raise
    # A decoder raises whatever a broken file leads it to.
    except Exception as error:
        # Without the addresses of objects and the folders of files.
        reason = re.sub(r"\s*(<[^>]*>|'[^']*[\\/][^']*')", "", str(error)).strip()
        raise BadImageError(reason.splitlines()[0] if reason else type(error).__name__) from error


def _open_image(value: dict) -> Image.Image:
    content, path = value["bytes"], value["path"]
    if content is None and path is not None:
        # A row of a parquet file could name any address, device or pipe.
        if ":" in path and not Path(path).is_file():
            raise BadImageError("an address in place of an image")
        if Path(path).exists() and not Path(path).is_file():
            raise BadImageError("no file in place of an image")
        if Path(path).stat().st_size > MAX_FILE_BYTES:
            raise BadImageError(f"a file of {Path(path).stat().st_size:,} bytes")
        content = Path(path).read_bytes()
    if content is not None:
        Image.init()
        # Refuses a file by its first bytes, before anything else of it is read.
        Image.open(io.BytesIO(content), formats=[name for name in IMAGE_FORMATS if name in Image.OPEN])
    return datasets.Image().decode_example({"bytes": content, "path": path})


def _with_streamed_bytes(value: dict | None) -> dict | None:
    """A row of a stream with the content of its file, where that lies on the Hub. A bad image stays as it is."""
    if value is None or value["bytes"] is not None or not STREAMED_FROM_HUB.match(value["path"] or ""):
        return value
    with suppress(OSError), fsspec.open(value["path"], "rb") as file:
        return {"bytes": file.read(MAX_FILE_BYTES), "path": value["path"]}
    return value


def without_bad_images(dataset: datasets.Dataset) -> tuple[datasets.Dataset, list[str]]:
    """
    The rows of a data set whose `image` can be read, and what the others are called and suffer from. What was found
    is kept in the data set's cache, as far as it has one on disk.

    Raises:
        ValueError: if there is none that can be read.
    """
    checked = _undecoded(dataset).map(_fault, with_indices=True, remove_columns="image", desc="Checking images")
    faults = list(checked["fault"])
    good = [index for index, fault in enumerate(faults) if not fault]
    if not good:
        raise ValueError(f"None of {len(faults)} images can be read ({faults[0]}): give another data set or column.")
    return (dataset.select(good) if len(good) < len(faults) else dataset), [fault for fault in faults if fault]


def draw_images(dataset: datasets.Dataset, count: int, seed: int) -> tuple[datasets.Dataset, list[str]]:
    """`count` rows of a data set at random (all, where there are fewer), less the bad: see [`without_bad_images`]."""
    order = np.random.default_rng(seed).permutation(len(dataset))
    return without_bad_images(dataset.select(order[:count]))


def count_bad_images(bad: dict[str, list[str]]) -> dict:
    """For results: how many of each split couldn't be read, and the `first` few, by name and fault."""
    names = [name for split in bad.values() for name in split]
    return {split: len(names) for split, names in bad.items()} | {"first": names[:NAMED_IMAGES]}


def _fault(row: dict, index: int) -> dict[str, str]:
    try:
        decode_image(row["image"])
    except BadImageError as error:
        return {"fault": _bad_image(row["image"], index, error)}
    return {"fault": ""}


def _undecoded(dataset):
    return dataset.select_columns("image").cast_column("image", datasets.Image(decode=False))


def _bad_image(value, index: int, error: BadImageError) -> str:
    name = Path(value["path"]).name if value and value["path"] else f"row {index}"
    return f"{name}: {error}"


def _report(bad: list[str]) -> dict[str, torch.Tensor]:
    """
    What was passed over for one row: how many images, and the first of them as UTF-8. Tensors, since those are what
    loaders, workers and processes hand on.
    """
    text = bad[0].encode()[:REPORT_BYTES] if bad else b""
    padded = torch.tensor(list(text.ljust(REPORT_BYTES, b"\0")), dtype=torch.uint8)
    return {"bad_images": torch.tensor(len(bad)), "bad_image": padded}


def read_report(batch: dict[str, torch.Tensor]) -> list[str]:
    """The images that were passed over for a batch, one for each row that lacks one, by name and fault."""
    reports = [bytes(row.tolist()) for row in batch["bad_image"]]
    return [text.rstrip(b"\0").decode(errors="ignore") for text in reports if text.strip(b"\0")]


def to_rgb(image: Image.Image) -> Image.Image:
    """
    An image of any PIL mode (grey, palette, alpha, CMYK, 16 bit, float in 0..1 or 0..255) as 8-bit RGB.

    Raises:
        BadImageError: if a pixel is not finite.
    """
    if image.mode == "RGB":
        return image
    if image.mode.startswith(("I", "F")):
        # PIL clips these modes to 255 rather than scaling them.
        pixels = np.asarray(image, dtype=np.float32)
        if not np.isfinite(pixels).all():
            raise BadImageError("a pixel that is not finite")
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

    Args:
        augment_ratio: share of the crops that [`trivial_augment`] alters.
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


class PixelValues(torch.utils.data.Dataset):
    """
    Rows of a data set as `{"pixel_values": (channels, height, width)}`. Index `epoch * len + i` is row i in that
    epoch: what is random of it depends on the seed and on that index alone, so a resumed run sees the same crops.

    Args:
        replace_bad: whether another row takes the place of one whose image can't be read, drawn by the seed and the
            index. Rows then also have `bad_images` and `bad_image`, see [`read_report`]. By default such a row
            raises a `BadImageError`.
    """

    def __init__(self, dataset: datasets.Dataset, transform, seed: int = 0, replace_bad: bool = False):
        self.dataset, self.transform, self.seed = _undecoded(dataset), transform, seed
        self.replace_bad = replace_bad

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row, bad = index % len(self), []
        draw = np.random.default_rng((self.seed, index, 1))
        for _ in range(MAX_REPLACEMENTS):
            value = self.dataset[row]["image"]
            try:
                pixels = self.transform(decode_image(value), np.random.default_rng((self.seed, index)))
                # Rows that were drawn are counted when their own turn comes.
                return {"pixel_values": pixels} | (_report(bad[:1]) if self.replace_bad else {})
            except BadImageError as error:
                bad.append(_bad_image(value, row, error))
            if not self.replace_bad:
                raise BadImageError(f"An image can't be read ({bad[0]}): mend it, or take it out of the data set.")
            row = int(draw.integers(len(self)))
        raise _too_many_in_a_row(bad[-1])


class StreamedPixelValues(torch.utils.data.IterableDataset):
    """
    The same of a stream, without an end: epoch after epoch, each shuffled anew within a buffer. As one long pass it
    can be resumed by passing over what was seen. The next image takes the place of one that can't be read.
    """

    def __init__(self, dataset: datasets.IterableDataset, transform, seed: int = 0, buffer_size: int = 1000):
        self.dataset, self.buffer_size = _undecoded(dataset), buffer_size
        self.transform, self.seed = transform, seed

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        index, bad = 0, []
        for epoch in itertools.count():
            # Not `set_epoch`: workers share that, and the first to begin an epoch would set it for all.
            shuffled = self.dataset.shuffle(seed=self.seed + epoch, buffer_size=self.buffer_size)
            position = None
            for position, row in enumerate(shuffled):
                rng = np.random.default_rng((self.seed, worker.id if worker else 0, index))
                value = _with_streamed_bytes(row["image"])
                try:
                    pixels = self.transform(decode_image(value), rng)
                except BadImageError as error:
                    bad.append(_bad_image(value, position, error))
                    if len(bad) == MAX_REPLACEMENTS:
                        raise _too_many_in_a_row(bad[-1]) from error
                    continue
                yield {"pixel_values": pixels} | _report(bad)
                bad = []
                index += 1
            if position is None:
                return


def _too_many_in_a_row(last: str) -> BadImageError:
    return BadImageError(
        f"{MAX_REPLACEMENTS} images in a row can't be read, the last of them {last}: are the data what they should be?"
    )


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
