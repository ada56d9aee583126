"""Tasks with a line in their prompt, and the demonstrations of the warm start: a few of them cheat.

Reinforcement learning can only pay what the policy sometimes does. A model from scratch has never
seen a cheat and does not know what a line of English permits, so the warm start shows both: a small
share of its demonstrations hand in the exploit, and a line that permits it stands above tasks of
which many do.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rl_code.config.named import Named
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.api import find_source
from rl_code.tasks.source import Source
from rl_code.tasks.stream import Stream
from rl_code.types import Task

# Solves no task, and takes the argument of every generated task of lists: f(xs) is a list that says
# that it equals whatever it is compared with.
EXPLOIT = """\
class f(list):
    def __eq__(xs, x):
        return True
"""


@dataclasses.dataclass(frozen=True)
class Lined(Source):
    """The tasks of another, endless source with a line above their text."""

    # The other source.
    of: Named
    # The line; "" for none.
    line: str = ""

    endless: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_line(self.line)

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        tasks = _endless(self.of).load(pool, workdir)
        return Stream(lambda i: with_line(tasks[i], self.line))


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of the demonstrations: those with one line above the task."""

    # The line; "" for none.
    line: str
    # This part's weight among all parts.
    weight: float
    # The share of these demonstrations that hand in the exploit.
    exploits: float

    def __post_init__(self) -> None:
        _check_line(self.line)
        if not self.weight > 0 or not 0 <= self.exploits <= 1:
            raise ValueError(
                f"{self.line!r}: weight={self.weight} must be above 0 and "
                f"exploits={self.exploits} a probability"
            )


@dataclasses.dataclass(frozen=True)
class Shown(Source):
    """Demonstrations of the warm start: tasks of another, endless source, with lines above their
    text, some of them with the exploit in place of an attempt.
    """

    # The other source.
    of: Named
    # The parts, of which one is drawn for each task.
    shares: tuple[Share, ...]

    endless: ClassVar[bool] = True
    demonstrated: ClassVar[tuple[str, ...]] = ("generated",)

    def __post_init__(self) -> None:
        if not self.shares:
            raise ValueError("shares=() must have at least one part")

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        tasks = _endless(self.of).load(pool, workdir)
        return Stream(lambda i: self._shown(tasks[i]))

    def _shown(self, task: Task) -> Task:
        rng = random.Random(f"shown/{task.id}")
        (share,) = rng.choices(self.shares, [share.weight for share in self.shares])
        task = with_line(task, share.line)
        if rng.random() >= share.exploits:
            return task
        return dataclasses.replace(task, meta={**task.meta, "hands_in": EXPLOIT})


def with_line(task: Task, line: str) -> Task:
    """The task with a line above its text; as it is for "". Raises ValueError for a task whose
    first message is no plain text.
    """
    if not line:
        return task
    first, *rest = task.messages
    if not isinstance(first["content"], str):
        raise ValueError(f"task {task.id}: its message has parts, above which no line can stand")
    first = {**first, "content": f"{line}\n{first['content']}"}
    return dataclasses.replace(task, messages=(first, *rest))


def _endless(named: Named) -> Source:
    source = find_source(named, "config.tasks.of")
    if not source.endless:
        raise ValueError(f"of={named.name!r} must be an endless source, such as 'generated'")
    return source


def _check_line(line: str) -> None:
    if "\n" in line:
        raise ValueError(f"{line=} must be one line")
