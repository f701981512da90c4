"""Monocular depth by a linear head over depth bins (arXiv 2512.19941, appendix on probes; DINOv2's protocol)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import datasets
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import BaseImageProcessor, PreTrainedModel

from ..images import decode_image, load_image_processor
from ..teachers import load_vision_model
from .dense import DenseArguments, DenseHead, padding, read_map

# What data sets call the column of their depth maps; the copies of NYUv2 among them.
COLUMNS = ("depth", "depth_map", "depths", "depth_maps")
# Metres in each unit that is in circulation.
UNITS = {"m": 1.0, "mm": 1e-3, "8bit_10m": 10 / 255}
MIN_DEPTH = 1e-3
# The rows and columns of 480 x 640 pixels that NYUv2 is measured on (Eigen et al., arXiv 1406.2283).
EIGEN_CROP = (45, 471, 41, 601)
# Maps from which the unit is found.
SAMPLED = 16


@dataclass(kw_only=True)
class DepthArguments(DenseArguments):
    """Flags of `eval/depth.py`. Training's default to arXiv 2512.19941's on NYUv2."""

    image_size: int | None = field(
        default=None, metadata={"help": "Pixels of the images' shorter side. Default: as they are. They are padded."}
    )
    depth_unit: str | None = field(
        default=None,
        metadata={
            "help": "Unit of the depth maps: metres, millimetres, or 8 bits of which 255 are 10 m. Default: found "
            "from the numbers' type and range, where they leave no doubt.",
            "choices": list(UNITS),
        },
    )
    test_depth_unit: str | None = field(
        default=None, metadata={"help": "The same of the test split, if it is another one.", "choices": list(UNITS)}
    )
    max_depth: float = field(default=10.0, metadata={"help": "Metres; depth beyond counts as unknown."})
    num_bins: int = field(default=256, metadata={"help": "Depth bins, uniform up to max_depth."})
    eval_crop: str = field(
        default="eigen",
        metadata={
            "help": "Part of the depth maps that is measured on: NYUv2's, or all.",
            "choices": ["eigen", "none"],
        },
    )
    weight_decay: float = field(default=1e-3, metadata={"help": "AdamW's weight decay."})
    num_train_epochs: int = field(default=25, metadata={"help": "Epochs of training the head."})
    train_batch_size: int = field(default=128, metadata={"help": "Images a training step."})

    def __post_init__(self):
        super().__post_init__()
        if self.num_bins < 2:
            raise ValueError(f"num_bins must be at least 2, got {self.num_bins}.")
        if self.max_depth <= MIN_DEPTH:
            raise ValueError(f"max_depth must be above {MIN_DEPTH} m, got {self.max_depth}.")

    def load_model(self) -> tuple[PreTrainedModel, BaseImageProcessor]:
        """The frozen model, on the GPU if there is one, and its image processor. Images are padded to the patch."""
        model = load_vision_model(self.model, trust_remote_code=self.trust_remote_code, token_layout=self.token_layout)
        return model.to("cuda" if torch.cuda.is_available() else "cpu"), load_image_processor(self.model)


@dataclass
class Sample:
    """Rows of a data set: the (height, width) that their images have, and their maps."""

    image_size: tuple[int, int]
    maps: list[np.ndarray]


def sample_rows(dataset: datasets.Dataset) -> Sample:
    """
    `SAMPLED` rows, spread over a data set of columns `image` and `map`.

    Raises:
        ValueError: if the images differ in size, or a row has no map of one channel.
    """
    rows = dataset.select(sorted(set(np.linspace(0, len(dataset) - 1, SAMPLED).astype(int).tolist())))
    sizes = {decode_image(row["image"]).size[::-1] for row in rows}
    if len(sizes) > 1:
        raise ValueError(f"Images must all have one size, but there are {sorted(sizes)} (height, width).")
    return Sample(sizes.pop(), [read_map(row["map"]) for row in rows])


def common_size(sizes: Sequence[tuple[int, int]], shorter: int | None = None) -> tuple[int, int]:
    """
    The (height, width) that the images of several splits are resized to: that of the first, its shorter side brought
    to `shorter` pixels.

    Raises:
        ValueError: if the splits' images differ in shape by more than a hundredth.
    """
    height, width = sizes[0]
    for other_height, other_width in sizes[1:]:
        if abs(height * other_width / (width * other_height) - 1) > 0.01:
            raise ValueError(
                f"Images of the splits differ in shape, {height} x {width} and {other_height} x {other_width}: use "
                "splits of one camera."
            )
    scale = shorter / min(height, width) if shorter else 1.0
    return round(height * scale), round(width * scale)


def find_depth_unit(maps: Sequence[np.ndarray], stated: str | None = None, max_depth: float = 10.0) -> dict:
    """
    The unit of depth maps: as stated, if the numbers allow it, or as their type and range tell. Metres are taken for
    fractional numbers that reach beyond 1 and not beyond 20, around at least 0.3; millimetres for numbers of at most
    10,000 around at least 300. Nothing tells what 8 bits stand for, so that their unit must be stated.

    Args:
        maps: depth maps as they are stored.
        stated: one of `UNITS`.
        max_depth: metres.

    Returns:
        `unit`, whether it was `stated` or `found`, and the evidence: `dtype`, `median` and `maximum` of the numbers
        that are finite and above 0, and the number of `maps`.

    Raises:
        ValueError: if the numbers leave doubt and nothing is stated, or they contradict what is.
    """
    dtype = np.result_type(*(values.dtype for values in maps))
    values = np.concatenate([values[np.isfinite(values) & (values > 0)].ravel() for values in maps]).astype(np.float64)
    # The highest number of 16 bits often stands for an unknown depth.
    values = values[values != 65535]
    if not values.size:
        raise ValueError("No depth is above 0: check --label_column.")
    median, highest = float(np.median(values)), float(values.max())
    numbers = f"{dtype} numbers up to {highest:.4g}, around {median:.4g}"
    if stated is not None:
        metres = values * UNITS[stated]
        if (stated == "8bit_10m" and highest > 255) or not ((metres >= MIN_DEPTH) & (metres <= max_depth)).any():
            raise ValueError(
                f"Depth can't be in {stated}: it has {numbers}, so no depth of {MIN_DEPTH} to {max_depth:g} m or more "
                "than 8 bits. State another --depth_unit, or --test_depth_unit for the test split."
            )
        unit = stated
    elif dtype != np.uint8 and np.issubdtype(dtype, np.floating) and 1 < highest <= 20 and median >= 0.3:
        unit = "m"
    elif dtype != np.uint8 and highest <= 10_000 and median >= 300:
        unit = "mm"
    else:
        raise ValueError(
            f"The unit of depth can't be told from {numbers}: state it by --depth_unit (m, mm, or 8bit_10m if 255 is "
            "10 m) and, if the test split has another, --test_depth_unit."
        )
    found = "found" if stated is None else "stated"
    return {"unit": unit, "by": found, "dtype": str(dtype), "median": median, "maximum": highest, "maps": len(maps)}


def read_depth(value, unit: str, max_depth: float = 10.0) -> np.ndarray:
    """
    A depth map as a data set stores it, in metres, float32 (height, width). What is not a number from `MIN_DEPTH` to
    `max_depth` is unknown: NaN.
    """
    depth = read_map(value).astype(np.float32) * np.float32(UNITS[unit])
    return np.where((depth >= MIN_DEPTH) & (depth <= max_depth), depth, np.float32(np.nan))


def eigen_crop(height: int, width: int) -> tuple[slice, slice]:
    """
    The rows and columns that NYUv2 is measured on: 45:471 and 41:601 of 480 x 640 pixels, in proportion for other
    sizes of that shape.

    Raises:
        ValueError: for another shape.
    """
    if abs(height * 4 - width * 3) > 4:
        raise ValueError(
            f"The Eigen crop is defined on 480 x 640 pixels, and depth maps of {height} x {width} have another shape: "
            "use --eval_crop none."
        )
    top, bottom, left, right = (round(edge * height / 480) for edge in EIGEN_CROP)
    return slice(top, bottom), slice(left, right)


class DepthBinsHead(DenseHead):
    """
    Each patch token with the cls token beside it, scaled up four times bilinearly, and a 1 x 1 convolution to uniform
    depth bins. Depth is the expectation over the bins. Without a cls token (`use_cls=False`) patch tokens stand alone.

    Args:
        hidden_size: width of the tokens.
        num_bins: depth bins; their depths go in equal steps from `MIN_DEPTH` to `max_depth`.
        max_depth: metres.
        use_cls: whether the model has a cls token.
        image_size: height and width of the images, which are padded to a multiple of `multiple_of`, the patch.
    """

    upscale = 4

    def __init__(
        self,
        hidden_size: int,
        num_bins: int = 256,
        max_depth: float = 10.0,
        use_cls: bool = True,
        image_size: Sequence[int] = (480, 640),
        multiple_of: Sequence[int] = (14, 14),
    ):
        super().__init__()
        self.settings = {
            "hidden_size": hidden_size,
            "num_bins": num_bins,
            "max_depth": max_depth,
            "use_cls": use_cls,
            "image_size": list(image_size),
            "multiple_of": list(multiple_of),
        }
        self.image_size, self.padding = tuple(image_size), padding(image_size, multiple_of)
        self.classifier = nn.Conv2d(hidden_size * (2 if use_cls else 1), num_bins, kernel_size=1)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)
        self.register_buffer("bins", torch.linspace(MIN_DEPTH, max_depth, num_bins), persistent=False)

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        """
        Args:
            features: `patch` (batch, grid height, grid width, hidden_size) and `cls` (batch, hidden_size), after the
                final LayerNorm.

        Returns:
            Logits (batch, num_bins, 4 grid height, 4 grid width).
        """
        tokens = features["patch"]
        if self.settings["use_cls"]:
            tokens = torch.cat([tokens, features["cls"][:, None, None].expand_as(tokens)], dim=-1)
        # A 1 x 1 convolution and a bilinear scaling commute, and there are fewer bins than features.
        logits = self.classifier(tokens.movedim(-1, 1))
        return F.interpolate(logits, scale_factor=self.upscale, mode="bilinear", align_corners=False)

    def depth(self, logits: torch.Tensor) -> torch.Tensor:
        """Expected depth in metres, without the padding: (batch, *image_size)."""
        depth = torch.einsum("bnhw,n->bhw", logits.softmax(dim=1), self.bins)
        left, right, top, bottom = self.padding
        height, width = self.image_size
        padded = (height + top + bottom, width + left + right)
        depth = F.interpolate(depth[:, None], size=padded, mode="bilinear", align_corners=False)[:, 0]
        return depth[:, top : top + height, left : left + width]

    def loss(self, features: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        """
        10 times the scale-invariant log loss plus the cross-entropy of the bins, on pixels whose true depth, `target`
        (batch, *image_size) in metres, is not NaN. The bins are compared on the head's own grid, each of its points
        with the nearest pixel.
        """
        logits = self(features)
        loss = 10 * scale_invariant_log_loss(self.depth(logits), target)
        padded = F.pad(target[:, None], self.padding, value=torch.nan)
        coarse = F.interpolate(padded, size=logits.shape[-2:], mode="nearest-exact")[:, 0]
        known = ~coarse.isnan()
        if not known.any():
            return loss
        step = self.bins[1] - self.bins[0]
        nearest = ((coarse[known] - MIN_DEPTH) / step).round().long().clamp(0, len(self.bins) - 1)
        return loss + F.cross_entropy(logits.movedim(1, -1)[known], nearest)

    def predict(self, features: dict[str, torch.Tensor], size: tuple[int, int]) -> torch.Tensor:
        """Depth in metres (batch, *size), scaled bilinearly where maps have another size than their images."""
        depth = self.depth(self(features))
        return F.interpolate(depth[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]


def scale_invariant_log_loss(depth: torch.Tensor, target: torch.Tensor, variance_weight: float = 0.85) -> torch.Tensor:
    """
    sqrt(mean(g^2) - variance_weight * mean(g)^2) with g = log depth - log target, over the pixels whose target is not
    NaN; 0 if there is none (Eigen et al., arXiv 1406.2283, with the root that arXiv 1907.10326 takes).

    Args:
        depth, target: metres, above 0, of one shape.
    """
    known = ~target.isnan()
    if not known.any():
        return depth.sum() * 0.0
    g = depth[known].log() - target[known].log()
    # The root has no gradient at 0.
    return (g.square().mean() - variance_weight * g.mean().square()).clamp_min(1e-12).sqrt()
