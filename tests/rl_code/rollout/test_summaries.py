"""Episodes whose contexts give way to one that begins with a summary: nothing depends on the batch,
and all is sampled again.
"""

from __future__ import annotations

import functools
import types

import numpy as np
import pytest

from rl_code.environment.frames import Elsewhere, Summarised
from rl_code.rollout.admission import Admission
from rl_code.rollout.contexts import context_key, with_keys
from rl_code.rollout.rows import OpenGroup, Row
from rl_code.types import Context, Reward, Trajectory
from tests.rl_code.rollout.several_contexts import (
    TASKS,
    WAYS,
    SeveralContexts,
    assert_nothing_held,
    assert_same_anywhere,
    assert_sampled_again,
)
from tests.rl_code.rollout.small import ENGINE, MODEL, STOP, assert_same, assert_trained_alike, play

# A context of so many tokens is summarised, and episodes end after so many messages.
TRIGGER, MESSAGES = 24, 6


class Summarising(SeveralContexts):
    """Answers with a message's own tokens turned around. In a long context the next message is a
    summary. After the first one a sub-agent is asked, which ends after one message.
    """

    def __init__(self, task, group, index):
        super().__init__(task, group, index)
        self.messages = 0
        self.due = False

    @property
    def budget(self):
        return 4

    @property
    def length(self):
        """Places of the whole context."""
        context = self.contexts[self.at]
        return len(context.tokens) + context.kept

    def start(self):
        self.begin(-1, 0)
        self.add(self.task.prompt)
        return list(self.task.prompt)

    def step(self, tokens, logprobs, versions):
        assert 0 < len(tokens) <= self.budget
        assert STOP not in tokens[:-1]
        self.add(tokens, logprobs, versions)
        if self.due:
            return self._summarised(tokens)
        if self.at and self.contexts[self.at].parent < 0:  # of the sub-agent
            self.at -= 1
            self.add([STOP, *tokens])
            return Elsewhere(self.at, [STOP, *tokens])
        self.messages += 1
        if self.messages == MESSAGES:
            return None
        if len(self.contexts) == 2:
            self.begin(-1, 0)
            self.add([9, 8, 7])
            return Elsewhere(self.at, [9, 8, 7])
        answer = [STOP, *reversed(tokens)]
        self.add(answer)
        self.due = self.length >= TRIGGER
        return answer

    def _summarised(self, tokens):
        self.due = False
        self.begin(self.at, len(self.task.prompt))
        self.add([*tokens, STOP])
        return Summarised(self.at, [*self.task.prompt, *tokens, STOP])


def whole(trajectory, index):
    """Context ``index`` as a row of its own: what it keeps is given."""
    context = trajectory.contexts[index]
    tokens = trajectory.whole(index)
    before = len(tokens) - len(context.tokens)
    return types.SimpleNamespace(
        tokens=tokens,
        sampled=np.concatenate([np.zeros(before, bool), context.sampled]),
        logprobs=np.concatenate([np.zeros(before, np.float32), context.logprobs]),
    )


@functools.cache
def played():
    return play(TASKS, make=Summarising)[0]


@pytest.mark.long
def test_every_context_is_what_the_trainer_computes_whatever_else_is_in_the_batch():
    together = played()
    trajectories = [t for group in together for t in group.trajectories]
    summarised = [t for t in trajectories if any(c.parent >= 0 for c in t.contexts)]
    assert len(summarised) > 4 and any(len(t.contexts) > 3 for t in summarised)
    wholes = [whole(t, index) for t in trajectories for index in range(len(t.contexts))]
    assert_trained_alike([one for one in wholes if one.sampled.any()], MODEL)
    alone, _ = play(TASKS[:1], make=Summarising)
    assert_same(alone, together[:1])


@pytest.mark.long
@pytest.mark.parametrize("shards", [1, 2])
def test_they_are_the_same_with_few_pages_and_on_two_shards(shards):
    assert_same_anywhere(Summarising, played(), shards)


@WAYS
@pytest.mark.long
def test_an_episode_with_summaries_is_sampled_again_bit_for_bit(engine, recompute):
    trajectories = assert_sampled_again(Summarising, engine, recompute=recompute)
    later = [c for t in trajectories for c in t.contexts if c.parent >= 0]
    assert len(later) > 4
    if not recompute:
        assert any(context.keys for context in later)


@pytest.mark.long
def test_nothing_is_held_when_all_is_over():
    assert_nothing_held(Summarising)


def test_keys_count_places_of_the_whole_context():
    def context(parent, kept, count):
        ones = np.ones(count)
        fields = [ones.astype(kind) for kind in (np.int32, bool, np.float32, np.int32)]
        return Context(*fields, parent, kept)

    contexts = (context(-1, 0, 9), context(0, 5, 4))
    t = Trajectory("t", 0, 0, contexts, 5, (), "turn_limit", Reward(0.0, {}))
    # nine places, of which the last has no key
    assert with_keys(t, [(0, 1), (7, 2)], 1).contexts[1].keys == ((0, 1), (7, 2))
    assert with_keys(t, [(0, 1), (8, 2)], 1).contexts[1].keys is None


class Pool:
    """Pages that nobody holds: notes what is let go."""

    def __init__(self):
        self.engine = types.SimpleNamespace(config=ENGINE)
        self.forgotten, self.saved = [], []

    def runs(self):
        return None

    def forget(self, row):
        row.cached = 0
        self.forgotten.append(row.context)

    def save(self, row, on_device):
        self.saved.append(row.context)

    def clear(self):
        pass

    def new_weights(self):
        pass

    def drop_ahead(self, row):
        pass


def test_a_context_that_is_given_up_keeps_what_is_on_record_of_its_keys():
    pool = Pool()
    admission = Admission(pool, pool, 4)
    admission.new_weights(3, recompute=False)
    group = OpenGroup(key=(3, 7), prompt=5)
    first = Row(episode=object(), group=group, key=(3, 7), prompt=5, keys=[(0, 3)])
    group.rows = [first]
    admission.rows = [first]
    first.add(list(range(9)), None)
    first.cached = 8
    later = admission.move(first, Summarised(1, [0, 1, 2, 3, 4, 20, 21]))
    assert admission.rows == [later] and pool.forgotten == [0] and not pool.saved
    assert (later.context, later.prompt, later.tokens) == (1, 5, [])
    assert later.contexts == first.contexts == [first, later]
    assert later.key == context_key((3, 7), 1)
    admission.new_weights(4, recompute=False)
    assert first.keys == [(0, 3)] and later.keys == [(0, 3), (0, 4)]
    # the sub-agent of a later context comes back to it, and nobody to the first
    child = admission.move(later, Elsewhere(2, [9, 8, 7]))
    assert admission.move(child, Elsewhere(1, [5])) is later
    # keys that are computed again have one version
    admission.new_weights(5, recompute=True)
    assert first.keys == [(0, 5)]
