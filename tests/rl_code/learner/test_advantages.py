"""Advantages against numbers worked out by hand, and the cases that divide by zero elsewhere."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_code.learner.advantages import ADVANTAGES, group_advantages
from rl_code.types import Reward

REWARDS = np.array(
    [[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 0.0, 0.0]], np.float32
)  # means 0.5, 1; population std 0.5, sqrt(1.5)


@pytest.mark.parametrize(
    "name, expected",
    [
        (
            "grpo",
            [
                [0.5 / 0.6, -0.5 / 0.6, -0.5 / 0.6, 0.5 / 0.6],
                np.array([2.0, 0.0, -1.0, -1.0]) / (1.5**0.5 + 0.1),
            ],
        ),
        ("dr_grpo", [[0.5, -0.5, -0.5, 0.5], [2.0, 0.0, -1.0, -1.0]]),
        ("rloo", [[2 / 3, -2 / 3, -2 / 3, 2 / 3], [8 / 3, 0.0, -4 / 3, -4 / 3]]),
    ],
)
def test_advantages_equal_hand_computed_numbers(name, expected):
    result = ADVANTAGES[name](REWARDS, 0.1)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, np.array(expected), rtol=1e-6)


def test_rloo_is_the_reward_minus_the_mean_of_the_others():
    others = [[np.mean(np.delete(row, i)) for i in range(4)] for row in REWARDS]
    np.testing.assert_allclose(
        ADVANTAGES["rloo"](REWARDS, 0.0), REWARDS - np.array(others), rtol=1e-6
    )


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_single_or_equal_rewards_give_exactly_zero(name, eps):
    for rewards in (
        np.full((2, 1), 0.7),
        np.full((3, 7), 0.1, np.float32),
        np.full((1, 3), 1e6 + 0.1),
    ):
        np.testing.assert_array_equal(ADVANTAGES[name](rewards, eps), np.zeros(rewards.shape))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_invalid_trajectories_change_nothing_for_the_others(name):
    rewards = np.array([[1.0, 99.0, 0.0, 0.5]])
    valid = np.array([[True, False, True, True]])
    result = ADVANTAGES[name](rewards, 1e-3, valid)
    np.testing.assert_array_equal(
        result[0, [0, 2, 3]], ADVANTAGES[name](rewards[:, [0, 2, 3]], 1e-3)[0]
    )
    assert result[0, 1] == 0.0
    np.testing.assert_array_equal(
        ADVANTAGES[name](rewards, 1e-3, np.zeros((1, 4), bool)), np.zeros((1, 4))
    )


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(deadline=None, max_examples=30)
@given(
    rewards=st.lists(
        st.lists(st.floats(-100, 100, width=32), min_size=5, max_size=5), min_size=1, max_size=4
    ),
    seed=st.integers(0, 100),
)
def test_order_does_not_matter_and_shifts_cancel(name, rewards, seed):
    rewards = np.array(rewards)
    rng = np.random.default_rng(seed)
    result = ADVANTAGES[name](rewards, 1e-2)
    assert np.isfinite(result).all()
    np.testing.assert_allclose(result.sum(axis=1), 0.0, atol=1e-3)
    groups = rng.permutation(len(rewards))
    members = rng.permutation(5)
    np.testing.assert_allclose(
        ADVANTAGES[name](rewards[groups][:, members], 1e-2), result[groups][:, members], 1e-5
    )


def test_groups_of_any_size_get_theirs_and_faults_none(build):
    groups = build.groups([3, 1, 4])
    faulty = dataclasses.replace(groups[2].trajectories[0], status="fault", reward=Reward(50.0, {}))
    groups[2] = build.group([faulty, *groups[2].trajectories[1:]], 2)
    result = group_advantages(groups, "dr_grpo", 0.0)
    assert [len(values) for values in result] == [3, 1, 4]
    rewards = np.array([t.reward.total for t in groups[2].trajectories[1:]])
    np.testing.assert_allclose(result[2], [0.0, *(rewards - rewards.mean())], rtol=1e-6)


def test_bad_rewards_and_names_are_named(build):
    (group,) = build.groups([2])
    bad = dataclasses.replace(group.trajectories[1], reward=Reward(float("nan"), {}))
    with pytest.raises(ValueError, match=r"task0.*trajectory 1.*nan"):
        group_advantages([build.group([group.trajectories[0], bad])], "grpo", 1e-6)
    with pytest.raises(ValueError, match=r"gae.*grpo"):
        group_advantages([group], "gae", 1e-6)
