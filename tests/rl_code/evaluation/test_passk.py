"""pass@k equals its definition by enumeration; the interval behaves as a bootstrap interval
must.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_code.evaluation.passk import RESAMPLES, mean_interval, pass_at_k


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_equals_enumeration_of_all_draws(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([i < c for i in range(n)], k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)


def test_pass_at_k_is_exact_for_large_counts():
    assert pass_at_k(10_000, 1, 100) == 0.01
    assert pass_at_k(100_000, 0, 1000) == 0.0
    assert pass_at_k(2000, 1001, 1000) == 1.0


@given(st.integers(1, 60), st.data())
def test_pass_at_k_grows_with_k_and_c(n, data):
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    assert pass_at_k(n, c, 1) == c / n
    if c < n:
        assert pass_at_k(n, c, k) <= pass_at_k(n, c + 1, k)
    if k < n:
        assert pass_at_k(n, c, k) <= pass_at_k(n, c, k + 1)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_counts_that_cannot_be_are_named(n, c, k):
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


def test_interval_agrees_with_the_normal_one_on_many_tasks():
    values = np.random.default_rng(1).binomial(1, 0.3, 2000).astype(float)
    interval = mean_interval(values)
    width = 1.96 * values.std() / np.sqrt(values.size)
    assert interval.mean == values.mean()
    assert interval.low == pytest.approx(values.mean() - width, abs=0.1 * width)
    assert interval.high == pytest.approx(values.mean() + width, abs=0.1 * width)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(2)
    intervals = [mean_interval(generator.beta(2, 3, 60)) for _ in range(100)]
    assert 88 <= sum(interval.low <= 0.4 <= interval.high for interval in intervals) <= 99


def test_interval_is_the_same_each_time_and_does_not_depend_on_chunks(monkeypatch):
    values = np.random.default_rng(3).random(50)
    whole = mean_interval(values, seed=5)
    monkeypatch.setattr("rl_code.evaluation.passk._INDICES_AT_ONCE", 50 * RESAMPLES // 7)
    assert mean_interval(values, seed=5) == whole != mean_interval(values, seed=6)


def test_equal_values_give_an_interval_without_width():
    assert mean_interval([0.25] * 9) == mean_interval([0.25])


@pytest.mark.parametrize("values", [[], [np.nan, 1.0], [[0.5]]])
def test_values_without_a_mean_are_refused(values):
    with pytest.raises(ValueError, match="finite value per task"):
        mean_interval(values)
