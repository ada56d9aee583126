"""A change of the mean of an arm's rewards is found by a likelihood ratio, and only then."""

import math

import numpy as np
import pytest

from people.serving.changes import SinceChange, changed_at


def test_the_likelihood_ratio_is_compared_with_its_threshold():
    # 50 zeros, 50 ones, and a scale of 1: the sum of squares is 25 + 1, of which the only split
    # that is looked at takes 50 * 50 / 100 = 25
    rewards = np.repeat([0.0, 1.0], 50)
    ratio = 50 * math.log(26 / 1)
    at_threshold = 100**1.5 * math.exp(-ratio)
    assert changed_at(rewards, 1.01 * at_threshold, 1.0) == 50
    assert changed_at(rewards, 0.99 * at_threshold, 1.0) is None
    # a greater scale takes a part of the difference for chance: 50 ln(35 / 10) = 62.6
    assert changed_at(rewards, 1_000 * math.exp(-62.7), math.sqrt(10)) is None
    assert changed_at(rewards, 1_000 * math.exp(-62.6), math.sqrt(10)) == 50


def test_the_likeliest_split_is_the_true_one():
    assert changed_at(np.repeat([0.0, 1.0], [60, 55]), 0.02, 1.0) == 60
    assert changed_at(np.repeat([1.0, 0.0], [60, 55]), 0.02, 1.0) == 60


@pytest.mark.parametrize(
    "rewards", [[0.5] * 400, [0.0, 1.0] * 200, [0.0] * 60 + [1.0] * 39, [0.0] * 399 + [1.0]]
)
def test_rewards_that_do_not_change_or_are_few_are_none(rewards):
    assert changed_at(np.array(rewards), 0.02, 1.0) is None


def test_an_arm_keeps_its_rewards_since_the_change():
    one, never = SinceChange(0.02, 1.0), SinceChange(None, 1.0)
    found = []
    for number, value in enumerate([0.0] * 60 + [1.0] * 40, 1):
        never.add(value)
        if one.add(value):
            found.append(number)
    # at the first test of 100 rewards the only split is that in halves: 10 zeros and 40 ones stay
    assert found == [100]
    assert (one.count, one.mean, one.squares) == pytest.approx((50, 0.8, 8.0))
    assert (never.count, never.mean, never.squares) == pytest.approx((100, 0.4, 24.0))
    # those are the rewards of the next test: 50 more ones are 50 ones behind 10 zeros and 40 ones,
    # with sums of squares 1 + 9 and 1 + 8: 50 ln(10 / 9) = 5.3 is below ln(1000 / 0.02) = 10.8
    assert not any(one.add(1.0) for _ in range(50)) and one.count == 100
