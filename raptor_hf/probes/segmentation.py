"""Semantic segmentation by a linear head on patch tokens (arXiv 2512.19941, appendix on probes; DINOv2's protocol)."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from matplotlib.colors import hsv_to_rgb, to_rgb
from torch import nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from ..plots import COLORS
from .dense import DenseArguments, DenseHead, open_map, read_map

# What data sets call the column of their label maps; scene_parse_150, ADE20K and NYUv2 among them.
COLUMNS = ("annotation", "annotations", "segmentation", "segmentations", "mask", "label", "labels", "label_map")
# Of pixels that take no part, in the label maps that are read here.
IGNORED = -1


@dataclass(kw_only=True)
class SegmentationArguments(DenseArguments):
    """Flags of `eval/segmentation.py`. Training's default to arXiv 2512.19941's on ADE20K."""

    num_labels: int | None = field(
        default=None, metadata={"help": "Number of classes. Default: the highest label of all maps, plus one."}
    )
    do_reduce_labels: bool = field(
        default=False,
        metadata={
            "help": "Whether label 0 is ignored and the others are shifted down by one, as on ADE20K.",
            "aliases": ["--reduce_labels"],
        },
    )
    ignore_index: int = field(default=255, metadata={"help": "Label, as stored, of pixels that take no part."})
    crop_scale: list[float] = field(
        default_factory=lambda: [0.5, 1.0], metadata={"help": "paper: area share of the random crops."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.num_labels is not None and self.num_labels < 2:
            raise ValueError(f"num_labels must be at least 2, got {self.num_labels}.")
        if len(self.crop_scale) != 2 or not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(f"crop_scale must be two shares, 0 < low <= high <= 1, got {self.crop_scale}.")


def read_labels(value, ignore_index: int = 255, reduce_labels: bool = False) -> np.ndarray:
    """
    A label map as a data set stores it. Of a list of maps (the whole objects of ADE20K, then their parts) the first is
    taken; there, colours are ADE20K's code, in which the class is red // 10 * 256 + green and 0 is unlabelled.

    Args:
        value: an image, an array or a list of images.
        ignore_index: label, as stored, of pixels that take no part, as are those of negative labels.
        reduce_labels: whether label 0 is ignored too and the others are shifted down by one.

    Returns:
        (height, width) integers, `IGNORED` or from 0.

    Raises:
        ValueError: if there is no map, it has other colours, or it holds fractions.
    """
    coded, value = False, open_map(value)
    if isinstance(value, list) and value and hasattr(value[0], "getbands"):
        value = value[0]
        coded = value.mode == "RGB"
    if coded:
        red, green, _ = np.asarray(value, dtype=np.int64).transpose(2, 0, 1)
        labels = red // 10 * 256 + green
    else:
        labels = read_map(value)
        if np.issubdtype(labels.dtype, np.floating) and (labels % 1).any():
            raise ValueError("A label map holds fractions: name the column of the class indices (--label_column).")
        labels = labels.astype(np.int64)
        labels[labels == ignore_index] = IGNORED
    if reduce_labels:
        labels = np.where(labels > 0, labels - 1, IGNORED)
    return np.maximum(labels, IGNORED)


def find_num_labels(label_maps: Iterable[np.ndarray], total: int | None = None) -> int:
    """
    The highest label plus one, from all label maps as [`read_labels`] gives them.

    Raises:
        ValueError: if fewer than two classes occur.
    """
    seen = set()
    for labels in tqdm(label_maps, desc="Labels", unit="map", total=total):
        seen.update(np.unique(labels).tolist())
    seen.discard(IGNORED)
    if len(seen) < 2:
        raise ValueError(
            f"Label maps hold {len(seen)} classes beside what is ignored: check --label_column, --ignore_index (masks "
            "of 0 and 255 need another, such as -1) and --do_reduce_labels."
        )
    return max(seen) + 1


class LinearSegmentationHead(DenseHead):
    """
    One linear layer on patch tokens, its logits scaled up bilinearly.

    Args:
        hidden_size: width of the tokens.
        num_labels: number of classes.
    """

    def __init__(self, hidden_size: int, num_labels: int):
        super().__init__()
        self.settings = {"hidden_size": hidden_size, "num_labels": num_labels}
        self.classifier = nn.Linear(hidden_size, num_labels)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, features: dict[str, torch.Tensor], size: tuple[int, int]) -> torch.Tensor:
        """
        Args:
            features: `patch` (batch, grid height, grid width, hidden_size), after the final LayerNorm.
            size: height and width of the label maps.

        Returns:
            Logits (batch, num_labels, height, width).
        """
        logits = self.classifier(features["patch"]).movedim(-1, 1)
        return F.interpolate(logits, size=size, mode="bilinear", align_corners=False)

    def loss(self, features: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        """
        Cross-entropy over the pixels whose `target`, (batch, height, width), is not `IGNORED`; 0 where all are.

        Raises:
            ValueError: if a label is not below `num_labels`.
        """
        num_labels = self.settings["num_labels"]
        if target.max() >= num_labels:
            raise ValueError(f"Label {target.max()} occurs, but there are {num_labels} classes: give --num_labels.")
        logits = self(features, target.shape[-2:])
        known = (target != IGNORED).sum().clamp_min(1)
        return F.cross_entropy(logits, target.long(), ignore_index=IGNORED, reduction="sum") / known

    def predict(self, features: dict[str, torch.Tensor], size: tuple[int, int]) -> torch.Tensor:
        """Labels (batch, height, width)."""
        return self(features, size).argmax(dim=1)


def label_colors(labels: np.ndarray) -> np.ndarray:
    """Labels (height, width) as colours (height, width, 3) from 0 to 1; ignored pixels are white."""
    # Hues a golden section apart, so that near labels differ.
    count = max(int(labels.max()) + 1, 2)
    palette = hsv_to_rgb([((i * 0.618034) % 1, 0.75, 0.9) for i in range(count)])
    for i, name in enumerate(("0.3", COLORS["cls"], COLORS["patch"], COLORS["register"])[:count]):
        palette[i] = to_rgb(name)
    return np.where((labels == IGNORED)[..., None], 1.0, palette[np.maximum(labels, 0)])
