"""Errors of values at borders: by hand, and unbiased whatever the number of continuations is."""

from __future__ import annotations

import numpy as np
import pytest

from rl_code.learner.border_values import Judged, error_metrics, judged
from rl_code.run.step_metrics import all_sampled
from tests.rl_code.learner.conftest import make_group
from tests.rl_code.learner.test_monte_carlo import FIRST, SECOND, continuations, group_of, member


def test_the_value_of_a_border_is_that_before_the_next_token():
    ends = [
        *continuations(FIRST, [1.0, 0.0], 2),
        *continuations(SECOND, [1.0], 4),
        *continuations(SECOND, [0.5, 0.5], 5, status="fault"),
    ]
    group = group_of([member(0, 1.0), member(1)], ends)
    values = [np.array([0.1, 0.2, 0.3, 0.4, 0.5]), np.zeros(0)]
    # the second border has one return that counts, whose variance nobody knows
    assert judged(group, values) == [Judged(0.3, (1.0, 0.0))]
    assert judged(group, [np.zeros(0), values[0]]) == []


def test_errors_equal_hand_computed_numbers():
    borders = [Judged(0.75, (1.0, 0.0)), Judged(1.0, (1.0, 1.0))]
    # means 0.5 and 1, sample variances 0.5 and 0: the noise of the means is 0.125
    found = error_metrics(borders)
    assert found == {
        "value/borders": 2.0,
        "value/border_error": 0.0,  # 0.25 ** 2 / 2 is less than the noise
        "value/border_error_constant": 0.0,
        "value/border_error_of_1": pytest.approx(0.5),
        "value/border_error_of_2": pytest.approx(0.5 / 2**0.5),
    }
    far = error_metrics([Judged(-0.5, (1.0, 0.0)), Judged(1.0, (1.0, 1.0))])
    assert far["value/border_error"] == pytest.approx((1 / 2 - 0.125) ** 0.5)
    assert error_metrics([]) == {}


@pytest.mark.parametrize("count", [2, 8])
def test_errors_are_unbiased(count):
    rng = np.random.default_rng(0)
    chances = rng.uniform(size=20_000)
    borders = [
        Judged(chance + 0.2, tuple((rng.uniform(size=count) < chance).astype(float)))
        for chance in chances
    ]
    found = error_metrics(borders)
    assert found["value/border_error"] == pytest.approx(0.2, abs=0.01)
    # a uniform chance has the variance 1/12, and a draw of it 1/6 around it
    assert found["value/border_error_constant"] == pytest.approx(12**-0.5, abs=0.01)
    assert found["value/border_error_of_1"] == pytest.approx(6**-0.5, abs=0.01)


def test_all_sampled_tokens_are_counted_once():
    plain = make_group([member(0), member(1)])
    assert all_sampled([plain], {}) == {"lengths/sampled_in_all": 10.0}
    # 3 tokens stand behind the first border
    forked = group_of([member(0), member(1)], continuations(FIRST, [1.0, 0.0], 2))
    assert all_sampled([forked], {}) == {"lengths/sampled_in_all": 16.0}
