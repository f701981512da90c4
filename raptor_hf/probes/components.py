"""Patch features as colours: what a model tells apart, seen without any training on top of it."""

import numpy as np
import torch
from sklearn.decomposition import PCA


class ComponentColors:
    """
    Colours by the first three principal components of patch features: red, green and blue. Fitted once and applied to
    the features of several models, the same colour means the same direction in all of them.

    Args:
        features: (..., hidden_size), at least 3 of them.

    Raises:
        ValueError: if there are fewer.

    Attributes:
        explained: share of the features' variance that each component explains, (3,).
    """

    def __init__(self, features: torch.Tensor):
        flat = features.reshape(-1, features.shape[-1]).double().cpu().numpy()
        if min(flat.shape) < 3:
            raise ValueError(f"{len(flat)} patches of width {flat.shape[1]} have no 3 components: take larger images.")
        self.pca = PCA(3, svd_solver="full").fit(flat)
        self.explained = self.pca.explained_variance_ratio_
        # But for a few extreme patches the whole range of a colour is used.
        self.low, self.high = np.percentile(self.pca.transform(flat), [1, 99], axis=0)

    def __call__(self, features: torch.Tensor) -> np.ndarray:
        """(..., hidden_size) -> (..., 3), from 0 to 1."""
        flat = features.reshape(-1, features.shape[-1]).double().cpu().numpy()
        colors = (self.pca.transform(flat) - self.low) / np.maximum(self.high - self.low, 1e-12)
        return colors.clip(0, 1).reshape(*features.shape[:-1], 3)
