"""What the dense probes share: maps beside images, crops and padding of both, and how a head is trained and kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate
from tqdm.auto import tqdm
from transformers import BaseImageProcessor, PreTrainedModel

from ..files import read_json, write_json, write_safetensors
from ..images import BadImageError, decode_image, normalized_pixels, open_image, random_box
from ..plots import STYLE
from .arguments import EvalArguments
from .features import FeatureStore, compute_features, forward_features

# Images in a figure.
SHOWN = 4


@dataclass(kw_only=True)
class DenseArguments(EvalArguments):
    """Flags of the scripts that predict a map for each image."""

    test_split: str = field(default="validation", metadata={"help": "Split that is measured on."})
    image_column: str = field(default="image", metadata={"help": "Column of the images."})
    label_column: str | None = field(default=None, metadata={"help": "Column of the true maps; found by its name."})
    protocol: str = field(
        default="fast",
        metadata={"help": "fast: on stored features. paper: arXiv 2512.19941's.", "choices": ["fast", "paper"]},
    )
    learning_rate: float = field(default=1e-3, metadata={"help": "AdamW's learning rate."})
    weight_decay: float = field(default=1e-2, metadata={"help": "AdamW's weight decay."})
    num_train_epochs: int = field(default=10, metadata={"help": "Epochs of training the head."})
    train_batch_size: int = field(default=32, metadata={"help": "Images a training step."})

    def __post_init__(self):
        super().__post_init__()
        for name in ("learning_rate", "num_train_epochs", "train_batch_size"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}.")

    def features(self, model: PreTrainedModel, split: datasets.Dataset, framing: "Framing") -> FeatureStore:
        """The stored features of a split; [`compute_features`] says what it raises."""
        return compute_features(
            model, split, framing, "dense", self.batch_size, self.dataloader_num_workers, self.feature_cache
        )


def with_map_column(dataset: datasets.Dataset, column: str | None, names: Sequence[str]) -> datasets.Dataset:
    """
    A data set of the columns `image` and `map` alone.

    Args:
        dataset: images in the column `image`.
        column: the column of the maps: images, lists of images, or arrays. By default the one that is called as
            `names` say or, if there is none, the only one that holds any.
        names: what data sets call it.

    Raises:
        ValueError: if there is no such column, or more than one.
    """
    features = dataset.features
    found = [name for name, feature in features.items() if name != "image" and _holds_maps(feature)]
    if column is None:
        candidates = [name for name in found if name in names] or found
        if len(candidates) != 1:
            raise ValueError(
                f"The data set has {len(candidates)} columns that may hold the true maps "
                f"({', '.join(candidates) or 'none'}) among {', '.join(features)}: name one with --label_column."
            )
        column = candidates[0]
    elif column not in found:
        raise ValueError(
            f"Column {column} holds no maps: --label_column must be one of {', '.join(found) or 'none, here'}."
        )
    feature = features[column]
    dataset = dataset.select_columns(["image", column]).rename_column(column, "map")
    # Parquet files that other tools wrote don't say that these bytes are images.
    if isinstance(feature, datasets.List) and _holds_images(feature.feature):
        return dataset.cast_column("map", datasets.List(datasets.Image(decode=False)))
    return dataset.cast_column("map", datasets.Image(decode=False)) if _holds_images(feature) else dataset


def _holds_images(feature) -> bool:
    return isinstance(feature, datasets.Image) or (isinstance(feature, dict) and "bytes" in feature)


def _holds_maps(feature) -> bool:
    if isinstance(feature, datasets.List):
        inner = feature.feature
        return _holds_maps(inner) or (isinstance(inner, datasets.List) and isinstance(inner.feature, datasets.Value))
    return _holds_images(feature) or isinstance(feature, (datasets.Array2D, datasets.Array3D))


def open_map(value):
    """
    A stored map with its files, if it is of any, opened as images: an image, a list of images, or whatever it was.

    Raises:
        ValueError: if a file can't be read.
    """
    if isinstance(value, list) and value and isinstance(value[0], (dict, Image.Image)):
        return [open_map(one) for one in value]
    if not isinstance(value, (dict, Image.Image)):
        return value
    try:
        return open_image(value)
    except BadImageError as error:
        raise ValueError(f"A true map can't be read ({error}): mend it, or leave its row out.") from error


def read_map(value) -> np.ndarray:
    """
    A map as a data set stores it: an image (a palette's indices are taken, not its colours) or an array, (height,
    width), or (1, height, width), or (height, width, 3) with three equal channels. Returns (height, width).

    Raises:
        ValueError: if it is missing, can't be read, or has colours.
    """
    if value is None:
        raise ValueError("A row has no true map: use another split, or leave such rows out of the data set.")
    pixels = np.asarray(open_map(value))
    if pixels.ndim == 3 and pixels.shape[0] == 1:
        pixels = pixels[0]
    elif pixels.ndim == 3 and (pixels[..., 1:3] == pixels[..., :1]).all():
        pixels = pixels[..., 0]
    if pixels.ndim != 2:
        raise ValueError(
            f"A true map has the shape {pixels.shape}, with colours or more channels: name a column of maps of one "
            "channel with --label_column."
        )
    return pixels


@dataclass
class Framing:
    """
    How an image and its map are cut, scaled and padded together. As a transform of [`compute_features`] it takes an
    image to normalised pixel values, (3, height, width).

    Args:
        processor: gives the mean and the standard deviation that pixel values are normalised by.
        size: (height, width) that whatever was cut out is resized to; `None` leaves its size. Images are resized
            bicubically, maps to the nearest pixel.
        cut: `"square"`, the largest in the centre; `"random"`, a share `scale` of the area at an aspect ratio of
            `CROP_RATIO`, flipped half the time; `"none"`, the whole.
        scale: of random cuts.
        multiple_of: images are padded on all sides to a multiple of so many pixels, with the mean colour.
    """

    processor: BaseImageProcessor
    size: tuple[int, int] | None
    cut: str = "none"
    scale: tuple[float, float] = (0.5, 1.0)
    multiple_of: int | tuple[int, int] = 1

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> torch.Tensor:
        return self.pixel_values(self.frame(*image.size, rng)(image))

    def frame(self, width: int, height: int, rng: np.random.Generator) -> Callable[..., Image.Image]:
        """What cuts and resizes an image, or a map beside it, of this size."""
        left, top, right, bottom, flip = 0.0, 0.0, float(width), float(height), False
        if self.cut == "square":
            side = float(min(width, height))
            left, top = (width - side) / 2, (height - side) / 2
            right, bottom = left + side, top + side
        elif self.cut == "random":
            left, top, right, bottom = random_box(width, height, self.scale, rng)
            flip = rng.random() < 0.5
        box = (left / width, top / height, right / width, bottom / height)

        def apply(picture: Image.Image, resample=Image.Resampling.BICUBIC) -> Image.Image:
            # Relative, as maps may have another resolution than their image.
            edges = [share * (picture.width, picture.height)[i % 2] for i, share in enumerate(box)]
            size = self.size or (round(edges[3] - edges[1]), round(edges[2] - edges[0]))
            picture = picture.resize(size[::-1], resample, box=edges)
            return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else picture

        return apply

    def pixel_values(self, picture: Image.Image) -> torch.Tensor:
        """(3, height, width), normalised, then padded."""
        pixels = normalized_pixels(picture, self.processor.image_mean, self.processor.image_std)
        return F.pad(pixels, padding(pixels.shape[-2:], self.multiple_of))


def padding(size: tuple[int, int], multiple_of: int | tuple[int, int]) -> tuple[int, int, int, int]:
    """(left, right, top, bottom) that pad (height, width) to a multiple, alike on both sides, for `F.pad`."""
    multiples = (multiple_of, multiple_of) if isinstance(multiple_of, int) else multiple_of
    bottom, right = (-side % multiple for side, multiple in zip(size, multiples))
    return right // 2, right - right // 2, bottom // 2, bottom - bottom // 2


def resize_nearest(values: np.ndarray, frame: Callable[..., Image.Image]) -> np.ndarray:
    """A map, (height, width), as a frame cuts and resizes it: each pixel takes the nearest value."""
    values = values.astype(np.float32 if np.issubdtype(values.dtype, np.floating) else np.int32)
    return np.array(frame(Image.fromarray(values), Image.Resampling.NEAREST))


class Maps(Dataset):
    """
    Rows as `{"features" or "pixel_values": ..., "map": (height, width)}`.

    Args:
        dataset: columns `image` and `map`, see [`with_map_column`].
        read: what makes (height, width) of a row's map.
        framing: of the image.
        features: stored features of the images, in place of pixel values.
        frame_maps: whether the map is cut and resized as the image is; otherwise it stays as it is.
        seed: with the epoch and the row it decides what is random of a cut.
    """

    def __init__(self, dataset, read: Callable, framing: Framing, features=None, frame_maps: bool = True, seed=0):
        self.dataset = dataset.cast_column("image", datasets.Image(decode=False))
        self.read, self.framing, self.features = read, framing, features
        self.frame_maps, self.seed, self.epoch = frame_maps, seed, 0
        self._sizes = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        row = self.dataset[index]
        target = self.read(row["map"])
        item = dict(self.features[index]) if self.features is not None else {}
        if self.features is None:
            image = decode_image(row["image"])
            frame = self._frame(index, *image.size)
            item["pixel_values"] = self.framing.pixel_values(frame(image))
        else:
            if index not in self._sizes:
                self._sizes[index] = decode_image(row["image"]).size
            frame = self._frame(index, *self._sizes[index])
        if self.frame_maps:
            target = resize_nearest(target, frame)
        return item | {"map": torch.from_numpy(target)}

    def picture(self, index: int) -> Image.Image:
        """The image as it is cut, neither normalised nor padded."""
        image = decode_image(self.dataset[index]["image"])
        return self._frame(index, *image.size)(image)

    def _frame(self, index: int, width: int, height: int):
        return self.framing.frame(width, height, np.random.default_rng((self.seed, self.epoch, index)))


class DenseHead(nn.Module):
    """A head on the features of a frozen backbone. `settings` holds what its constructor was given."""

    def loss(self, features: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def predict(self, features: dict[str, torch.Tensor], size: tuple[int, int]) -> torch.Tensor:
        raise NotImplementedError

    def save(self, folder: str | Path, **context):
        """Writes `model.safetensors` and `config.json`; `context` is what a reader should know besides."""
        write_safetensors(Path(folder) / "model.safetensors", self.state_dict())
        write_json(Path(folder) / "config.json", {"head": type(self).__name__, "settings": self.settings, **context})

    @classmethod
    def load(cls, folder: str | Path) -> "DenseHead":
        """The head that `save` wrote. Raises ValueError if it is of another kind, OSError if there is none."""
        config = read_json(Path(folder) / "config.json")
        if config["head"] != cls.__name__:
            raise ValueError(f"{folder} holds a {config['head']}, not a {cls.__name__}.")
        head = cls(**config["settings"])
        head.load_state_dict(load_file(Path(folder) / "model.safetensors"))
        return head.eval()


def train_head(head: DenseHead, model: PreTrainedModel, maps: Maps, args: DenseArguments) -> list[float]:
    """
    Trains a head by AdamW at a constant learning rate, on the model's device.

    Returns:
        The mean loss of each epoch.

    Raises:
        ValueError: if the loss is not finite.
    """
    head.to(model.device).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    loader = DataLoader(
        maps,
        args.train_batch_size,
        shuffle=True,
        num_workers=args.dataloader_num_workers,
        # Workers that stay know the sizes of the images, but not the epoch, which only cuts of images ask for.
        persistent_workers=args.dataloader_num_workers > 0 and maps.features is not None,
        generator=torch.Generator().manual_seed(args.seed),
    )
    losses = []
    with tqdm(total=args.num_train_epochs * len(loader), desc="Head", unit="step") as progress:
        for epoch in range(args.num_train_epochs):
            maps.epoch, total = epoch, 0.0
            for batch in loader:
                features, target = _to_features(batch, model, args.batch_size)
                loss = head.loss(features, target.to(model.device))
                if not loss.isfinite():
                    raise ValueError("The loss is not finite: lower --learning_rate, and check the true maps.")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(target) / len(maps)
                progress.update()
            losses.append(total)
            progress.set_postfix(loss=f"{total:.4f}")
    return losses


@torch.no_grad()
def predict_maps(head: DenseHead, model: PreTrainedModel, maps: Maps, args: DenseArguments):
    """Yields a prediction and its truth, (height, width) each, for every image in order."""
    head.to(model.device).eval()
    loader = DataLoader(maps, args.batch_size, num_workers=args.dataloader_num_workers, collate_fn=_collate)
    with tqdm(total=len(maps), desc="Measure", unit="image") as progress:
        for batch in loader:
            features, targets = _to_features(batch, model, args.batch_size)
            for i, target in enumerate(targets):
                one = {name: feature[i : i + 1] for name, feature in features.items()}
                yield head.predict(one, tuple(target.shape))[0].cpu().numpy(), target.numpy()
                progress.update()


def _collate(rows: list[dict]) -> dict:
    # True maps may differ in size.
    maps = [row.pop("map") for row in rows]
    return default_collate(rows) | {"map": maps}


def _to_features(batch: dict, model: PreTrainedModel, batch_size: int):
    target = batch.pop("map")
    if "pixel_values" in batch:
        pixel_values = batch["pixel_values"].to(model.device)
        parts = [forward_features(model, part, "dense") for part in pixel_values.split(batch_size)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, target
    return {name: feature.to(model.device, torch.float32) for name, feature in batch.items()}, target


def shown_rows(count: int) -> set[int]:
    """Which of so many images a figure shows: the first, the last and some between."""
    return set(np.linspace(0, count - 1, SHOWN).astype(int).tolist())


def plot_maps(
    rows: Sequence[tuple], label: str | None = None, limits=None, titles=("picture", "truth", "prediction")
) -> Figure:
    """
    Pictures and maps side by side, a row for each image.

    Args:
        rows: (picture, map, ...). Maps are colours (height, width, 3) or numbers (height, width).
        label: of the numbers' colour bar.
        limits: lowest and highest number.
        titles: of the columns.
    """
    with mpl.rc_context(STYLE):
        heights = [2.2 * first.shape[0] / first.shape[1] for _, first, *_ in rows]
        right = 2.25 * len(titles)
        width, height = right + 0.05 + (0.9 if label else 0), sum(heights) + 0.3
        # Placed by hand: a constrained layout of so many panels takes seconds.
        figure = Figure(figsize=(width, height))
        place = {"left": 0.01, "right": right / width, "bottom": 0.01, "top": 1 - 0.25 / height, "wspace": 0.03}
        panels = figure.subplots(
            len(rows), len(titles), squeeze=False, height_ratios=heights, gridspec_kw=place | {"hspace": 0.04}
        )
        for axes, row in zip(panels, rows):
            for panel, values in zip(axes, row):
                scale = dict(zip(("vmin", "vmax"), limits or ()))
                drawn = panel.imshow(
                    values, interpolation="nearest", aspect="auto", **(scale if np.ndim(values) == 2 else {})
                )
                panel.set_axis_off()
        for panel, title in zip(panels[0], titles):
            panel.set_title(title)
        if label:
            figure.colorbar(drawn, cax=figure.add_axes(((right + 0.15) / width, 0.1, 0.15 / width, 0.8)), label=label)
    return figure
