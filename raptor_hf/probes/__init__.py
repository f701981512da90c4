"""Probes: what a frozen backbone's features tell, measured with little on top of them."""

from .arguments import EvalArguments
from .features import FeatureStore, compute_features

__all__ = ["EvalArguments", "FeatureStore", "compute_features"]
