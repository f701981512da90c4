"""Small statistics: where a value stands among others, and correlations with their uncertainty."""

from collections.abc import Sequence

import numpy as np
from scipy import stats


def describe(values: Sequence[float]) -> dict:
    """`n`, `mean`, sample standard deviation `std` (None of one value), `min` and `max`."""
    values = np.asarray(values, dtype=float)
    std = float(values.std(ddof=1)) if len(values) > 1 else None
    return {
        "n": len(values),
        "mean": float(values.mean()),
        "std": std,
        "min": float(values.min()),
        "max": float(values.max()),
    }


def permutation_p_value(observed: float, null: Sequence[float]) -> float:
    """
    The share of values at least as large as the observed one, itself counted among them: (1 + #{null >= observed}) /
    (1 + n). Its lowest value is 1 / (1 + n).
    """
    null = np.asarray(null, dtype=float)
    # A tie that rounding hides is one.
    return float((1 + np.count_nonzero(null >= observed - 1e-12)) / (1 + len(null)))


def correlation(x: Sequence[float], y: Sequence[float], confidence: float = 0.95) -> dict:
    """
    Pearson's correlation `r` of n points, `p` against none, and Fisher's confidence interval `low` to `high`. It is
    wide for few points: for n = 4 its half-width is 1.96 in arctanh(r). Nothing but `n` is given of fewer than 4
    points, or where one of the variables does not vary.

    Raises:
        ValueError: if the two are not equally long.
    """
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"A correlation needs two equally long lists, got {len(x)} and {len(y)} values.")
    if len(x) < 4 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return {"n": len(x), "r": None, "p": None, "low": None, "high": None}
    result = stats.pearsonr(x, y)
    interval = result.confidence_interval(confidence)
    return {
        "n": len(x),
        "r": float(result.statistic),
        "p": float(result.pvalue),
        "low": float(interval.low),
        "high": float(interval.high),
    }
