"""Rewards: only work that was handed in and passes everything is paid in full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_code.rewards.combine import REWARDS, combine
from rl_code.rewards.outcome import Outcome, RewardConfig

marks = st.lists(st.booleans(), max_size=4).map(tuple)
outcomes = st.builds(Outcome, st.booleans(), marks, marks, st.integers(0, 5))
configs = st.builds(RewardConfig, st.floats(1, 2), st.floats(0, 0.5), st.floats(0, 1))


@given(outcomes, configs)
def test_the_total_is_the_sum_of_the_named_components(outcome, config):
    reward = combine(outcome, config, ("noticed",))
    assert set(reward.components) == set(REWARDS) and reward.flags == ("noticed",)
    assert reward.total == pytest.approx(sum(reward.components.values()))


@given(outcomes, configs)
def test_full_reward_exactly_when_every_required_test_passes(outcome, config):
    passed = outcome.visible + outcome.hidden
    solved = outcome.submitted and len(passed) > 0 and all(passed)
    assert combine(outcome, config, ()).components["tests"] == (config.full if solved else 0.0)


@given(marks, marks, configs)
def test_unsubmitted_work_earns_nothing(visible, hidden, config):
    assert combine(Outcome(False, visible, hidden, 0), config, ()).total == 0.0


@given(outcomes, configs)
def test_a_partial_solution_earns_less_than_a_full_one(outcome, config):
    assert outcome.solved or combine(outcome, config, ()).total < config.full


def test_partial_reward_is_the_fraction_of_hidden_tests():
    config = RewardConfig(full=1.0, partial_weight=0.5, malformed_penalty=0.25)
    reward = combine(Outcome(True, (False,), (True, True, False, False), 1), config, ())
    assert (
        reward.components == {"tests": 0.0, "partial": 0.25, "malformed": -0.25}
        and reward.total == 0.0
    )


def test_a_task_without_tests_is_never_solved():
    assert not Outcome(True, (), (), 0).solved


@pytest.mark.parametrize(
    "values", [(1.0, 1.0, 0.0), (1.0, -0.1, 0.0), (1.0, 0.0, -1.0), (0.0, 0.0, 0.0)]
)
def test_prices_that_invert_the_order_of_outcomes_are_refused(values):
    with pytest.raises(ValueError, match="must be at least 0"):
        RewardConfig(*values)
