"""Paired intervals are those of the t-test, cover as often as they say, and are narrower where pairs
share what varies.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from rl_code.evaluation.paired import paired_difference
from rl_code.evaluation.passk import Interval

numbers = st.floats(-100, 100).map(lambda x: round(x, 3))


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=12))
def test_the_mean_is_that_of_the_differences_and_swapping_turns_the_sign(pairs):
    one, other = map(list, zip(*pairs, strict=True))
    found = paired_difference(one, other)
    back = paired_difference(other, one)
    assert found.paired.mean == found.unpaired.mean
    assert found.paired.mean == pytest.approx(np.mean(other) - np.mean(one), abs=1e-9)
    assert back.paired.low == pytest.approx(-found.paired.high, abs=1e-6)
    assert found.paired.low <= found.paired.mean <= found.paired.high
    assert found.unpaired.low <= found.unpaired.mean <= found.unpaired.high


def test_a_known_case():
    """Student's t with 2 degrees of freedom: 4.3027 times the standard error."""
    found = paired_difference([1.0, 2.0, 3.0], [2.0, 4.0, 3.0])
    error = math.sqrt(1.0 / 3.0)
    assert found.paired.mean == pytest.approx(1.0)
    assert found.paired.high - 1.0 == pytest.approx(4.302653 * error, rel=1e-5)
    assert found.variance_ratio.mean == pytest.approx(2.0) and found.pairs == 3


def test_intervals_are_those_of_the_t_tests():
    rng = np.random.default_rng(1)
    one, other = rng.normal(0, 1, 9), rng.normal(0.3, 2, 9)
    found = paired_difference(one, other)
    for interval, test in (
        (found.paired, scipy.stats.ttest_rel(other, one)),
        (found.unpaired, scipy.stats.ttest_ind(other, one, equal_var=False)),
    ):
        assert (interval.low, interval.high) == pytest.approx(tuple(test.confidence_interval(0.95)))


def test_intervals_cover_as_often_as_they_say_and_pairs_narrow_them():
    rng = np.random.default_rng(0)
    covered, ratios, held = 0, [], 0
    for _ in range(400):
        shared = rng.normal(0, 3, 12)
        one = shared + rng.normal(0, 1, 12)
        other = shared + 0.7 + rng.normal(0, 1, 12)
        found = paired_difference(one, other)
        covered += found.paired.low <= 0.7 <= found.paired.high
        ratios.append(found.variance_ratio.mean)
        held += found.variance_ratio.low <= 10 <= found.variance_ratio.high
    assert 0.92 <= covered / 400 <= 0.98
    assert 7 < np.median(ratios) < 14  # (2 * 9 + 2) / 2 = 10
    assert 0.92 <= held / 400 <= 0.98


def test_samples_that_do_not_vary_have_no_width():
    found = paired_difference([1.0, 2.0], [2.0, 3.0])
    assert found.paired.low == found.paired.high == 1.0
    assert found.variance_ratio.mean == found.variance_ratio.high == math.inf
    assert found.unpaired.high > 1.0
    assert paired_difference([1.0, 1.0], [1.0, 1.0]).variance_ratio == Interval(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ([1.0], [2.0], "at least two pairs"),
        ([1.0, 2.0], [2.0], "shapes"),
        ([1.0, math.nan], [2.0, 1.0], "finite"),
    ],
)
def test_what_cannot_be_paired_is_named(one, other, words):
    with pytest.raises(ValueError, match=words):
        paired_difference(one, other)
