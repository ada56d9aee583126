"""Single shot: the model's text is the file, and there are no calls."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from models.chat import render
from models.own_template import OwnTemplate
from models.tokenizer import Tokenizer
from rl_code.environment.protocols.protocol import Protocol, own_template
from rl_code.environment.tools.tool import Tool
from rl_code.types import Task, ToolCall, ToolResult

_COLUMN_0 = re.compile(r"\n[^\s)\]}]")
_FENCE = re.compile(r"\A```\w*\n")


@dataclasses.dataclass(frozen=True)
class Completion(Protocol):
    """An episode of one message: the assistant's text continues ``task.prefill``. The two together
    are written to ``task.path`` and submitted.

    The text ends before the first line that starts in column 0 with neither white space nor a
    closing bracket. A code fence that opens the prefill is no part of the file.
    """

    # The family whose chat template stands around the messages, without tools: a key of
    # models.families.FAMILIES. None for no template: the prompt is then the prefill alone, the
    # beginning of a file that the model continues.
    family: str | None
    verbose: bool = dataclasses.field(default=False, kw_only=True)
    continues_file: ClassVar[bool] = True
    # The template that came with the tokenizer; None for the family's.
    own: OwnTemplate | None = None

    def for_tokenizer(self, tokenizer: Tokenizer, tools: Mapping[str, Tool]) -> Completion:
        if self.family is None:
            return self
        return dataclasses.replace(self, own=own_template(self.family, tokenizer))

    def check_tools(self, tools: Mapping[str, Tool]) -> None:
        for name in ("write_file", "submit"):
            if name not in tools:
                raise ValueError(
                    f"the protocol of completions calls {name}, which tools={tuple(tools)} lacks"
                )

    def prompt(self, task: Task, tools: Mapping[str, Tool]) -> str:
        if self.family is None:
            return task.prefill
        if self.own is not None:
            return self.own.render(task.messages) + task.prefill
        return render(self.family, task.messages) + task.prefill

    def parse(self, text: str, task: Task, tools: Mapping[str, Tool]) -> list[ToolCall]:
        start = len(task.prefill)
        end = _COLUMN_0.search(text, start)
        content = _FENCE.sub("", text if end is None else text[: end.start() + 1])
        return [
            ToolCall("write_file", {"path": task.path, "content": content}),
            ToolCall("submit", {}),
        ]

    def observation(self, results: Sequence[ToolResult]) -> str:
        return ""

    def stopped(self, text: str) -> bool:
        # A character whose bytes are not all there yet decodes to U+FFFD; it may still become white
        # space.
        return _COLUMN_0.search(text.rstrip("\ufffd")) is not None
