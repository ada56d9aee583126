"""Generated tasks, some of which tell in their message of an attempt at them.

A teacher that has feedback in its context teaches what it makes of that. A pretrained model makes
something of it by itself; an agent from scratch has never seen any. So its warm start has tasks
with the feedback that the teacher will read, whose demonstrations make use of it. They run the
tests as often as others: a teacher that hands in at once teaches to test no more.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from rl_code.config.read_config import at_least, shares
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.learner.feedback import FailedTests, SolvedSibling, with_feedback
from rl_code.tasks.demonstrations import KINDS, PLAYED, DemonstrationConfig, demonstrate, failures
from rl_code.tasks.of_another import OfAnother
from rl_code.tasks.stream import Stream
from rl_code.types import Limits, Task, ToolCall

_PROTOCOL = Compact()
_TOOLS = find_tools()
_GENERATED = KINDS["generated"]
# Probability that the episode which is told had a wrong attempt first.
_SECOND = 0.4
_RIGHT = DemonstrationConfig(p_right=1.0)
# Room for an attempt and its submission; budgets of tokens and seconds are not looked at.
_ROOM = Limits(turns=2, tokens=0, turn_tokens=0, test_runs=0, command_s=0.0)


def solved_by(task: Task, rng: random.Random) -> str:
    """As ``SolvedSibling`` tells of an episode, perhaps with a wrong attempt first: its messages,
    one below the other.
    """
    program = task.meta["program"]
    messages = [SolvedSibling().words]
    if rng.random() < _SECOND:
        wrong = _GENERATED.call(task, _GENERATED.wrong(task, rng))
        messages.append(_PROTOCOL.message((wrong, ToolCall("run_tests", {})), _TOOLS))
    right = _GENERATED.call(task, program)
    messages.append(_PROTOCOL.message((right, ToolCall("submit", {})), _TOOLS))
    return "\n".join(messages)


def failed_by(task: Task, rng: random.Random) -> str:
    """As ``FailedTests`` tells of a wrong attempt: the visible tests that it fails; "" if it fails
    none.
    """
    return FailedTests().of(failures(task, _GENERATED.wrong(task, rng), verbose=True))


# By the name of the feedback (``FEEDBACKS``).
TELLS: dict[str, Callable[[Task, random.Random], str]] = {
    "solved_sibling": solved_by,
    "failed_tests": failed_by,
}


@dataclasses.dataclass(frozen=True)
class Told(OfAnother):
    """The tasks of another source, generated ones, a share of which tell of an attempt."""

    # ``limits.test_runs`` of the episodes.
    test_runs: int
    # Share of the tasks that do.
    share: float = 0.4
    # The feedback that is told, of TELLS.
    tells: str = "solved_sibling"

    def __post_init__(self) -> None:
        shares(self, "share")
        at_least(self, test_runs=0)
        if self.tells not in TELLS:
            raise ValueError(f"tells={self.tells!r} must be one of {', '.join(TELLS)}")

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        tasks = self._source.load(pool, workdir)
        return Stream(lambda index: self._told(tasks[index]))

    def _told(self, task: Task) -> Task:
        rng = random.Random(f"told/{task.id}")
        if rng.random() >= self.share:
            return task
        text = TELLS[self.tells](task, rng)
        if not text:
            return task
        told = with_feedback(task, text)
        segments = demonstrate(
            task, rng, _RIGHT, dataclasses.replace(_ROOM, test_runs=self.test_runs)
        )
        behind = itertools.dropwhile(lambda segment: not segment.sampled, segments)
        played = tuple((segment.text, segment.sampled) for segment in behind)
        return dataclasses.replace(told, meta={**task.meta, PLAYED: played})
