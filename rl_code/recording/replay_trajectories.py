"""Samples recorded trajectories again, with the weights that sampled them and real tools."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import jax

from rl_code.config.read_config import ConfigError
from rl_code.recording import trajectory_difference
from rl_code.recording.recorded_versions import RecordedVersions
from rl_code.recording.replay_training import on_record
from rl_code.recording.trajectory_difference import Difference
from rl_code.rollout.again import sample_again, versions_of
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import ACTOR, STORE
from rl_code.store.group_records import GroupRecord
from rl_code.store.steps import Item
from rl_code.store.store import GroupStore
from rl_code.types import Trajectory


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A group on record, and the item that it answers."""

    item: Item
    record: GroupRecord

    @property
    def role(self) -> Literal["all", "actor"]:
        """The role of the process that sampled it, which says on which devices."""
        return "all" if self.record.actor.name == ACTOR else "actor"


@dataclasses.dataclass(frozen=True)
class Again:
    """A trajectory that was sampled again."""

    recorded: Trajectory
    now: Trajectory
    # where they part first; None if they are equal
    difference: Difference | None


def find(workdir: Path, step: int, task: str) -> Recorded:
    """The group of a step.

    task: its number in the step, or the id of its task. Raises ConfigError, which says what is on
    record, when there is none.
    """
    store = GroupStore(workdir / STORE)
    if not store.is_consumed(step):
        raise ConfigError(f"--step={step}: not on record in {workdir}; {on_record(workdir)}")
    items = store.items(step)
    if task.isdecimal() and int(task) < len(items):
        return Recorded(items[int(task)], store.record(step, int(task)))
    ids = []
    for item in items:
        record = store.record(step, item.number)
        ids.append(record.group.task.id)
        if record.group.task.id == task:
            return Recorded(item, record)
    raise ConfigError(
        f"--task={task}: step {step} of {workdir} has {len(items)} groups, numbered from 0, of "
        f"tasks {', '.join(ids)}"
    )


def _demonstrated_again(run: Run, found: Recorded, recorded: Trajectory) -> Trajectory:
    """A demonstration as it is played now. Raises ConfigError."""
    (version,) = set(recorded.versions[recorded.sampled].tolist())
    made = run.demonstrations.demonstrator(run.tokenizer, run.episode)
    if made is None:
        raise ConfigError(
            f"config.train.demonstrations = None: task {recorded.task_id!r} trajectory "
            f"{recorded.index} is a demonstration, which cannot be played again without"
        )
    with contextlib.closing(made) as demonstrator:
        return demonstrator.play(
            found.record.group.task, recorded.group, recorded.index, found.item.seed, version
        )


def play_again(
    config: RunConfig,
    workdir: Path,
    found: Recorded,
    samples: Sequence[int],
) -> Iterator[Again]:
    """Trajectories of a group, one after another; continuations stand behind the others.

    config: that of the step. Raises StoreError when the weights that sampled them can neither be
    read nor made again, and ConfigError for a run whose episodes an agent of others plays.
    """
    if config.harness is not None:
        raise ConfigError(
            f"config.harness = {config.harness.name!r}: what an agent of others asks for is not on "
            "record before it asks, so its trajectories cannot be sampled again; training on them "
            "can be replayed: leave out --step"
        )
    if config.rollout.engine.name == "vllm":
        raise ConfigError(
            "config.rollout.engine.name = 'vllm': vLLM does not give the same token for the same "
            "key, so what it sampled cannot be sampled again; training on it can be replayed: "
            "leave out --step"
        )
    trajectories = [found.record.group.all[sample] for sample in samples]
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(Run(config, workdir, found.role))
        # Training is repeated on the learner's devices, of which an actor has none.
        learner = run
        if found.role == "actor":
            learner = stack.enter_context(Run(config, workdir, "learner"))
        stack.enter_context(jax.set_mesh(run.mesh))
        sampled = [t for t in trajectories if not t.demonstrated]
        wanted = sorted({version for t in sampled for version in versions_of(t)})
        models = RecordedVersions(learner, run).get(wanted) if sampled else {}
        scheduler = run.scheduler(config.rollout.sampling)
        run.recall(trajectories)
        for recorded in trajectories:
            if recorded.demonstrated:
                now = _demonstrated_again(run, found, recorded)
                yield Again(recorded, now, trajectory_difference.of_trajectories(recorded, now))
                continue
            now = sample_again(
                scheduler,
                recorded,
                found.record.group.task,
                run.episode,
                found.item.seed,
                models,
            )
            yield Again(recorded, now, trajectory_difference.of_trajectories(recorded, now))
