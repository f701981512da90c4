"""Rows of a data set as pixel values, and the order in which they come."""

import itertools
from collections.abc import Iterator

import datasets
import numpy as np
import torch

from .bad_images import bad_image_text, report, undecoded
from .decoding import BadImageError, decode_image
from .sources import with_streamed_bytes

# Where so many rows in a row can't be read, it isn't single images that are bad.
MAX_REPLACEMENTS = 100


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
        self.dataset, self.transform, self.seed = undecoded(dataset), transform, seed
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
                return {"pixel_values": pixels} | (report(bad[:1]) if self.replace_bad else {})
            except BadImageError as error:
                bad.append(bad_image_text(value, row, error))
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
        self.dataset, self.buffer_size = undecoded(dataset), buffer_size
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
                value = with_streamed_bytes(row["image"])
                try:
                    pixels = self.transform(decode_image(value), rng)
                except BadImageError as error:
                    bad.append(bad_image_text(value, position, error))
                    if len(bad) == MAX_REPLACEMENTS:
                        raise _too_many_in_a_row(bad[-1]) from error
                    continue
                yield {"pixel_values": pixels} | report(bad)
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
