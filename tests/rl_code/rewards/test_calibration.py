"""AUC, calibration error and Platt's fit on numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_code.rewards.calibration import (
    auc,
    auc_within,
    ece,
    judge,
    platt,
    reliability,
    sigmoid,
)


def test_auc_counts_pairs_and_half_of_ties():
    # good 0.8, 0.4; bad 0.4, 0.2, 0.6: above in 3 + 1 pairs, one tie, of 6
    scores, good = [0.8, 0.4, 0.4, 0.2, 0.6], [True, True, False, False, False]
    assert auc(scores, good) == pytest.approx(4.5 / 6)
    assert auc([0.1, 0.2], [True, True]) is None
    assert auc([1, 1, 1], [True, False, True]) == 0.5


def test_auc_within_takes_no_pair_of_two_groups():
    scores = [0.9, 0.8, 0.1, 0.2, 0.5]
    good = [True, False, True, False, False]
    # group a: above; group b: below; group c has no pair. Over all groups: 0.9 is above 3, 0.1 is
    # above none.
    assert auc_within(scores, good, ["a", "a", "b", "b", "c"]) == 0.5
    assert auc(scores, good) == 0.5
    assert auc_within(scores, good, ["a", "b", "c", "d", "e"]) is None


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.booleans()), min_size=1))
def test_auc_is_the_share_of_pairs(rows):
    good = [score for score, kind in rows if kind]
    bad = [score for score, kind in rows if not kind]
    pairs = [(g > b) + 0.5 * (g == b) for g in good for b in bad]
    found = auc(*zip(*rows, strict=True))
    assert found == (pytest.approx(np.mean(pairs)) if pairs else None)


def test_calibration_error_is_the_weighted_distance_of_bins():
    # bins of 0.2: [0.1, 0.1] none good; [0.5] good; [1.0, 0.9] one good
    probabilities, good = [0.1, 0.1, 0.5, 1.0, 0.9], [False, False, True, True, False]
    bins = reliability(probabilities, good, bins=5)
    assert [(one.low, one.count, one.share) for one in bins] == [
        (0.0, 2, 0.0),
        (0.4, 1, 1.0),
        (0.8, 2, 0.5),
    ]
    assert [one.probability for one in bins] == pytest.approx([0.1, 0.5, 0.95])
    # (2 * 0.1 + 1 * 0.5 + 2 * 0.45) / 5
    assert ece(bins) == pytest.approx(0.32)
    found = judge(probabilities, good, list("aabbb"))
    assert (found.count, found.good, found.auc) == (5, 2, pytest.approx(5 / 6))
    assert found.auc_within == 0.5  # 1.0 is above 0.9, and 0.5 is not; a has no good one
    # (0.01 + 0.01 + 0.25 + 0 + 0.81) / 5
    assert found.brier == pytest.approx(0.216)


@pytest.mark.parametrize("wrong", [([], [], []), ([1.5], [True], ["a"]), ([0.5], [True], [])])
def test_what_cannot_be_judged_is_refused(wrong):
    with pytest.raises(ValueError):
        judge(*wrong)


def test_platt_finds_the_slope_and_offset_that_made_the_outcomes():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=20_000)
    good = rng.random(20_000) < sigmoid(2.0 * scores - 1.0)
    slope, offset = platt(scores, good)
    assert (slope, offset) == (pytest.approx(2.0, abs=0.1), pytest.approx(-1.0, abs=0.1))
    assert ece(reliability(sigmoid(slope * scores + offset), good)) < 0.02


@pytest.mark.parametrize("good", [[False, True], [True, True], [True, False]])
def test_platt_ends_with_finite_numbers(good):
    slope, offset = platt([-1.0, 1.0], good)
    assert slope >= 0 and np.isfinite([slope, offset]).all()
    assert platt([3.0, 3.0], good)[0] >= 0


def test_sigmoid_does_not_overflow():
    with np.errstate(over="raise", invalid="raise"):
        found = sigmoid(np.array([-800.0, 0.0, 800.0]))
    assert found[1] == 0.5 and found[0] >= 0 and found[2] == 1.0
