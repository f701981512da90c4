"""Phase boundaries: whether a curve through depth jumps where phases meet more than it does elsewhere."""

from collections.abc import Sequence
from itertools import accumulate, combinations
from math import comb

import numpy as np

MOST_CHOICES = 10_000


def boundary_jumps(curve: Sequence[float], phase_sizes: Sequence[int], seed: int = 0) -> dict:
    """
    Permutation test of jumps at the cuts between phases. The jump between layers l and l + 1 is |c_(l+1) - c_l|; the
    statistic is the mean jump at the cuts minus the mean elsewhere, against every choice of as many places (10,000
    random ones where there are more).

    Args:
        curve: a value for each layer 1..L.
        phase_sizes: of contiguous phases; they sum to L.
        seed: of the random choices.

    Returns:
        `at_cuts` and `elsewhere` (mean jumps), `p_value` (one-sided: larger at the cuts) and `smallest_p_value`, the
        least that so few places allow. What there is nothing to compare for is None.

    Raises:
        ValueError: if the phases don't sum to the curve's length.
    """
    if sum(phase_sizes) != len(curve):
        raise ValueError(f"phase_sizes {list(phase_sizes)} must sum to the {len(curve)} layers of the curve.")
    jumps = np.abs(np.diff(np.asarray(curve, dtype=np.float64)))
    cuts = [end - 1 for end in accumulate(phase_sizes[:-1])]
    at_cuts, elsewhere = jumps[cuts], np.delete(jumps, cuts)
    result = {
        name: float(part.mean()) if len(part) else None
        for name, part in zip(("at_cuts", "elsewhere"), (at_cuts, elsewhere))
    }
    if not len(at_cuts) or not len(elsewhere):
        return result | {"p_value": None, "smallest_p_value": None}
    # With all jumps' sum given, the statistic grows with the sum over the chosen places.
    if comb(len(jumps), len(cuts)) <= MOST_CHOICES:
        choices = np.array(list(combinations(range(len(jumps)), len(cuts))))
    else:
        places = np.tile(np.arange(len(jumps)), (MOST_CHOICES - 1, 1))
        drawn = np.random.default_rng(seed).permuted(places, axis=1)[:, : len(cuts)]
        choices = np.vstack([cuts, drawn])
    sums = jumps[choices].sum(1)
    as_large = sums >= at_cuts.sum() - 1e-12 * jumps.sum()
    return result | {"p_value": float(as_large.mean()), "smallest_p_value": 1 / len(choices)}
