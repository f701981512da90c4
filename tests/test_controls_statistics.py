import numpy as np
import pytest

from raptor_hf.controls.statistics import correlation, describe, permutation_p_value


def test_describe_gives_the_sample_spread():
    assert describe([1.0, 3.0]) == {"n": 2, "mean": 2.0, "std": pytest.approx(2**0.5), "min": 1.0, "max": 3.0}
    assert describe([5.0])["std"] is None


def test_a_p_value_counts_the_observed_value_itself_and_ties():
    assert permutation_p_value(9, [1, 2, 3]) == 1 / 4
    assert permutation_p_value(2, [1, 2, 3]) == 3 / 4
    assert permutation_p_value(0, [1, 2, 3]) == 1


def test_correlation_of_known_points_with_fishers_interval():
    x, y = [1, 2, 3, 4, 5], [2, 1, 4, 3, 5]
    found = correlation(x, y)
    assert found["r"] == pytest.approx(0.8) and found["n"] == 5
    half_width = 1.959964 / np.sqrt(5 - 3)
    assert found["low"] == pytest.approx(np.tanh(np.arctanh(0.8) - half_width), abs=1e-5)
    assert found["high"] == pytest.approx(np.tanh(np.arctanh(0.8) + half_width), abs=1e-5)
    assert correlation(x, [-v for v in y])["r"] == pytest.approx(-0.8)


@pytest.mark.parametrize("x, y", [([1, 2, 3], [1, 2, 3]), ([1, 1, 1, 1], [1, 2, 3, 4])])
def test_too_few_points_and_constants_have_no_correlation(x, y):
    assert correlation(x, y)["r"] is None


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="equally long"):
        correlation([1, 2], [1, 2, 3])
