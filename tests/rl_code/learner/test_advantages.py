"""Advantages against numbers worked out by hand, and the cases that divide by zero elsewhere."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_code.config import named
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.learner.advantages import (
    ADVANTAGES,
    GRPO,
    PKPO,
    DrGRPO,
    MaxRL,
    group_advantages,
    per_turn,
)
from rl_code.types import Reward, Turn
from tests.rl_code.learner.conftest import make_group, make_trajectory

# Those that need no more than rewards and outcomes.
OF_OUTCOMES = ("grpo", "dr_grpo", "rloo", "pkpo", "maxrl")
REWARDS = np.array(
    [[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 0.0, 0.0]], np.float32
)  # means 0.5, 1; population std 0.5, sqrt(1.5)


def advantages(name, rewards, eps, valid=None):
    """[P, G] of one call for each row of rewards."""
    member = ADVANTAGES[name](eps) if name == "grpo" else ADVANTAGES[name]()
    valid = np.ones(rewards.shape, bool) if valid is None else valid
    found = [
        member(
            make_group(
                make_trajectory(
                    [1, 2],
                    [0, 1],
                    prompt_length=1,
                    reward=reward,
                    status="submitted" if counts else "fault",
                )
                for reward, counts in zip(*row, strict=True)
            )
        )
        for row in zip(rewards, valid, strict=True)
    ]
    return np.stack(found)


def outcomes(rewards):
    """A group of trajectories with these rewards, those of 1 or more solved."""
    return make_group(
        dataclasses.replace(
            make_trajectory([1, 2], [0, 1], prompt_length=1, reward=float(reward)),
            solved=reward >= 1,
        )
        for reward in rewards
    )


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
    result = advantages(name, REWARDS, 0.1)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, np.array(expected), rtol=1e-6)


def test_pkpo_equals_hand_computed_numbers():
    # k = 2, rewards 3, 1, 0, 0: 2 * the mean over the three others of max(R_i - R_j, 0)
    found = PKPO(k=2)(outcomes([3.0, 1.0, 0.0, 0.0]))
    np.testing.assert_allclose(found, [2 * (2 + 3 + 3) / 3, 2 * (0 + 1 + 1) / 3, 0.0, 0.0])
    # k = 3, one solution of four: each of its sets of two others fails, so it is worth k
    np.testing.assert_allclose(PKPO(k=3)(outcomes([0.0, 1.0, 0.0, 0.0])), [0.0, 3.0, 0.0, 0.0])
    # k = 3, two solutions of four: one of the three sets of two others has no solution
    np.testing.assert_allclose(PKPO(k=3)(outcomes([1.0, 1.0, 0.0, 0.0])), [1.0, 1.0, 0.0, 0.0])
    # k = 3, three solutions of four: there is no set of two others without one
    np.testing.assert_array_equal(PKPO(k=3)(outcomes([1.0, 1.0, 1.0, 0.0])), np.zeros(4))


@pytest.mark.parametrize("k", [2, 3, 5])
def test_pkpo_is_the_mean_over_all_sets(k):
    rewards = [0.5, -1.0, 2.0, 0.5, 0.0]
    found = PKPO(k=k)(outcomes(rewards))
    for i, own in enumerate(rewards):
        sets = itertools.combinations(rewards[:i] + rewards[i + 1 :], k - 1)
        gains = [max(own, *others) - max(others) for others in sets]
        np.testing.assert_allclose(found[i], k * np.mean(gains), rtol=1e-6)


def expected_gradient(member, p, size):
    """d/dp of an objective, as the mean over trajectories of advantage times d log-likelihood / dp,
    averaged over all outcomes of a group of attempts that each succeed with probability p.
    """
    total = 0.0
    for solved in itertools.product([False, True], repeat=size):
        chance = np.prod([p if one else 1 - p for one in solved])
        scores = np.array([1 / p if one else -1 / (1 - p) for one in solved])
        total += chance * np.mean(np.asarray(member(outcomes(solved)), float) * scores)
    return total


@pytest.mark.parametrize("p", [0.1, 0.6])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_the_expected_gradient_of_pkpo_is_that_of_pass_at_k(p, k):
    assert expected_gradient(PKPO(k=k), p, 5) == pytest.approx(k * (1 - p) ** (k - 1), rel=1e-5)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_expected_gradient_of_pkpo_is_that_of_the_best_of_k_graded_rewards(k):
    rewards, chances = np.array([-0.5, 0.3, 1.0]), np.array([0.5, 0.3, 0.2])
    scores = np.eye(3) - chances  # d log-likelihood of an outcome / d logits of a softmax

    # brute force over all k attempts: d/d logits of the expected best reward
    exact = np.zeros(3)
    for drawn in map(list, itertools.product(range(3), repeat=k)):
        exact += np.prod(chances[drawn]) * max(rewards[drawn]) * scores[drawn].sum(axis=0)

    # and over all groups of four: what the estimator gives on average
    found = np.zeros(3)
    for drawn in map(list, itertools.product(range(3), repeat=4)):
        weights = np.asarray(PKPO(k=k)(outcomes(rewards[drawn])), float)
        found += np.prod(chances[drawn]) * np.mean(weights[:, None] * scores[drawn], axis=0)
    np.testing.assert_allclose(found, exact, rtol=1e-5)


@pytest.mark.parametrize("p", [0.1, 0.6])
def test_the_expected_gradient_of_maxrl_is_that_of_the_mixture(p):
    mixture = sum((1 - p) ** (k - 1) for k in range(1, 5))  # of pass@k / k for k < 5
    assert expected_gradient(MaxRL(), p, 5) == pytest.approx(mixture, rel=1e-5)


def test_maxrl_equals_hand_computed_numbers():
    np.testing.assert_allclose(MaxRL()(outcomes([1, 0, 0, 0])), [3.0, -1.0, -1.0, -1.0])
    np.testing.assert_allclose(MaxRL()(outcomes([1, 1, 0, 1])), [1 / 3, 1 / 3, -1.0, 1 / 3])
    np.testing.assert_array_equal(MaxRL()(outcomes([0, 0])), [0.0, 0.0])


def test_pkpo_of_one_attempt_is_refused():
    with pytest.raises(ValueError, match=r"k=1 must be at least 2"):
        PKPO(k=1)


def test_rloo_is_the_reward_minus_the_mean_of_the_others():
    others = [[np.mean(np.delete(row, i)) for i in range(4)] for row in REWARDS]
    np.testing.assert_allclose(
        advantages("rloo", REWARDS, 0.0), REWARDS - np.array(others), rtol=1e-6
    )


@pytest.mark.parametrize("name", OF_OUTCOMES)
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_single_or_equal_rewards_give_exactly_zero(name, eps):
    for rewards in (
        np.full((2, 1), 0.7),
        np.full((3, 7), 0.1, np.float32),
        np.full((1, 3), 1e6 + 0.1),
    ):
        np.testing.assert_array_equal(advantages(name, rewards, eps), np.zeros(rewards.shape))


@pytest.mark.parametrize("name", OF_OUTCOMES)
@pytest.mark.parametrize(
    "rewards",
    [
        [0.3, 0.1 + 0.2, 0.3],
        [0.0, 0.1 + 0.2 - 0.3, 0.0],
        [float(np.float32(0.1)), 0.1, 0.1],
        [1e6 / 3, 1e6 - 2e6 / 3, 1e6 / 3],
        [-0.7, -0.7 - 1e-12, -0.7],
    ],
)
def test_rewards_that_differ_by_rounding_are_equal(name, rewards):
    assert len(set(rewards)) > 1
    for eps in (0.0, 1e-4):
        np.testing.assert_array_equal(advantages(name, np.array([rewards]), eps), np.zeros((1, 3)))


def test_rewards_that_differ_by_little_still_differ():
    found = advantages("grpo", np.array([[0.5, 0.5, 0.5 + 1e-5, 0.5]]), 0.0)
    np.testing.assert_allclose(found[0, 2], 3**0.5, rtol=1e-4)
    np.testing.assert_allclose(
        advantages("dr_grpo", np.array([[0.0, 1e-5]]), 0.0)[0], [-5e-6, 5e-6]
    )


@pytest.mark.parametrize("name", OF_OUTCOMES)
def test_invalid_trajectories_change_nothing_for_the_others(name):
    rewards = np.array([[1.0, 99.0, 0.0, 0.5]])
    valid = np.array([[True, False, True, True]])
    result = advantages(name, rewards, 1e-3, valid)
    np.testing.assert_array_equal(
        result[0, [0, 2, 3]], advantages(name, rewards[:, [0, 2, 3]], 1e-3)[0]
    )
    assert result[0, 1] == 0.0
    np.testing.assert_array_equal(
        advantages(name, rewards, 1e-3, np.zeros((1, 4), bool)), np.zeros((1, 4))
    )


@pytest.mark.parametrize("name", OF_OUTCOMES)
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
    result = advantages(name, rewards, 1e-2)
    assert np.isfinite(result).all()
    if name != "pkpo":  # whose weights are never negative
        np.testing.assert_allclose(result.sum(axis=1), 0.0, atol=1e-3)
    groups = rng.permutation(len(rewards))
    members = rng.permutation(5)
    np.testing.assert_allclose(
        advantages(name, rewards[groups][:, members], 1e-2), result[groups][:, members], 1e-5
    )


def test_groups_of_any_size_get_theirs_and_faults_none(build):
    groups = build.groups([3, 1, 4])
    faulty = dataclasses.replace(groups[2].trajectories[0], status="fault", reward=Reward(50.0, {}))
    groups[2] = build.group([faulty, *groups[2].trajectories[1:]], 2)
    result = group_advantages(groups, DrGRPO())
    assert [len(values) for values in result] == [3, 1, 4]
    rewards = np.array([t.reward.total for t in groups[2].trajectories[1:]])
    np.testing.assert_allclose(result[2], [0.0, *(rewards - rewards.mean())], rtol=1e-6)


def test_bad_rewards_and_names_are_named(build):
    (group,) = build.groups([2])
    bad = dataclasses.replace(group.trajectories[1], reward=Reward(float("nan"), {}))
    with pytest.raises(ValueError, match=r"task0.*trajectory 1.*nan"):
        group_advantages([build.group([group.trajectories[0], bad])], GRPO())
    with pytest.raises(
        ConfigError, match=r"train.advantage = 'best'.*'dr_grpo', 'gae', 'grpo', .*'rloo'"
    ):
        named.make(ADVANTAGES, Named("best"), "train.advantage")
    with pytest.raises(ValueError, match=r"task0.*returned 1 advantages for 2 trajectories"):
        group_advantages([group], lambda group: [1.0])


def two_contexts(build, turns):
    """A trajectory whose second context keeps three tokens of the first."""
    one = build.trajectory([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1], prompt_length=2)
    other = build.trajectory([7, 8, 9], [0, 1, 1], prompt_length=1).contexts[0]
    contexts = (*one.contexts, dataclasses.replace(other, parent=0, kept=3))
    return dataclasses.replace(one, contexts=contexts, turns=turns)


TURNS = (
    Turn("prompt", 0, 2, ""),
    Turn("assistant", 2, 4, ""),
    Turn("tool", 4, 5, ""),
    Turn("assistant", 5, 6, ""),
    Turn("tool", 0, 1, "", context=1),
    Turn("assistant", 1, 3, "", context=1),
)


def test_values_of_turns_become_values_of_their_sampled_tokens(build):
    trajectory = two_contexts(build, TURNS)
    assert trajectory.tokens[trajectory.sampled].tolist() == [3, 4, 6, 8, 9]
    found = per_turn(trajectory, [0.5, -1.0, 2.0])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [0.5, 0.5, -1.0, 2.0, 2.0])
    with pytest.raises(ValueError, match="2 values for 3 turns of the assistant"):
        per_turn(trajectory, [0.5, -1.0])
    with pytest.raises(ValueError, match="a sampled token is in no turn"):
        per_turn(two_contexts(build, TURNS[:-1]), [0.5, -1.0])
