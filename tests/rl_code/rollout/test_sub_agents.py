"""Episodes whose contexts take turns: nothing depends on the batch, and all is sampled again."""

from __future__ import annotations

import dataclasses
import functools
import random
import types

import jax
import numpy as np
import pytest

from rl_code.environment.frames import Elsewhere
from rl_code.environment.sampled_episode import SampledEpisode
from rl_code.rollout.again import sample_again, versions_of
from rl_code.rollout.contexts import context_key
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


class Nested(SampledEpisode):
    """Answers with a message's own tokens turned around. After a message of an odd number of tokens a
    sub-agent is asked, which begins with the episode's own prompt and ends after two messages.
    """

    def __init__(self, task, group, index, turns=3):
        super().__init__(task, group, index)
        self.turns = turns
        self.protocol = Protocol()
        self.contexts = [types.SimpleNamespace(tokens=[], sampled=[], logprobs=[], versions=[])]
        self.at = 0
        self.messages = [0]

    def share(self, length):
        assert length == len(self.task.prompt)

    @property
    def budget(self):
        return min(5, 60 - len(self.contexts[self.at].tokens))

    def start(self):
        self._add(self.task.prompt)
        return list(self.task.prompt)

    def step(self, tokens, logprobs, versions):
        assert 0 < len(tokens) <= self.budget
        assert STOP not in tokens[:-1]
        self._add(tokens, logprobs, versions)
        self.messages[self.at] += 1
        if self.at and self.messages[self.at] == 2:  # of the sub-agent
            self.at = 0
            return self._elsewhere([STOP, *tokens])
        if not self.at and len(tokens) % 2 and len(self.contexts) < 4:
            self.contexts.append(
                types.SimpleNamespace(tokens=[], sampled=[], logprobs=[], versions=[])
            )
            self.messages.append(0)
            self.at = len(self.contexts) - 1
            return self._elsewhere(list(self.task.prompt))
        if self.messages[self.at] >= self.turns:
            return None
        answer = [STOP, *reversed(tokens)]
        self._add(answer)
        return answer

    def _elsewhere(self, tokens):
        self._add(tokens)
        return Elsewhere(self.at, tokens)

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
            )
            for one in self.contexts
        )
        prompt = len(self.task.prompt)
        reward = Reward(0.0, {})
        return Trajectory(
            self.task.id, self.group, self.index, contexts, prompt, (), "turn_limit", reward
        )


TASKS = [task_of(seed) for seed in range(4)]


@functools.cache
def played():
    return play(TASKS, make=Nested, engine=FAST)[0]


@pytest.mark.long
def test_every_context_is_what_the_trainer_computes_whatever_else_is_in_the_batch():
    together = played()
    trajectories = [t for group in together for t in group.trajectories]
    assert sum(len(t.contexts) > 1 for t in trajectories) > 4
    alike = [types.SimpleNamespace(**vars(c)) for t in trajectories for c in t.contexts]
    assert_trained_alike([c for c in alike if c.sampled.any()], MODEL)
    alone, _ = play(TASKS[:1], make=Nested, engine=FAST)
    assert_same(alone, together[:1])


@pytest.mark.long
@pytest.mark.parametrize("shards", [1, 2])
def test_contexts_that_take_turns_are_the_same_with_few_pages_and_on_two_shards(shards):
    engine = dataclasses.replace(SCARCE, decode_steps=2)
    assert_same(play(TASKS, make=Nested, engine=engine, shards=shards)[0], played())


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
def test_an_episode_of_several_contexts_is_sampled_again_bit_for_bit(engine, recompute):
    scheduler = make_scheduler(engine)
    moments = random.Random(2)
    scheduler.load(models()[0], 0)
    for group in range(5):
        scheduler.submit(task_of(group), Nested, group=group, group_size=3, key=KEY, tag=group)
    finished = {}
    version = 0
    while scheduler.groups:
        finished |= scheduler.step()
        if version + 1 < VERSIONS and moments.random() < 0.2:
            version += 1
            scheduler.load(models()[version], version, recompute=recompute)
    trajectories = [t for _, group in sorted(finished.items()) for t in group.trajectories]
    nested = [t for t in trajectories if len(t.contexts) > 1]
    assert len(nested) > 4
    assert any(len(versions_of(t)) > 1 for t in nested)
    for recorded in trajectories:
        again = sample_again(scheduler, recorded, task_of(recorded.group), Nested, KEY, models())
        for name in ("tokens", "sampled", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(again, name), getattr(recorded, name), name)
        for one, other in zip(again.contexts, recorded.contexts, strict=True):
            assert one.keys == other.keys
    scheduler.close()


def test_nothing_is_held_when_all_is_over():
    scheduler = make_scheduler(FAST)
    model = model_on(scheduler.engine.mesh)
    tasks = [task_of(seed) for seed in range(3)]
    way = dict(group_size=3, version=0, key=jax.random.key(1))
    scheduler.rollout(model, tasks, Nested, **way)
    assert not scheduler._open.rows
    for allocator in scheduler._pool._shards:
        assert allocator.free == allocator.num_pages
    scheduler.close()
