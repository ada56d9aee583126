"""Whole runs that train for real and sample with a stand-in, whose tokens and rewards are a function
of the item: what tests of resuming, forking, replaying and comparing runs share.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import quickstart
from models.families import PRESETS
from rl_code.config.read_config import build
from rl_code.learner import learner as learner_lib
from rl_code.learner.learner import Learner
from rl_code.metrics.values import read_metrics
from rl_code.recording.replay_training import Replayed, replay
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.wording import Wording
from rl_code.run.workdir import STORE
from rl_code.store import group_records
from rl_code.store.store import GroupStore
from rl_code.types import Group
from tests.models.small import narrow_preset
from tests.rl_code.repeatable import repeatable
from tests.rl_code.rollout.test_actor import FakeScheduler, prompt_of
from tests.rl_code.store.groups import out_of_shards, put_group
from tests.rl_code.trajectories import with_context

STEPS = 5
VOCAB = 64


def make_config(mode: str, k: int) -> RunConfig:
    """The quickstart's smoke config with a smaller model, a batch of a few tokens and nothing else
    to do.
    """
    settings = quickstart.get_config("smoke")
    settings.suites = ()
    settings.sft = None
    settings.tokenizer.update(texts=20, vocab_size=300)
    settings.train.update(steps=STEPS, tasks_per_step=2, group_size=4, micro_batches=1)
    settings.train.pack.update(rows=2, slots=48, targets=32)
    settings.train.optimizer.update(schedule="constant", warmup_steps=0, learning_rate=0.01)
    settings.rollout.dtype = "bfloat16"
    settings.checkpoint.update(every=2, keep=3, best="reward/total")
    settings.metrics = dict(extra=("sampled_lengths",))
    settings.asynchrony = dict(mode=mode, max_staleness=k)
    return build(RunConfig, settings)


@contextlib.contextmanager
def with_stand_in() -> Iterator[None]:
    """Replaces the model and what samples; nothing is compiled twice, and nobody cuts the power."""
    run_init = Run.init_model
    made = []

    def init_model(run: Run):
        made.extend([] if made else [run_init(run)])
        run._keep_model()
        # through the host, since a copy is a program for each shape
        return jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), made[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", narrow_preset())
        patch.setattr(Run, "init_model", init_model)
        patch.setattr(Run, "scheduler", lambda *_, **ways: FakeScheduler(vocab=VOCAB))
        patch.setattr(Wording, "prompt", lambda wording, task, *_: prompt_of(task, VOCAB).tolist())
        for name in ("make_update", "make_token_values", "make_value_update"):
            patch.setattr(learner_lib, name, functools.cache(getattr(learner_lib, name)))
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def replayed(
    workdir: Path, start: int = 0, end: int | None = None, config: RunConfig | None = None
) -> list[Replayed]:
    """What a replay finds; only the last state is still good."""
    with (
        Run(config or make_config("one_step", 1), workdir, "learner") as run,
        jax.set_mesh(run.mesh),
    ):
        return list(replay(run, start, end))


def sameness(steps: list[Replayed]) -> dict[int, bool]:
    """By step."""
    return {step.step: step.same for step in steps}


def deterministic(workdir: Path) -> list[dict]:
    return [repeatable(row) for row in read_metrics(workdir)]


def change_token(workdir: Path, step: int) -> None:
    """Changes one sampled token of a group that is learned from; the record stays valid."""
    store = GroupStore(workdir / STORE)
    record = next(
        r for r in store.read(step) if len({t.reward.total for t in r.group.trajectories}) > 1
    )
    first, *others = record.group.trajectories
    tokens = first.tokens.copy()
    place = np.flatnonzero(first.sampled)[0]
    tokens[place] = (tokens[place] + 1) % VOCAB
    group = Group(record.group.task, (with_context(first, tokens=tokens), *others))
    data = group_records.encode(step, record.number, record.actor, record.when, group)
    out_of_shards(store.folder)
    put_group(store.folder, step, record.number, data)


def strike(patch: pytest.MonkeyPatch, at: int, blow) -> None:
    """blow() instead of, or before, the learner's update of a step, once."""
    call = Learner.__call__
    done = []

    def struck(learner, state, groups, version, *rest, **more):
        if version == at and not done:
            done.append(version)
            blow()
        return call(learner, state, groups, version, *rest, **more)

    patch.setattr(Learner, "__call__", struck)


def fail() -> None:
    raise OSError("struck")
