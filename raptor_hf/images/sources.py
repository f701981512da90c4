"""Image data sets: on the Hub, on disk, embedded."""

import json
import re
from contextlib import contextmanager, suppress
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pyarrow.compute as pc
from datasets.fingerprint import Hasher
from PIL import Image

from ..digits import load_digits_dataset
from .bad_images import undecoded
from .decoding import MAX_FILE_BYTES
from .photographs import load_photographs_dataset

# What loads each, and its splits.
EMBEDDED = {
    "digits": (load_digits_dataset, ["train", "validation", "test"]),
    "photographs": (load_photographs_dataset, ["test"]),
}
# How `datasets` names a file of a streamed folder, or in an archive there.
STREAMED_FROM_HUB = re.compile(r"^((zip|tar|gzip)://[^:]*::)?hf://datasets/[^:]*$")


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
    # The fingerprint of a folder of images tells of its files already.
    if isinstance(dataset, datasets.Dataset) and dataset.info.builder_name != "imagefolder":
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
    rows = [{"image": with_streamed_bytes(row["image"])} for row in undecoded(stream).take(count)]
    # What has neither bytes nor path can't be stored: no image, and so a bad one.
    rows = [row if row["image"] and any(row["image"].values()) else {"image": None} for row in rows]
    return datasets.Dataset.from_list(rows, features=datasets.Features({"image": datasets.Image()}))


def with_streamed_bytes(value: dict | None) -> dict | None:
    """A row of a stream with the content of its file, where that lies on the Hub. A bad image stays as it is."""
    if value is None or value["bytes"] is not None or not STREAMED_FROM_HUB.match(value["path"] or ""):
        return value
    # A file system raises whatever its library does.
    with suppress(Exception), fsspec.open(value["path"], "rb") as file:
        return {"bytes": file.read(MAX_FILE_BYTES), "path": value["path"]}
    return value


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
    """Lets the fingerprint, by which what was computed of a data set is found again, tell of files that rows name."""
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
