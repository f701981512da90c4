"""Features of a frozen backbone: computed once, kept on disk, found again by every probe."""

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import datasets
import torch
from datasets.fingerprint import Hasher
from huggingface_hub.constants import HF_HOME
from safetensors import safe_open
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..configuration_raptor import as_pair
from ..files import is_whole_safetensors, write_safetensors
from ..images import PixelValues
from ..teachers import token_slices

# Raised when what is stored changes its meaning.
VERSION = 1
# Images a file, and the precision: dense features are a thousand times larger.
KINDS = {"pooled": (1024, torch.float32), "dense": (64, torch.float16)}


def check_image_size(config, height: int, width: int | None = None):
    """Raises ValueError if the images' sides are not multiples of the model's patch."""
    for side, patch in zip((height, width or height), as_pair(config.patch_size, "patch_size")):
        if side % patch or side < patch:
            near = max(1, round(side / patch)) * patch
            raise ValueError(
                f"Images of {side} pixels don't divide into patches of {patch}: use a multiple, --image_size {near} "
                "for one."
            )


class FeatureStore(torch.utils.data.Dataset):
    """
    Features on disk, one item an image, in the data set's order. For a `DataLoader`, or whole by [`tensor`].

    Items of kind `"pooled"`: `cls` (hidden_size,) and `patch_mean` (hidden_size,), float32. Of kind `"dense"`: `cls`
    (hidden_size,) and `patch` (grid height, grid width, hidden_size), float16. All are of `last_hidden_state`, which
    DINOv2 and Raptor give after the final LayerNorm; `cls` is missing where the model has no such token.
    """

    def __init__(self, files: list[Path], images_per_file: int, num_images: int):
        self.files, self.images_per_file, self.num_images = files, images_per_file, num_images

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        file, row = divmod(index % len(self), self.images_per_file)
        with safe_open(self.files[file], framework="pt") as tensors:
            return {name: tensors.get_slice(name)[row] for name in tensors.keys()}  # noqa: SIM118

    def tensor(self, name: str) -> torch.Tensor:
        """One feature of all images, (images, ...). Raises ValueError if the model has none of that name."""
        parts = []
        for path in self.files:
            with safe_open(path, framework="pt") as tensors:
                if name not in tensors.keys():  # noqa: SIM118
                    raise ValueError(f"The model gives no {name} feature: it has {', '.join(tensors.keys())}.")
                parts.append(tensors.get_tensor(name))
        return torch.cat(parts)


def compute_features(
    model: PreTrainedModel,
    dataset: datasets.Dataset,
    transform: Callable,
    kind: str = "pooled",
    batch_size: int = 32,
    num_workers: int = 0,
    cache_dir: str | Path | None = None,
) -> FeatureStore:
    """
    Features of every image of a data set, from disk where they were computed before. They are found again by the
    model's weights and configuration, the data set's fingerprint, the transform and the kind. Files appear whole or
    not at all, so an interrupted run goes on where it stopped.

    Args:
        model: a frozen backbone in evaluation mode, on the device to be used.
        dataset: images in the column `image`.
        transform: `transform(image, rng)` -> (channels, height, width), without randomness, as
            [`raptor_hf.images.CenterCrop`] is. Its attributes (image processor, sizes) are part of the key.
        kind: `"pooled"` or `"dense"`, see [`FeatureStore`].
        batch_size: images a forward pass.
        num_workers: processes that decode images.
        cache_dir: default `raptor_hf/features` in the Hugging Face cache.

    Raises:
        ValueError: if the image size doesn't fit the model's patches, the features don't fit on the disk, or are not
            finite.
    """
    size, dtype = KINDS[kind]
    images = PixelValues(dataset, transform)
    folder = Path(cache_dir or Path(HF_HOME) / "raptor_hf" / "features")
    folder /= feature_key(model, images.dataset, transform, kind)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"feature_cache {folder} can't be made ({error.strerror}): give another folder.") from error
    rows = [range(start, min(start + size, len(images))) for start in range(0, len(images), size)]
    files = [folder / f"{index:05d}.safetensors" for index in range(len(rows))]
    missing = [index for index, path in enumerate(files) if not is_whole_safetensors(path)]
    # Batches that end where a file ends.
    batches = {i: [rows[i][j : j + batch_size] for j in range(0, len(rows[i]), batch_size)] for i in missing}
    loader = DataLoader(images, batch_sampler=list(itertools.chain(*batches.values())), num_workers=num_workers)
    loader = iter(loader)
    total = sum(len(rows[i]) for i in missing)
    with tqdm(total=total, desc="Features", unit="image", disable=not missing) as progress:
        for index in missing:
            parts = []
            for _ in batches[index]:
                pixel_values = next(loader)["pixel_values"].to(model.device)
                features = forward_features(model, pixel_values, kind)
                features = {name: tensor.to("cpu", dtype) for name, tensor in features.items()}
                if not all(tensor.isfinite().all() for tensor in features.values()):
                    raise ValueError(
                        "The model's features are not finite: its weights, or its image processor, are not sound."
                    )
                parts.append(features)
                if progress.n == 0:
                    _check_disk(folder, parts[0], total)
                progress.update(len(pixel_values))
            write_safetensors(files[index], {name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    return FeatureStore(files, size, len(images))


@torch.no_grad()
def forward_features(
    model: PreTrainedModel, pixel_values: torch.Tensor, kind: str = "pooled"
) -> dict[str, torch.Tensor]:
    """
    Features of a batch by one forward pass, without gradients: as the items of a [`FeatureStore`], with a batch
    dimension before them.

    Args:
        pixel_values: (batch, channels, height, width).

    Raises:
        ValueError: if height and width aren't multiples of the model's patch.
    """
    height, width = pixel_values.shape[-2:]
    check_image_size(model.config, height, width)
    tokens = model(pixel_values).last_hidden_state
    slices = token_slices(model.config)
    if kind == "pooled":
        return pool_tokens(tokens, slices)
    patches = tokens[:, slices["patch"]]
    features = {"cls": tokens[:, 0]} if "cls" in slices else {}
    patch_height, patch_width = as_pair(model.config.patch_size)
    return features | {"patch": patches.unflatten(1, (height // patch_height, width // patch_width))}


def pool_tokens(tokens: torch.Tensor, slices: dict[str, slice]) -> dict[str, torch.Tensor]:
    """`cls`, if there is one, and `patch_mean`, (batch, hidden_size) each, of tokens (batch, tokens, hidden_size)."""
    features = {"cls": tokens[:, 0]} if "cls" in slices else {}
    return features | {"patch_mean": tokens[:, slices["patch"]].mean(dim=1)}


def feature_key(model: PreTrainedModel, dataset: datasets.Dataset, transform: Callable, kind: str) -> str:
    """Name of the folder where these features are kept."""
    digest = hashlib.sha256()
    # What saving and loading changes, or has no part in features.
    ignored = ["_name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "id2label", "label2id"]
    config = {key: value for key, value in model.config.to_dict().items() if key not in ignored}
    parts = [VERSION, kind, type(model).__name__, config, dataset._fingerprint, Hasher.hash(transform)]
    digest.update(json.dumps(parts, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


def _check_disk(folder: Path, part: dict[str, torch.Tensor], num_images: int):
    needed = num_images * sum(tensor[0].numel() * tensor.element_size() for tensor in part.values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"Features would take {needed / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB free: use another "
            "--feature_cache, a smaller --image_size or --max_samples."
        )
