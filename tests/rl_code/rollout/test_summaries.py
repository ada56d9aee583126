"""Episodes whose contexts give way to one that begins with a summary: nothing depends on the batch,
and all is sampled again.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import types

import jax
import numpy as np
import pytest

from rl_code.environment.frames import Elsewhere, Summarised
from rl_code.environment.sampled_episode import SampledEpisode
from rl_code.rollout.admission import Admission
from rl_code.rollout.again import sample_again, versions_of
from rl_code.rollout.contexts import context_key, with_keys
from rl_code.rollout.rows import OpenGroup, Row
from rl_code.types import Context, Reward, Trajectory
from tests.rl_code.rollout.small import (
    ENGINE,
    MODEL,
    SCARCE,
    STOP,
    Protocol,
    assert_same,
    assert_trained_alike,
    make_scheduler,
    model_on,
    play,
    task_of,
)
from tests.rl_code.rollout.test_again import DRAFTING, KEY, VERSIONS, models

FAST = dataclasses.replace(ENGINE, decode_steps=2)
# A context of so many tokens is summarised, and episodes end after so many messages.
TRIGGER, MESSAGES = 24, 6


class Summarising(SampledEpisode):
    """Answers with a message's own tokens turned around. In a long context the next message is a
    summary. After the first one a sub-agent is asked, which ends after one message.
    """

    def __init__(self, task, group, index):
        super().__init__(task, group, index)
        self.protocol = Protocol()
        self.contexts: list[types.SimpleNamespace] = []
        self.at = self.messages = 0
        self.due = False

    def share(self, length):
        assert length == len(self.task.prompt)

    @property
    def budget(self):
        return 4

    @property
    def length(self):
        """Places of the whole context."""
        context = self.contexts[self.at]
        return len(context.tokens) + context.kept

    def start(self):
        self._begin(-1, 0)
        self._add(self.task.prompt)
        return list(self.task.prompt)

    def step(self, tokens, logprobs, versions):
        assert 0 < len(tokens) <= self.budget
        assert STOP not in tokens[:-1]
        self._add(tokens, logprobs, versions)
        if self.due:
            return self._summarised(tokens)
        if self.at and self.contexts[self.at].parent < 0:  # of the sub-agent
            self.at -= 1
            self._add([STOP, *tokens])
            return Elsewhere(self.at, [STOP, *tokens])
        self.messages += 1
        if self.messages == MESSAGES:
            return None
        if len(self.contexts) == 2:
            self._begin(-1, 0)
            self._add([9, 8, 7])
            return Elsewhere(self.at, [9, 8, 7])
        answer = [STOP, *reversed(tokens)]
        self._add(answer)
        self.due = self.length >= TRIGGER
        return answer

    def _summarised(self, tokens):
        self.due = False
        self._begin(self.at, len(self.task.prompt))
        self._add([*tokens, STOP])
        return Summarised(self.at, [*self.task.prompt, *tokens, STOP])

    def _begin(self, parent, kept):
        fields = dict(tokens=[], sampled=[], logprobs=[], versions=[])
        self.contexts.append(types.SimpleNamespace(parent=parent, kept=kept, **fields))
        self.at = len(self.contexts) - 1

    def _add(self, tokens, logprobs=None, versions=None):
        context = self.contexts[self.at]
        context.tokens += tokens
        context.sampled += [logprobs is not None] * len(tokens)
        context.logprobs += logprobs or [0.0] * len(tokens)
        context.versions += versions or [-1] * len(tokens)

    def finish(self):
        contexts = tuple(
            Context(
                np.array(one.tokens, np.int32),
                np.array(one.sampled, bool),
                np.array(one.logprobs, np.float32),
                np.array(one.versions, np.int32),
                one.parent,
                one.kept,
            )
            for one in self.contexts
        )
        prompt = len(self.task.prompt)
        reward = Reward(0.0, {})
        return Trajectory(
            self.task.id, self.group, self.index, contexts, prompt, (), "turn_limit", reward
        )


TASKS = [task_of(seed) for seed in range(4)]


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
    return play(TASKS, make=Summarising, engine=FAST)[0]


@pytest.mark.long
def test_every_context_is_what_the_trainer_computes_whatever_else_is_in_the_batch():
    together = played()
    trajectories = [t for group in together for t in group.trajectories]
    summarised = [t for t in trajectories if any(c.parent >= 0 for c in t.contexts)]
    assert len(summarised) > 4 and any(len(t.contexts) > 3 for t in summarised)
    wholes = [whole(t, index) for t in trajectories for index in range(len(t.contexts))]
    assert_trained_alike([one for one in wholes if one.sampled.any()], MODEL)
    alone, _ = play(TASKS[:1], make=Summarising, engine=FAST)
    assert_same(alone, together[:1])


@pytest.mark.long
@pytest.mark.parametrize("shards", [1, 2])
def test_they_are_the_same_with_few_pages_and_on_two_shards(shards):
    engine = dataclasses.replace(SCARCE, decode_steps=2)
    assert_same(play(TASKS, make=Summarising, engine=engine, shards=shards)[0], played())


@pytest.mark.parametrize(
    ("engine", "recompute"),
    [
        (FAST, False),
        (FAST, True),
        (dataclasses.replace(SCARCE, decode_steps=2), False),
        (DRAFTING, False),
    ],
    ids=["kept", "computed again", "kept, scarce", "kept, drafts"],
)
@pytest.mark.long
def test_an_episode_with_summaries_is_sampled_again_bit_for_bit(engine, recompute):
    scheduler = make_scheduler(engine)
    moments = random.Random(2)
    scheduler.load(models()[0], 0)
    for group in range(5):
        scheduler.submit(task_of(group), Summarising, group=group, group_size=3, key=KEY, tag=group)
    finished = {}
    version = 0
    while scheduler.groups:
        finished |= scheduler.step()
        if version + 1 < VERSIONS and moments.random() < 0.2:
            version += 1
            scheduler.load(models()[version], version, recompute=recompute)
    trajectories = [t for _, group in sorted(finished.items()) for t in group.trajectories]
    later = [c for t in trajectories for c in t.contexts if c.parent >= 0]
    assert len(later) > 4
    assert any(len(versions_of(t)) > 1 for t in trajectories)
    if not recompute:
        assert any(context.keys for context in later)
    for recorded in trajectories:
        task = task_of(recorded.group)
        again = sample_again(scheduler, recorded, task, Summarising, KEY, models())
        for name in ("tokens", "sampled", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(again, name), getattr(recorded, name), name)
        for one, other in zip(again.contexts, recorded.contexts, strict=True):
            assert one.keys == other.keys
            assert (one.parent, one.kept) == (other.parent, other.kept)
    scheduler.close()


@pytest.mark.long
def test_nothing_is_held_when_all_is_over():
    scheduler = make_scheduler(FAST)
    model = model_on(scheduler.engine.mesh)
    tasks = [task_of(seed) for seed in range(3)]
    scheduler.rollout(model, tasks, Summarising, group_size=3, version=0, key=jax.random.key(1))
    assert not scheduler._open.rows
    for allocator in scheduler._pool._shards:
        assert allocator.free == allocator.num_pages
    scheduler.close()


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
