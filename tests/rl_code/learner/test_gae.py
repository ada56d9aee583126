"""Advantages from values, on numbers computed by hand; and how good values are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rl_code.learner.advantages import GRPO
from rl_code.learner.batching import PackConfig, pack
from rl_code.learner.gae import GAE, gae
from rl_code.learner.optimizer import OptimizerConfig
from rl_code.learner.value_config import ValueConfig
from rl_code.learner.value_credit import explained_variance, with_values
from rl_code.types import Context, Turn
from tests.rl_code.learner.conftest import make_group, make_groups, make_trajectory

OPTIMIZER = OptimizerConfig(learning_rate=1e-3)
VALUE = ValueConfig(optimizer=OPTIMIZER)
PACK = PackConfig(rows=8, slots=40, targets=32, max_staleness=0, drop_uninformative=False)
VALUES = np.array([0.5, 0.25, 0.75], np.float32)


def three_tokens(**changes):
    """A trajectory that samples three tokens, with two given ones between them; its reward is 1."""
    sampled = [False, False, True, False, False, True, True]
    made = make_trajectory(range(7), sampled, prompt_length=2, reward=1.0)
    return dataclasses.replace(made, **changes)


def credit(trajectory, values=VALUES, member=None, value=VALUE):
    (found,) = (member or GAE())(make_group([trajectory]), [values], value)
    return found


# delta = (0.25 - 0.5, 0.75 - 0.25, 1 - 0.75) = (-0.25, 0.5, 0.25)
@pytest.mark.parametrize(
    "lam, gamma, wanted",
    [
        (0.0, 1.0, [-0.25, 0.5, 0.25]),
        # 0.5 + 0.5 * 0.25 = 0.625; -0.25 + 0.5 * 0.625 = 0.0625
        (0.5, 1.0, [0.0625, 0.625, 0.25]),
        # the reward minus the value
        (1.0, 1.0, [0.5, 0.75, 0.25]),
        # delta = (0.125 - 0.5, 0.375 - 0.25, 0.25); 0.125 + 0.25 * 0.25; -0.375 + 0.25 * 0.1875
        (0.5, 0.5, [-0.328125, 0.1875, 0.25]),
    ],
)
def test_advantages_are_those_computed_by_hand(lam, gamma, wanted):
    value = dataclasses.replace(VALUE, gamma=gamma)
    found = credit(three_tokens(), member=GAE(lam=lam), value=value)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.float32(wanted))


def test_a_sequence_is_the_sum_of_its_definition():
    rng = np.random.default_rng(0)
    rewards, values = rng.standard_normal((2, 20))
    deltas = rewards + 0.9 * np.append(values[1:], 0.3) - values
    wanted = [sum((0.9 * 0.8) ** k * deltas[t + k] for k in range(20 - t)) for t in range(20)]
    np.testing.assert_allclose(gae(rewards, values, 0.3, 0.9, 0.8), wanted, rtol=1e-12)


def test_given_tokens_are_no_steps():
    sampled = [False, False, True, True, True]
    together = make_trajectory(range(5), sampled, prompt_length=2, reward=1.0)
    for lam in (0.0, 0.5, 1.0):
        apart = credit(three_tokens(), member=GAE(lam=lam))
        np.testing.assert_array_equal(credit(together, member=GAE(lam=lam)), apart)


def test_after_a_cut_comes_the_value_of_the_last_place():
    value = dataclasses.replace(VALUE, cut=("token_limit",))
    member = GAE(lam=0.0)
    ended = credit(three_tokens(), member=member, value=value)
    cut = credit(three_tokens(status="token_limit"), member=member, value=value)
    np.testing.assert_array_equal(cut - ended, [0.0, 0.0, 0.75])
    # a limit that counts as an outcome
    outcome = credit(three_tokens(status="token_limit"), member=member)
    np.testing.assert_array_equal(outcome, ended)


def test_each_context_is_a_sequence_that_ends_with_the_reward():
    linear = three_tokens()
    sampled = np.array([False, True, True, False])
    ones = np.ones(4, np.float32)
    second = Context(np.arange(4), sampled, -ones * sampled, np.zeros(4, np.int32), 0, 2)
    two = dataclasses.replace(linear, contexts=(*linear.contexts, second))
    values = np.array([*VALUES, 0.5, 0.25], np.float32)
    found = credit(two, values, GAE(lam=0.5))
    np.testing.assert_array_equal(found[:3], credit(linear, member=GAE(lam=0.5)))
    # delta = (0.25 - 0.5, 1 - 0.25)
    np.testing.assert_array_equal(found[3:], np.float32([-0.25 + 0.5 * 0.75, 0.75]))


def test_lambda_follows_the_length():
    member = GAE(length_alpha=0.5)
    assert member.lam_of(4) == 0.5 and member.lam_of(1000) == pytest.approx(0.998)
    assert member.lam_of(1) == 0.0  # 1 - 1 / 0.5 is negative
    # three tokens: 1 - 1 / 1.5 = 1/3
    expected = credit(three_tokens(), member=GAE(lam=1.0 - 1.0 / 1.5))
    np.testing.assert_array_equal(credit(three_tokens(), member=member), expected)


def test_values_of_another_number_are_refused():
    with pytest.raises(ValueError, match=r"'task0' trajectory 0: 2 values for 3 sampled tokens"):
        credit(three_tokens(), VALUES[:2])


# --- Batches --------------------------------------------------------------------------------------


def values_by_target(batch):
    """Values that depend on the token and the source's token alone, so that any packing has the
    same.
    """
    before = np.take_along_axis(batch.tokens, batch.sources, axis=1)
    return np.where(batch.mask > 0, np.sin(batch.targets + 0.1 * before), 0).astype(np.float32)


def credited(groups, config, value=VALUE):
    zeros = [[0.0] * len(group.trajectories) for group in groups]
    batch, _ = pack(groups, zeros, config, version=0)
    return with_values(batch, groups, values_by_target(batch), GAE(lam=0.9), value)


def by_trajectory(batch):
    """number -> (values, returns, advantages) of a trajectory's targets."""
    found = {}
    for number in np.unique(batch.trajectories[batch.mask > 0]):
        at = (batch.trajectories == number) & (batch.mask > 0)
        found[int(number)] = [x[at] for x in (batch.values, batch.returns, batch.advantages)]
    return found


def test_rows_give_each_trajectory_what_it_has_alone():
    groups = make_groups((3, 1, 4, 2), seed=1)
    value = dataclasses.replace(VALUE, gamma=0.95, lam=0.8)
    batch, _ = credited(groups, PACK, value=value)
    found = by_trajectory(batch)
    assert sorted(found) == list(range(10))
    number = 0
    for group in groups:
        for trajectory in group.trajectories:
            values, returns, advantages = found[number]
            wanted = credit(trajectory, values, GAE(lam=0.9), value)
            np.testing.assert_array_equal(advantages, wanted)
            targets = values + credit(trajectory, values, GAE(lam=0.8), value)
            np.testing.assert_allclose(returns, targets, rtol=1e-6, atol=1e-7)
            number += 1
    assert not batch.returns[batch.mask == 0].any() and not batch.values[batch.mask == 0].any()
    other, _ = credited(groups, dataclasses.replace(PACK, slots=160, targets=128), value=value)
    for number, arrays in by_trajectory(other).items():
        for one, two in zip(arrays, found[number], strict=True):
            np.testing.assert_array_equal(one, two)


def test_with_lambda_one_targets_are_returns_exactly():
    groups = make_groups((3, 2), seed=2)
    batch, _ = credited(groups, PACK)
    rewards = [t.reward.total for group in groups for t in group.trajectories]
    for number, (_, returns, _) in by_trajectory(batch).items():
        assert (returns == np.float32(rewards[number])).all()


def test_faults_take_no_part():
    groups = make_groups((3,), seed=3)
    broken = dataclasses.replace(groups[0].trajectories[1], status="fault")
    members = (groups[0].trajectories[0], broken, groups[0].trajectories[2])
    batch, _ = credited([make_group(members)], PACK)
    whole, _ = credited(groups, PACK)
    found = by_trajectory(batch)
    assert sorted(found) == [0, 2]
    for number, arrays in found.items():
        for one, two in zip(arrays, by_trajectory(whole)[number], strict=True):
            np.testing.assert_array_equal(one, two)


def test_a_member_that_reads_no_values_keeps_its_advantages():
    groups = make_groups((3, 2), seed=2)
    advantages = [GRPO()(group) for group in groups]
    batch, _ = pack(groups, advantages, PACK, version=0)
    changed, _ = with_values(batch, groups, values_by_target(batch), GRPO(), VALUE)
    np.testing.assert_array_equal(changed.advantages, batch.advantages)
    assert changed.returns.any()


# --- Explained variance ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, wanted",
    [
        ([0.0, 0.0, 1.0, 1.0], 1.0),
        ([0.3, 0.3, 0.3, 0.3], 0.0),
        # G - V = (-0.5, -0.5, 0.5, 0.5) / 2 around its mean: a quarter of the variance is left
        ([0.25, 0.25, 0.75, 0.75], 0.75),
        # worse than a constant
        ([1.0, 1.0, 0.0, 0.0], -3.0),
    ],
)
def test_explained_variance_is_that_computed_by_hand(values, wanted):
    returns = np.array([0.0, 0.0, 1.0, 1.0])
    assert explained_variance(np.array(values), returns) == pytest.approx(wanted)


def test_equal_returns_have_no_explained_variance():
    assert explained_variance(np.array([0.1, 0.9]), np.array([0.7, 0.7])) is None
    assert explained_variance(np.zeros(0), np.zeros(0)) is None


def test_explained_variance_is_told_by_turn_and_by_distance_to_the_end():
    turns = (Turn("assistant", 2, 3, ""), Turn("assistant", 5, 7, ""))
    good, bad = (
        dataclasses.replace(three_tokens(), turns=turns, index=index) for index in range(2)
    )
    bad = dataclasses.replace(bad, reward=dataclasses.replace(bad.reward, total=0.0))
    group = make_group([good, bad])
    batch, _ = pack([group], [[0.0, 0.0]], PACK, version=0)
    # the first turn knows nothing, the second one knows the reward
    values = np.zeros(batch.mask.shape, np.float32)
    values[batch.mask > 0] = [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    _, metrics = with_values(batch, [group], values, GAE(), VALUE)
    prefix = "value/explained_variance"
    assert metrics[f"{prefix}_turn_1"] == pytest.approx(0.0)
    assert metrics[f"{prefix}_turn_2"] == pytest.approx(1.0)
    assert f"{prefix}_turn_3" not in metrics
    # G - V = (0.5, 0, 0, -0.5, 0, 0): variance 1/12 of 1/4
    assert metrics[prefix] == pytest.approx(2 / 3)
    assert metrics[f"{prefix}_to_end_0_15"] == pytest.approx(2 / 3)
    assert metrics["value/mean"] == metrics["value/return_mean"] == 0.5
    assert metrics["value/error"] == pytest.approx(np.sqrt(1 / 12))


# --- Config ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(backbone="both"), "backbone='both' is not one of shared, separate"),
        (dict(gamma=1.5), r"gamma=1.5 must be between 0 and 1"),
        (dict(lam=-0.1), r"lam=-0.1 must be between 0 and 1"),
        (dict(clip=0.0), r"clip=0.0 must be positive"),
        (dict(coef=-1.0), r"coef=-1.0 must be at least 0"),
        (dict(pretrain_steps=-1), r"pretrain_steps=-1 must be at least 0"),
        (dict(pretrain_epochs=0), r"pretrain_epochs=0 must be at least 1"),
        (dict(cut=("fault",)), r"cut has 'fault'; it may have \('turn_limit'"),
    ],
)
def test_a_wrong_value_of_the_section_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        ValueConfig(optimizer=OPTIMIZER, **changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(lam=2.0), r"lam=2.0 must be between 0 and 1"),
        (dict(length_alpha=0.0), r"length_alpha=0.0 must be positive"),
        (dict(lam=0.9, length_alpha=0.05), r"both say what lambda is: leave lam out"),
    ],
)
def test_a_wrong_setting_of_the_member_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        GAE(**changes)
