"""Images that can't be read: sorted out, counted and named."""

from pathlib import Path

import datasets
import numpy as np
import torch

from .decoding import BadImageError, decode_image

# So many bad images are named.
NAMED_IMAGES = 5
REPORT_BYTES = 120


def without_bad_images(dataset: datasets.Dataset) -> tuple[datasets.Dataset, list[str]]:
    """
    The rows of a data set whose `image` can be read, and what the others are called and suffer from. What was found
    is kept in the data set's cache, as far as it has one on disk.

    Raises:
        ValueError: if there is none that can be read.
    """
    checked = undecoded(dataset).map(_fault, with_indices=True, remove_columns="image", desc="Checking images")
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
        return {"fault": bad_image_text(row["image"], index, error)}
    return {"fault": ""}


def undecoded(dataset):
    return dataset.select_columns("image").cast_column("image", datasets.Image(decode=False))


def bad_image_text(value, index: int, error: BadImageError) -> str:
    name = Path(value["path"]).name if value and value["path"] else f"row {index}"
    return f"{name}: {error}"


def report(bad: list[str]) -> dict[str, torch.Tensor]:
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
