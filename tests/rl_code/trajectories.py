"""Changes of trajectories for tests, and records of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_code.run import trajectory_log
from rl_code.run.trajectory_log import Decode, Words
from rl_code.run.workdir import STORE
from rl_code.store.steps import Item
from rl_code.store.store import GroupStore
from rl_code.types import (
    Context,
    Group,
    Reward,
    Task,
    Tests,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)


def bytes_of(ids: Iterable[int]) -> str:
    """Ids that are bytes as text."""
    return bytes(ids).decode("utf-8", "replace")


def group_of_one(completion: bytes = b"return 1", logprob: float = -0.5) -> Group:
    """A group of one trajectory that says ``completion``, whose tokens are its bytes."""
    none = Tests()
    task = Task(
        "t/1",
        ({"role": "user", "content": "x"},),
        {},
        "a.py",
        "f",
        none,
        none,
        {"a.py": "pass"},
    )
    tokens = np.frombuffer(b"fix" + completion, np.uint8).astype(np.int32)
    sampled = np.arange(len(tokens)) >= 3
    call = ToolCall("write_file", {"content": "x"})
    turns = (
        Turn("prompt", 0, 3, "fix"),
        Turn(
            "assistant",
            3,
            len(tokens),
            bytes_of(completion),
            (call,),
            (ToolResult("write_file", "ok", True, 0.1),),
        ),
    )
    trajectory = Trajectory(
        task_id=task.id,
        group=4,
        index=0,
        contexts=(
            Context(
                tokens=tokens,
                sampled=sampled,
                logprobs=np.where(sampled, logprob, 0).astype(np.float32),
                versions=np.where(sampled, 7, -1).astype(np.int32),
            ),
        ),
        prompt_length=3,
        turns=turns,
        status="submitted",
        reward=Reward(1.0, {"tests": 1.0}, ("slow",)),
        solved=True,
    )
    return Group(task, (trajectory,))


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
