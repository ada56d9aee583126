"""The contexts of an episode in progress: its own, and those of sub-agents that it asked.

One context is at work at a time. When a message asks a sub-agent, a new context begins with the
question, and the one that asked waits. It goes on where it stopped, with the answer as the result
of the call, when the sub-agent has answered.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from rl_code.environment.tools.tool import Tool
from rl_code.environment.transcript import Transcript
from rl_code.types import Limits, Task, ToolCall, ToolResult


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """What the policy goes on with is in another context than the message before, which waits."""

    # Index of the context in ``Trajectory.contexts``.
    context: int
    # What comes behind its tokens so far: the prompt of a new context, or an observation.
    tokens: list[int]

    # Whether ``tokens`` are the whole context instead, and the one before is given up.
    whole: ClassVar[bool] = False


class Rewritten(Elsewhere):
    """An agent of others goes on in another context, which may keep a beginning of the one
    before. ``tokens`` are all that it has.
    """

    whole = True


@dataclasses.dataclass
class Frame:
    """One context."""

    # Its index in ``Trajectory.contexts``.
    number: int
    # What its prompt was made of.
    task: Task
    tools: Mapping[str, Tool]
    transcript: Transcript
    # The most messages of the assistant, and places.
    turns: int
    tokens: int
    # The context that waits for its answer, and the name of the tool that it called; None for the
    # episode's own.
    asked_by: Frame | None = None
    called: str = ""
    messages: int = 0
    # Of the message that is being carried out: its calls that are still to come, and what the
    # others came to; whether it was cut, and how many calls it has beyond the limit.
    pending: collections.deque[ToolCall] = dataclasses.field(default_factory=collections.deque)
    results: list[ToolResult] = dataclasses.field(default_factory=list)
    cut: bool = False
    beyond: int = 0
    # The text of its last message, and whether that is the answer of a sub-agent.
    said: str = ""
    answered: bool = False

    def copy(self) -> Frame:
        """Another context that has come the same way, between two messages."""
        return dataclasses.replace(
            self,
            transcript=self.transcript.copy(),
            pending=collections.deque(self.pending),
            results=list(self.results),
        )


def own_frame(
    task: Task, tools: Mapping[str, Tool], transcript: Transcript, limits: Limits
) -> Frame:
    """The context that an episode begins with."""
    return Frame(0, task, tools, transcript, limits.turns, limits.tokens)
