"""Generated tasks, some of which tell in their message what solved them.

A teacher that has feedback in its context teaches what it makes of that. A pretrained model makes
something of it by itself; an agent from scratch has never seen any. So its warm start has tasks
with the feedback that the teacher will read (``SolvedSibling``: the messages of an episode, perhaps
with a wrong attempt first), whose demonstrations hand in what it says.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

from rl_code.config.read_config import shares
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.learner.feedback import SolvedSibling, with_feedback
from rl_code.tasks.demonstrations import KINDS
from rl_code.tasks.of_another import OfAnother
from rl_code.tasks.stream import Stream
from rl_code.types import Task, ToolCall

_PROTOCOL = Compact()
_TOOLS = find_tools()
_GENERATED = KINDS["generated"]
# Probability that the episode which is told had a wrong attempt first.
_SECOND = 0.4


def solved_by(task: Task, rng: random.Random) -> str:
    """The messages of an episode of a generated task that is solved, one below the other."""
    program = task.meta["program"]
    messages = []
    if rng.random() < _SECOND:
        wrong = _GENERATED.call(task, _GENERATED.wrong(task, rng))
        messages.append(_PROTOCOL.message((wrong, ToolCall("run_tests", {})), _TOOLS))
    right = _GENERATED.call(task, program)
    messages.append(_PROTOCOL.message((right, ToolCall("submit", {})), _TOOLS))
    return "\n".join(messages)


@dataclasses.dataclass(frozen=True)
class Told(OfAnother):
    """The tasks of another source, generated ones, a share of which tell what solved them."""

    # Share of the tasks that do.
    share: float = 0.4

    def __post_init__(self) -> None:
        shares(self, "share")

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        tasks = self._source.load(pool, workdir)
        return Stream(lambda index: self._told(tasks[index]))

    def _told(self, task: Task) -> Task:
        rng = random.Random(f"told/{task.id}")
        if rng.random() >= self.share:
            return task
        told = with_feedback(task, f"{SolvedSibling().words}\n{solved_by(task, rng)}")
        (solution,) = task.reference.values()
        return dataclasses.replace(told, meta={**task.meta, "hands_in": solution})
