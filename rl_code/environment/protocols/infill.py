"""Fill in the middle: the text around a hole, then what is suggested there.

    prompt     <|fim_prefix|>text before<|fim_suffix|>text behind<|fim_middle|>
    assistant  the suggestion<|eot|>          or <|eot|> alone, to suggest nothing

So whether anything is suggested is decided by the first token. ``/v1/completions`` writes a request
with ``suffix`` in the same way.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence

from models.marks import Marks
from models.tokenizer import Tokenizer
from rl_code.environment.protocols.protocol import Protocol
from rl_code.environment.tools.suggest import around
from rl_code.environment.tools.tool import Tool
from rl_code.types import Task, ToolCall, ToolResult


@dataclasses.dataclass(frozen=True)
class Infill(Protocol):
    """One message, which is the suggestion."""

    stop_tokens: tuple[str, ...] = dataclasses.field(default=("<|eot|>",), kw_only=True)
    verbose: bool = dataclasses.field(default=False, kw_only=True)
    # Those of the tokenizer, which are quoted in the file; None for those of the protocol.
    marks: Marks | None = dataclasses.field(default=None, kw_only=True)

    SPECIAL_TOKENS: typing.ClassVar[tuple[str, ...]] = (
        "<|pad|>",
        "<|eot|>",
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
    )

    def for_tokenizer(self, tokenizer: Tokenizer, tools: Mapping[str, Tool]) -> Infill:
        return dataclasses.replace(self, marks=tokenizer.marks)

    def check_tools(self, tools: Mapping[str, Tool]) -> None:
        if list(tools) != ["suggest"]:
            raise ValueError(f"the protocol infill needs tools=('suggest',), not {tuple(tools)}")

    def prompt(self, task: Task, tools: Mapping[str, Tool]) -> str:
        marks = self.marks or Marks(self.SPECIAL_TOKENS)
        before, behind = map(marks.quote, around(task))
        return f"<|fim_prefix|>{before}<|fim_suffix|>{behind}<|fim_middle|>"

    def message(self, text: str) -> str:
        """The assistant's message that suggests a text; "" for nothing."""
        return f"{Marks(self.SPECIAL_TOKENS).quote(text)}<|eot|>"

    def parse(self, text: str, task: Task, tools: Mapping[str, Tool]) -> list[ToolCall]:
        return [ToolCall("suggest", {"text": text})]

    def observation(self, results: Sequence[ToolResult]) -> str:
        return ""
