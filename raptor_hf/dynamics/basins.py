"""Class-dependent angular basins: whether images of one class end in, and move to, directions of their own."""

import torch
from torch.nn.functional import normalize

from .moments import precise


def image_directions(states: torch.Tensor) -> torch.Tensor:
    """
    One direction for each image and layer: that of the mean of its tokens.

    Args:
        states: tokens of one type, (B, L + 1, T, D).

    Returns:
        Unit vectors, (B, L + 1, D), float64.
    """
    return normalize(precise(states).mean(2), dim=-1)


def as_classes(labels, count: int) -> torch.Tensor | None:
    """
    Classes of images, a tensor or a list of whole numbers, as a tensor on the CPU, (count,); None stays None.

    Raises:
        ValueError: if they are not so many whole numbers.
    """
    if labels is None:
        return None
    try:
        classes = torch.as_tensor(labels).cpu()
    except (TypeError, ValueError, RuntimeError):
        classes = torch.empty(0)
    if classes.shape != (count,) or classes.is_floating_point():
        raise ValueError(f"Labels must be a whole number for each of the {count} images.")
    return classes.long()


class AngularBasins:
    """
    Streaming cosines within and between classes, and the principal directions of where trajectories end.

    The mean over all pairs of images follows from the sums of their directions, so no pair is ever formed.

    Args:
        num_kept: the first so many images are kept, to be drawn.
    """

    def __init__(self, num_kept: int = 24):
        self.num_kept = num_kept
        self._sums: dict[int, torch.Tensor] = {}
        self._counts: dict[int, int] = {}
        self._kept, self._labels = [], []
        self._final, self._num_images, self._labelled = 0, 0, None

    def update(self, directions: torch.Tensor, labels: torch.Tensor | None = None):
        """
        Adds images: (B, L + 1, D) as [`image_directions`] gives them, and their classes (B,), if known.

        Raises:
            ValueError: if there are classes in one call and none in another, or they aren't whole numbers.
        """
        labels = as_classes(labels, len(directions))
        if self._labelled not in (None, labels is not None):
            raise ValueError("Labels must come with all images or with none.")
        self._labelled = labels is not None
        self._final = self._final + directions[:, -1].T @ directions[:, -1]
        self._num_images += len(directions)
        classes = torch.zeros(len(directions), dtype=torch.long) if labels is None else labels
        for label in classes.unique().tolist():
            members = directions[(classes == label).to(directions.device)]
            self._sums[label] = self._sums.get(label, 0) + members.sum(0)
            self._counts[label] = self._counts.get(label, 0) + len(members)
        missing = self.num_kept - len(self._labels)
        if missing > 0:
            # A copy: a view would hold the whole batch.
            self._kept.append(directions[:missing].cpu().clone())
            self._labels += classes[:missing].tolist()

    def compute(self) -> dict:
        """
        `within` and `between`: for each state 0..L the mean cosine of two images of one class, and of two classes;
        None without two such images. `classes` (None without labels) and `images`, their numbers.

        Raises:
            ValueError: if no images were added.
        """
        if self._num_images == 0:
            raise ValueError("Angular basins need at least one image.")
        counts = torch.tensor(list(self._counts.values()), dtype=torch.float64)
        sums = torch.stack(list(self._sums.values())).cpu()
        own = sums.square().sum(-1).sum(0)
        within_pairs = (counts * (counts - 1)).sum()
        between_pairs = counts.sum().square() - counts.square().sum()
        within = (own - counts.sum()) / within_pairs
        between = (sums.sum(0).square().sum(-1) - own) / between_pairs
        return {
            "images": self._num_images,
            "classes": len(counts) if self._labelled else None,
            "within": within.tolist() if within_pairs else None,
            "between": between.tolist() if between_pairs else None,
        }

    def projection(self) -> dict:
        """
        Trajectories in the two principal directions of the last states around their mean: `paths`, (n, L + 1, 2) of
        the kept images with their `labels`; `class_means`, label to (L + 1, 2); and `share`, what the two directions
        hold of the last states' variance.
        """
        total = torch.stack(list(self._sums.values())).sum(0).cpu() / self._num_images
        centre = total[-1]
        covariance = self._final.cpu() / self._num_images - torch.outer(centre, centre)
        variances, axes = torch.linalg.eigh(covariance)
        axes = axes[:, -2:].flip(1)
        # The sign of an axis is arbitrary: its largest part is made positive.
        axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
        means = {label: (total / self._counts[label]) for label, total in self._sums.items()}
        return {
            "paths": ((torch.cat(self._kept) - centre) @ axes).tolist(),
            "labels": self._labels,
            "class_means": {str(label): ((mean.cpu() - centre) @ axes).tolist() for label, mean in means.items()},
            "share": float(variances[-2:].sum() / variances.sum().clamp_min(torch.finfo(variances.dtype).tiny)),
        }
