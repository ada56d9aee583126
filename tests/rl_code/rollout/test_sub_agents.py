"""Episodes whose contexts take turns: nothing depends on the batch, and all is sampled again."""

from __future__ import annotations

import functools
import types

import numpy as np
import pytest

from rl_code.environment.frames import Elsewhere
from rl_code.rollout.contexts import context_key
from tests.rl_code.rollout.several_contexts import (
    TASKS,
    WAYS,
    SeveralContexts,
    assert_nothing_held,
    assert_same_anywhere,
    assert_sampled_again,
)
from tests.rl_code.rollout.small import MODEL, STOP, assert_same, assert_trained_alike, play


class Nested(SeveralContexts):
    """Answers with a message's own tokens turned around. After a message of an odd number of tokens a
    sub-agent is asked, which begins with the episode's own prompt and ends after two messages.
    """

    def __init__(self, task, group, index, turns=3):
        super().__init__(task, group, index)
        self.turns = turns
        self.begin()
        self.messages = [0]

    @property
    def budget(self):
        return min(5, 60 - len(self.contexts[self.at].tokens))

    def start(self):
        self.add(self.task.prompt)
        return list(self.task.prompt)

    def step(self, tokens, logprobs, versions):
        assert 0 < len(tokens) <= self.budget
        assert STOP not in tokens[:-1]
        self.add(tokens, logprobs, versions)
        self.messages[self.at] += 1
        if self.at and self.messages[self.at] == 2:  # of the sub-agent
            self.at = 0
            return self._elsewhere([STOP, *tokens])
        if not self.at and len(tokens) % 2 and len(self.contexts) < 4:
            self.begin()
            self.messages.append(0)
            return self._elsewhere(list(self.task.prompt))
        if self.messages[self.at] >= self.turns:
            return None
        answer = [STOP, *reversed(tokens)]
        self.add(answer)
        return answer

    def _elsewhere(self, tokens):
        self.add(tokens)
        return Elsewhere(self.at, tokens)


@functools.cache
def played():
    return play(TASKS, make=Nested)[0]


@pytest.mark.long
def test_every_context_is_what_the_trainer_computes_whatever_else_is_in_the_batch():
    together = played()
    trajectories = [t for group in together for t in group.trajectories]
    assert sum(len(t.contexts) > 1 for t in trajectories) > 4
    alike = [types.SimpleNamespace(**vars(c)) for t in trajectories for c in t.contexts]
    assert_trained_alike([c for c in alike if c.sampled.any()], MODEL)
    alone, _ = play(TASKS[:1], make=Nested)
    assert_same(alone, together[:1])


@pytest.mark.long
@pytest.mark.parametrize("shards", [1, 2])
def test_contexts_that_take_turns_are_the_same_with_few_pages_and_on_two_shards(shards):
    assert_same_anywhere(Nested, played(), shards)


def test_a_context_with_the_same_prompt_draws_other_numbers():
    assert context_key((3, 7), 0) == (3, 7)
    keys = [context_key((3, 7), number) for number in range(20)]
    assert len(set(keys)) == 20
    assert all(0 <= word < 2**32 for key in keys for word in key)
    pairs = [
        (t.contexts[0].tokens, context.tokens)
        for group in played()
        for t in group.trajectories
        for context in t.contexts[1:]
    ]
    different = [not np.array_equal(a[: len(b)], b[: len(a)]) for a, b in pairs]
    assert np.mean(different) > 0.5


@WAYS
@pytest.mark.long
def test_an_episode_of_several_contexts_is_sampled_again_bit_for_bit(engine, recompute):
    assert_sampled_again(Nested, engine, recompute=recompute)


def test_nothing_is_held_when_all_is_over():
    assert_nothing_held(Nested)
