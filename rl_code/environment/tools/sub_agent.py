"""sub_agent: another context of the same policy answers a question; only its answer comes back.

The episode plays it (``environment.frames``): a context of its own begins with the question, uses
the other tools on the same files, and its first message without a call is the answer. Its tokens
are recorded and trained on as those of the episode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_code.environment.tools.text import cut_middle
from rl_code.environment.tools.tool import Delegation, Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import Workspace

_LONGEST = 400
_VERBOSE_LONGEST = 4000


@dataclasses.dataclass(frozen=True)
class SubAgent(Tool):
    """Delegates a question to a context of its own."""

    # Messages that it may write, and tokens of its context. Its tokens count to those of the
    # episode too.
    turns: int = 4
    tokens: int = 1024

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "sub_agent",
        "Ask a helper that begins with nothing but your question. It sees the same files and has "
        "the same tools except this one and submit. You get its last message.",
        {"question": {"type": "string", "description": "All that it has to know, in words."}},
        ("question",),
    )
    # it may use any tool
    runs_commands: ClassVar[bool] = True
    words: ClassVar[Words | None] = Words("ask", below={"question": "a question"})

    def __post_init__(self) -> None:
        if self.turns < 1 or self.tokens < 2:
            raise ValueError(f"{self.turns=} must be at least 1, {self.tokens=} at least 2")

    @property
    def delegation(self) -> Delegation:
        return Delegation(self.turns, self.tokens)

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        return Result("only an episode can ask a sub-agent", ok=False)


def answer_of(said: str, *, verbose: bool) -> str:
    """Last message of a sub-agent, as the agent that asked reads it."""
    return cut_middle(said.strip(), _VERBOSE_LONGEST if verbose else _LONGEST)
