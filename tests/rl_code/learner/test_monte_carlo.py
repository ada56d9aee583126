"""Credit by continuations against numbers worked out by hand, and its limits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rl_code.learner.advantages import ADVANTAGES, RLOO, group_advantages
from rl_code.learner.monte_carlo import MonteCarlo, borders_of, segments_of
from rl_code.types import Context, Fork, Group
from tests.rl_code.learner.conftest import make_group, make_trajectory

# A prompt of two tokens; messages of 2, 1 and 2 tokens, with answers of one token between.
SAMPLED = [0, 0, 1, 1, 0, 1, 0, 1, 1]
FIRST, SECOND = Fork(0, 1, (5,)), Fork(0, 2, (7,))


def member(index=0, reward=0.0, **changes):
    tokens = np.arange(len(SAMPLED))
    made = make_trajectory(tokens, SAMPLED, prompt_length=2, index=index, reward=reward)
    return dataclasses.replace(made, **changes)


def continuations(fork, rewards, first, **changes):
    return [
        member(first + at, reward, fork=fork, solved=reward == 1.0, **changes)
        for at, reward in enumerate(rewards)
    ]


def group_of(trajectories, continued):
    return dataclasses.replace(make_group(trajectories), continuations=tuple(continued))


def test_credit_equals_hand_computed_numbers():
    # V(prompt) of the first is the mean of the others, 0.25; V of its borders 0.5 and 0.75
    members = [member(0, 1.0), member(1, 0.0), member(2, 0.5)]
    ends = [*continuations(FIRST, [1.0, 0.0], 3), *continuations(SECOND, [1, 1, 0, 1.0], 5)]
    first, second, third = MonteCarlo()(group_of(members, ends))
    np.testing.assert_array_equal(first, np.float32([0.25, 0.25, 0.25, 0.25, 0.25]))
    assert first.dtype == np.float32 and (second, third) == (-0.75, 0.0)
    # a border of which nothing is known joins the turns at both its sides: 0.5 of 2 turns
    (first, _, _) = MonteCarlo()(group_of(members, ends[2:]))
    np.testing.assert_array_equal(first, np.float32([0.5, 0.5, 0.5, 0.25, 0.25]))


def test_credits_of_a_trajectory_add_up_to_that_of_its_end():
    """Each step once: the differences telescope to the return minus the value of the prompt."""
    members = [member(0, 1.0), member(1, 0.0)]
    ends = [*continuations(FIRST, [0.3, 0.9], 2), *continuations(SECOND, [0.1], 4)]
    credit = MonteCarlo()(group_of(members, ends))[0]
    steps = credit[[0, 2, 3]]  # a token of each turn
    np.testing.assert_allclose(steps, [0.6, -0.5, 0.9], rtol=1e-6)
    assert steps.sum() == pytest.approx(RLOO()(make_group(members))[0])


def test_without_continuations_it_is_rloo():
    group = make_group([member(0, 1.0), member(1, 0.25), member(2, 0.0)])
    for continued in (None, ()):
        found = MonteCarlo()(dataclasses.replace(group, continuations=continued))
        np.testing.assert_allclose(found, RLOO()(group), rtol=1e-6)


def test_faults_of_continuations_count_for_nothing():
    members = [member(0, 1.0), member(1, 0.0)]
    good = continuations(FIRST, [1.0, 0.0], 2)
    bad = continuations(FIRST, [9.0], 8, status="fault")
    np.testing.assert_array_equal(
        MonteCarlo()(group_of(members, good + bad))[0], MonteCarlo()(group_of(members, good))[0]
    )
    (border,) = borders_of(group_of(members, good + bad), 0)
    assert (border.value, border.share, border.returns) == (0.5, 0.5, (1.0, 0.0))
    assert borders_of(group_of(members, bad), 0) == []


def test_turns_before_the_first_border_get_nothing_where_the_prompt_has_no_value():
    alone = [member(0, 1.0), member(1, 0.0, status="fault")]
    ends = continuations(FIRST, [0.5], 2)
    (first, fault) = group_advantages([group_of(alone, ends)], MonteCarlo())[0]
    np.testing.assert_array_equal(first, np.float32([0, 0, 0.5, 0.5, 0.5]))
    assert fault == 0.0
    assert MonteCarlo()(make_group(alone[:1])) == [0.0]


def test_equal_values_but_for_rounding_give_exactly_nothing():
    members = [member(0, 0.3), member(1, 0.1 + 0.2)]
    ends = continuations(FIRST, [0.1 + 0.2, 0.3], 2)
    assert not np.any(MonteCarlo()(group_of(members, ends))[0])


def test_tokens_of_sub_agents_belong_to_the_turn_that_asked():
    own = np.array(SAMPLED, bool)
    sub = [Context(np.arange(3), np.ones(3, bool), np.zeros(3), np.zeros(3)) for _ in range(2)]
    trajectory = member()
    context = dataclasses.replace(trajectory.contexts[0], sampled=own)
    trajectory = dataclasses.replace(trajectory, contexts=(context, *sub))
    # the first sub-agent was there at the first border, the second one was asked behind it
    group = Group(
        make_group([trajectory]).task,
        (trajectory,),
        tuple(continuations(Fork(0, 1, (5, 3)), [1.0], 1)),
    )
    found = segments_of(trajectory, borders_of(group, 0))
    assert found.tolist() == [0, 0, 1, 1, 1, *[0] * 3, *[1] * 3]
    assert "monte_carlo" in ADVANTAGES
