"""Changes of trajectories for tests, and records of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_code.run import trajectory_log
from rl_code.run.trajectory_log import Decode, Words
from rl_code.run.workdir import STORE
from rl_code.store.steps import Item
from rl_code.store.store import GroupStore
from rl_code.types import Group, Trajectory


def with_context(trajectory: Trajectory, index: int = 0, **changes: Any) -> Trajectory:
    """The trajectory with other fields of one of its contexts."""
    contexts = list(trajectory.contexts)
    contexts[index] = dataclasses.replace(contexts[index], **changes)
    return dataclasses.replace(trajectory, contexts=tuple(contexts))


def record_step(workdir: Path, step: int, groups: Sequence[Group]) -> None:
    """Puts groups on record as those of a step that was trained on."""
    store = GroupStore(workdir / STORE, "learner")
    items = [
        Item(
            step, n, 0, len(group.trajectories), "train", None, group.trajectories[0].group, (0, 1)
        )
        for n, group in enumerate(groups)
    ]
    store.plan(items)
    for item, group in zip(items, groups, strict=True):
        store.deliver(item, group)
    store.consume(step, store.read(step), version=step)


def read_with(patch, decode: Decode) -> None:
    """Trajectories are read with this tokenizer's decode, whatever the workdir."""
    patch.setattr(trajectory_log, "words_of", lambda workdir: Words(decode))
