"""Episodes of several contexts, and what must hold of all of them: sampled again, they are the same,
and nothing is held when they are over.
"""

from __future__ import annotations

import dataclasses
import random
import types

import jax
import numpy as np
import pytest

from rl_code.environment.sampled_episode import SampledEpisode
from rl_code.rollout.again import sample_again, versions_of
from rl_code.types import Context, Reward, Trajectory
from tests.rl_code.rollout.small import (
    ENGINE,
    SCARCE,
    Protocol,
    assert_same,
    make_scheduler,
    model_on,
    play,
    task_of,
)
from tests.rl_code.rollout.test_again import DRAFTING, KEY, VERSIONS, models

TASKS = [task_of(seed) for seed in range(4)]
# Engines, and whether keys are computed again when there are new weights.
WAYS = pytest.mark.parametrize(
    ("engine", "recompute"),
    [(ENGINE, True), (dataclasses.replace(DRAFTING, pages=SCARCE.pages), False)],
    ids=["computed again", "kept, scarce, drafts"],
)


class SeveralContexts(SampledEpisode):
    """Records messages in several contexts."""

    def __init__(self, task, group, index):
        super().__init__(task, group, index)
        self.protocol = Protocol()
        self.contexts: list[types.SimpleNamespace] = []
        self.at = 0

    def share(self, length):
        assert length == len(self.task.prompt)

    def begin(self, parent=-1, kept=0):
        """A new context, which is then at work."""
        fields = dict(tokens=[], sampled=[], logprobs=[], versions=[])
        self.contexts.append(types.SimpleNamespace(parent=parent, kept=kept, **fields))
        self.at = len(self.contexts) - 1

    def add(self, tokens, logprobs=None, versions=None):
        """Tokens of the context at work; given ones without log-probabilities."""
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


def assert_same_anywhere(make, played, shards: int) -> None:
    """Episodes are those of ``played`` with few pages and on so many shards."""
    assert_same(play(TASKS, make=make, engine=SCARCE, shards=shards)[0], played)


def assert_sampled_again(make, engine, *, recompute: bool) -> list[Trajectory]:
    """Trajectories that several versions sampled, after each was sampled again bit for bit."""
    scheduler = make_scheduler(engine)
    moments = random.Random(2)
    scheduler.load(models()[0], 0)
    for group in range(5):
        scheduler.submit(task_of(group), make, group=group, group_size=3, key=KEY, tag=group)
    finished = {}
    version = 0
    while scheduler.groups:
        finished |= scheduler.step()
        if version + 1 < VERSIONS and moments.random() < 0.2:
            version += 1
            scheduler.load(models()[version], version, recompute=recompute)
    trajectories = [t for _, group in sorted(finished.items()) for t in group.trajectories]
    several = [t for t in trajectories if len(t.contexts) > 1]
    assert len(several) > 4 and any(len(versions_of(t)) > 1 for t in several)
    for recorded in trajectories:
        again = sample_again(scheduler, recorded, task_of(recorded.group), make, KEY, models())
        for name in ("tokens", "sampled", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(again, name), getattr(recorded, name), name)
        for one, other in zip(again.contexts, recorded.contexts, strict=True):
            assert one.keys == other.keys
            assert (one.parent, one.kept) == (other.parent, other.kept)
    scheduler.close()
    return trajectories


def assert_nothing_held(make) -> None:
    """No row and no page is held when all episodes are over."""
    scheduler = make_scheduler()
    model = model_on(scheduler.engine.mesh)
    way = dict(group_size=3, version=0, key=jax.random.key(1))
    scheduler.rollout(model, [task_of(seed) for seed in range(3)], make, **way)
    assert not scheduler._open.rows
    for allocator in scheduler._pool._shards:
        assert allocator.free == allocator.num_pages
    scheduler.close()
