"""Protocols of chat models: turns in a family's template, calls as the family writes them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from models.chat import render
from models.own_template import OwnTemplate
from models.tokenizer import Tokenizer
from rl_code.environment.protocols.protocol import Protocol, answer, own_template
from rl_code.environment.tools.text import one_line
from rl_code.environment.tools.tool import Tool, kinds_of
from rl_code.types import Task, ToolCall, ToolResult


@dataclasses.dataclass(frozen=True)
class Chat(Protocol):
    """Turns in a model family's own chat template, with its own way of writing calls.

    Text around the calls is ignored; only with "bare" must the call be all of the message.
    """

    # A key of models.families.FAMILIES.
    family: str
    # "json": ``<tool_call>`` blocks that hold ``{"name": ..., "arguments": {...}}``, as Hermes,
    # Qwen2.5 and Qwen3 write them. "tags": blocks that hold
    # ``<function=name><parameter=key>value</parameter></function>``, as Qwen3-Coder does. "bare":
    # one call that is all of the message, ``{"name": ..., "parameters": {...}}``, as Llama 3.1
    # does.
    calls: Literal["json", "tags", "bare"]
    # The template that came with the tokenizer; None for the family's.
    own: OwnTemplate | None = None
    converses: ClassVar[bool] = True

    def for_tokenizer(self, tokenizer: Tokenizer, tools: Mapping[str, Tool]) -> Chat:
        own = own_template(self.family, tokenizer)
        if own is not None and tools and not own.declares_tools:
            raise ValueError(
                f"the tokenizer's chat template has no place for the tools {', '.join(tools)}; "
                f"tokenizer.chat_template='family' takes that of {self.family}"
            )
        return dataclasses.replace(self, own=own)

    def prompt(self, task: Task, tools: Mapping[str, Tool]) -> str:
        schemas = [{"type": "function", "function": tool.schema} for tool in tools.values()]
        return self.conversation(task.messages, schemas, True) + task.prefill

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        schemas: Sequence[Mapping[str, Any]],
        opening: bool,
    ) -> str:
        if self.own is not None:
            return self.own.render(messages, schemas, opening)
        return render(self.family, messages, schemas, opening)

    def parse(self, text: str, task: Task, tools: Mapping[str, Tool]) -> list[ToolCall]:
        text = text.rpartition("</think>")[2]
        if self.calls == "bare":
            body = text.strip().removeprefix("<|python_tag|>").lstrip()
            return [
                _parse_json(body, "parameters", _FORMS["bare"])
                if body.startswith("{")
                else self._no_call()
            ]
        pieces = text.split("<tool_call>")[1:]
        if not pieces:
            return [self._no_call()]
        calls = []
        for piece in pieces:
            body, end, _ = piece.partition("</tool_call>")
            call = (
                _parse_json(body, "arguments", _FORMS["json"])
                if self.calls == "json"
                else _parse_function(body, tools)
            )
            calls.append(
                call if end or call.error else ToolCall(call.name, {}, "the call is not closed")
            )
        return calls

    def has_call(self, text: str) -> bool:
        text = text.rpartition("</think>")[2]
        if self.calls == "bare":
            return text.strip().removeprefix("<|python_tag|>").lstrip().startswith("{")
        return "<tool_call>" in text

    def _no_call(self) -> ToolCall:
        return ToolCall(
            "", {}, f"no tool call; write {_FORMS[self.calls]}. Call submit when the work is done"
        )

    def observation(self, results: Sequence[ToolResult]) -> str:
        return answer(self.family, results, self.own)


_FORMS = {
    "json": 'a JSON object {"name": ..., "arguments": {...}} inside tool_call tags',
    "tags": "function and parameter tags inside tool_call tags",
    "bare": 'a JSON object {"name": ..., "parameters": {...}} and nothing else',
}


def _parse_json(body: str, key: str, form: str) -> ToolCall:
    """A call written as JSON, its arguments under ``key``."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError, MemoryError) as error:
        return ToolCall("", {}, f"the call is not valid JSON ({error}); write {form}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, f"the call has no name; write {form}")
    arguments = value.get(key, {})
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], {}, f"{key} must be a JSON object")
    return ToolCall(value["name"], arguments)


_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>(.*?)</parameter>\s*", re.DOTALL)


def _parse_function(body: str, tools: Mapping[str, Tool]) -> ToolCall:
    """A call from the inside of a Qwen3-Coder tool_call block; values are typed by the tool's
    schema.
    """
    function = _FUNCTION.fullmatch(body)
    if function is None:
        return ToolCall("", {}, f"the call has no closed function tag; write {_FORMS['tags']}")
    name = function[1].strip()
    inside = function[2]
    arguments: dict[str, Any] = {}
    position = 0
    while inside[position:].strip():
        parameter = _PARAMETER.match(inside, position)
        if parameter is None:
            return ToolCall(
                name, {}, f"not a closed parameter tag: {one_line(inside[position:], 40)!r}"
            )
        key = parameter[1].strip()
        value = parameter[2].removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(tools.get(name), key, value)
        position = parameter.end()
    return ToolCall(name, arguments)


def _typed(tool: Tool | None, key: str, value: str) -> Any:
    """The value as the tool's schema wants it; text where that cannot be, for the check of
    arguments to name.
    """
    properties = {} if tool is None else tool.schema["parameters"]["properties"]
    kinds = kinds_of(properties[key]) if key in properties else ("string",)
    text = value.strip()
    if "integer" in kinds and re.fullmatch(r"-?[0-9]{1,9}", text):
        return int(text)
    if "number" in kinds and re.fullmatch(r"-?[0-9]{1,9}(\.[0-9]{1,9})?", text):
        return float(text)
    if "boolean" in kinds and text in ("true", "false"):
        return text == "true"
    if "null" in kinds and text == "null":
        return None
    if ("array" in kinds and text.startswith("[")) or ("object" in kinds and text.startswith("{")):
        try:
            return json.loads(text)
        except (ValueError, RecursionError, MemoryError):
            return value
    return value
