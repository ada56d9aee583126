"""Protocols whose calls begin at marks in the text of a message, outside of its thoughts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from models.marks import unquote
from rl_code.environment.protocols.protocol import Protocol
from rl_code.environment.protocols.reading import THOUGHT, Reading, Written
from rl_code.environment.tools.tool import Tool
from rl_code.types import Task, ToolCall, ToolResult


@dataclasses.dataclass(frozen=True)
class Marked(Protocol):
    """A protocol that finds calls by their marks, and writes whole conversations."""

    converses: ClassVar[bool] = True

    @property
    def form(self) -> str:
        """Words for a message to the model that ask for a call in this protocol's form."""
        raise NotImplementedError

    def _read(self, text: str) -> Reading:
        """Calls and thoughts of a message."""
        raise NotImplementedError

    def _call(self, written: Written, tools: Mapping[str, Tool]) -> ToolCall:
        """A call as it stands in a message. Values that the schema does not take stay, for the
        check of arguments to name.
        """
        raise NotImplementedError

    def parse(self, text: str, task: Task | None, tools: Mapping[str, Tool]) -> list[ToolCall]:
        reading = self._read(text)
        if reading.calls:
            return [self._call(written, tools) for written in reading.calls]
        form = f"{self.form}. Call submit when the work is done"
        if reading.thinking:
            return [
                ToolCall("", {}, f"the thought never ends; close it with {THOUGHT}, then {form}")
            ]
        return [ToolCall("", {}, f"no tool call; {form}")]

    def has_call(self, text: str) -> bool:
        return bool(self._read(text).calls)

    def thinking(self, text: str) -> bool:
        return self._read(text).thinking

    def before_calls(self, text: str) -> str:
        before = self._read(text).before(text)
        return unquote(before) if self.tells_marks else before


def as_messages(results: Sequence[ToolResult]) -> list[dict[str, Any]]:
    """Results as messages of a conversation. What answers no call of a function is said by the
    user.
    """
    named = max((at for at, one in enumerate(results, start=1) if one.name), default=0)
    return [
        {"role": "tool" if at < named else "user", "content": one.content}
        for at, one in enumerate(results)
    ]


def complained(found: Sequence[Written], at: int, error: str) -> list[Written]:
    """Calls with a complaint about what follows them: it stands at the last one, so that each call
    has one result.
    """
    *others, last = found or [Written(at)]
    return [*others, dataclasses.replace(last, error=error)]
