"""What people did as the learner gets it: token in, token out, with the mean of the others off."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from people.feedback.records import AnswerRecord
from people.realtime.training import baselined, groups_of, leave_one_out, spoiled
from rl_code.learner.advantages import group_advantages
from rl_code.types import Reward
from tests.people.feedback.people import answer

ANSWER = answer(user="ada", version=3, logprobs=(-0.5, -0.25), versions=(3, 3))


def groups(answers, advantages=None):
    advantages = [0.0] * len(answers) if advantages is None else advantages
    return groups_of(answers, advantages, [Reward(0.75, {"tab": 0.75})] * len(answers))


def test_a_trajectory_has_what_the_server_recorded():
    (group,), left_out = groups([ANSWER], [0.5])
    (one,) = group.trajectories
    assert left_out == 0 and one.prompt_length == 3
    assert one.tokens.tolist() == [5, 6, 7, 8, 9]
    assert one.sampled.tolist() == [False, False, False, True, True]
    assert one.logprobs.tolist() == [0, 0, 0, -0.5, -0.25]
    assert one.versions.tolist() == [-1, -1, -1, 3, 3]
    (counted,), _ = groups_of([ANSWER], [0.5], [Reward(0.75, {"tab": 0.75})], counts={3: 1})
    assert counted.trajectories[0].versions.tolist() == [-1, -1, -1, 1, 1]
    # the learner is credited with the advantage; the parts of the reward are kept for the record
    assert group_advantages([group], baselined) == [[0.5]]
    assert one.reward.components == {"tab": 0.75}


def turn(id: str, at: float, given, tokens, **fields) -> AnswerRecord:
    logprobs = (-0.1,) * len(tokens)
    changes = dict(logprobs=logprobs, versions=(3,) * len(tokens), kind="chat") | fields
    return dataclasses.replace(ANSWER, id=id, asked_at=at, given=given, tokens=tokens, **changes)


def test_what_stands_before_an_answer_in_its_session_is_read_and_not_trained_on():
    first = turn("a", 1.0, (1, 2), (3, 4))
    second = turn("b", 2.0, (5,), (6,), kept=4)
    # the agent went back behind the first message: another context, which keeps two tokens
    third = turn("c", 3.0, (7,), (8, 9), context=1, parent=0, kept=2)
    fourth = turn("d", 4.0, (10,), (11,), context=1, parent=0, kept=5)
    other = turn("e", 2.5, (5,), (6,), kept=4, user="bob")
    found, left_out = groups([fourth, other, second, third, first])
    whole = {one.task.id: one.trajectories[0] for one in found}
    assert left_out == 1 and list(whole) == ["d", "b", "c", "a"]  # bob's beginning is not known
    assert whole["b"].tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert whole["b"].sampled.tolist() == [False] * 5 + [True]
    assert whole["c"].tokens.tolist() == [1, 2, 7, 8, 9]
    assert whole["d"].tokens.tolist() == [1, 2, 7, 8, 9, 10, 11]
    assert whole["d"].prompt_length == 6


def test_what_another_cycle_trained_on_is_read_again():
    first = turn("a", 1.0, (1, 2), (3, 4))
    cut_off = turn("b", 2.0, (5,), (6,), kept=4, finish_reason="aborted")
    third = turn("c", 3.0, (7,), (8,), kept=6)
    assert groups([third]) == ([], 1)
    rewards = [Reward(0.75, {"tab": 0.75})]
    (found,), left_out = groups_of([third], [0.5], rewards, [cut_off, first])
    (one,) = found.trajectories
    assert left_out == 0 and one.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert one.sampled.tolist() == [False] * 7 + [True] and one.reward.total == 0.5


def test_a_conversation_that_the_server_forgot_is_not_read():
    """After a restart the same session's contexts are counted from 0 again."""
    before = [turn("a", 1.0, (1, 2), (3, 4)), turn("b", 2.0, (5,), (6,), context=1, kept=2)]
    again = [turn("c", 3.0, (11, 12), (13,)), turn("d", 4.0, (14,), (15,), context=1, kept=2)]
    before[1], again[1] = (dataclasses.replace(one, parent=0) for one in (before[1], again[1]))
    found, left_out = groups([*before, *again])
    assert left_out == 0
    assert found[3].trajectories[0].tokens.tolist() == [11, 12, 14, 15]


def test_an_answer_without_a_token_is_left_out():
    assert groups([turn("a", 1.0, (1, 2), ())]) == ([], 1)


def test_the_mean_of_the_others_is_taken_off():
    rewards = np.array([0.75, -0.25, 0.0, 0.75])
    found = leave_one_out(rewards, np.ones(4))
    expected = [r - np.delete(rewards, i).mean() for i, r in enumerate(rewards)]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert found.sum() == pytest.approx(0.0)


def test_who_counts_little_moves_little():
    rewards = np.array([1.0, 0.0, 0.0, 100.0])
    weights = np.array([1.0, 1.0, 1.0, 1e-9])
    found = leave_one_out(rewards, weights)
    np.testing.assert_allclose(found[:3], [1.0, -0.5, -0.5], atol=1e-6)
    assert abs(found[3]) < 1e-6
    assert leave_one_out(np.array([2.0]), np.ones(1)).tolist() == [0.0]
    assert leave_one_out(np.array([2.0, 1.0]), np.zeros(2)).tolist() == [0.0, 0.0]


def test_weights_that_are_bad_on_purpose_are_the_same_each_time():
    model = {"a": jnp.full((64, 64), 2.0), "b": jnp.arange(3)}
    first, again, other = (spoiled(model, 0.5, seed) for seed in ([0, 1], [0, 1], [0, 2]))
    np.testing.assert_array_equal(first["a"], again["a"])
    assert not np.array_equal(first["a"], other["a"])
    # half of the root mean square, which is 2; what is no weight stays
    assert np.std(np.asarray(first["a"])) == pytest.approx(1.0, rel=0.1)
    np.testing.assert_array_equal(first["b"], [0, 1, 2])
