"""Protocols of chat models: turns in a family's template, calls as the family writes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from models.chat import render
from models.families import FAMILIES
from models.own_template import OwnTemplate
from models.tokenizer import Tokenizer
from rl_code.environment.protocols.grammar import grammar_of_message
from rl_code.environment.protocols.marked import Marked
from rl_code.environment.protocols.protocol import own_template, results_text
from rl_code.environment.protocols.reading import (
    Reading,
    Written,
    read_bare,
    read_json,
    read_pairs,
    read_tags,
)
from rl_code.environment.protocols.tags import Function
from rl_code.environment.tools.schema import Arguments
from rl_code.environment.tools.text import one_line
from rl_code.environment.tools.tool import Tool
from rl_code.types import ToolCall, ToolResult


@dataclasses.dataclass(frozen=True)
class Chat(Marked):
    """Turns in a model family's own chat template, with its own way of writing calls.

    Text around the calls is ignored, and so are calls inside of thoughts; only with "bare" must the
    call be all of the message behind its thoughts.
    """

    # A key of models.families.FAMILIES.
    family: str
    # "json": ``<tool_call>`` blocks that hold ``{"name": ..., "arguments": {...}}``, as Hermes,
    # Qwen2.5 and Qwen3 write them. "tags": blocks that hold
    # ``<function=name><parameter=key>value</parameter></function>``, as Qwen3-Coder does. "pairs":
    # blocks of the name and pairs of ``<arg_key>`` and ``<arg_value>``, as GLM does. "bare": one
    # call that is all of the message, ``{"name": ..., "parameters": {...}}``, as Llama 3.1 does.
    calls: Literal["json", "tags", "pairs", "bare"]
    # The template that came with the tokenizer; None for the family's.
    own: OwnTemplate | None = None
    # The marks of ChatML, which most families write, and those that end and fill up texts.
    SPECIAL_TOKENS: ClassVar[tuple[str, ...]] = (
        *("<|pad|>", "<|eot|>"),
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    )

    @property
    def opens_next(self) -> bool:
        return FAMILIES[self.family].ends_open

    def for_tokenizer(self, tokenizer: Tokenizer, tools: Mapping[str, Tool]) -> Chat:
        own = own_template(self.family, tokenizer)
        if own is not None and tools and not own.declares_tools:
            raise ValueError(
                f"the tokenizer's chat template has no place for the tools {', '.join(tools)}; "
                f"tokenizer.chat_template='family' takes that of {self.family}"
            )
        if own is not None and tools:
            # a template that cannot write results is refused before a run begins
            for count in (1,) if self.calls == "bare" else (1, 2):
                own.render_tool_results(["answer"] * count)
        return dataclasses.replace(self, own=own)

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        schemas: Sequence[Mapping[str, Any]],
        opening: bool,
    ) -> str:
        if self.own is not None:
            return self.own.render(messages, schemas, opening)
        return render(self.family, messages, schemas, opening)

    @property
    def form(self) -> str:
        return f"write {_FORMS[self.calls]}"

    def _call(self, written: Written, tools: Mapping[str, Tool]) -> ToolCall:
        """As ``Marked._call``. Values have the types of the tool's schema where they can."""
        if written.value is None:
            return ToolCall("", {}, f"{written.error}; {self.form}")
        called = _function if self.calls in ("tags", "pairs") else _object
        call = called(written.value, self.calls, tools)
        error = call.error or written.error
        return ToolCall(call.name, {}, error) if error else call

    def settled(self, text: str) -> bool:
        return all(
            not isinstance(call.value, Function) or call.value.settled
            for call in self._read(text).calls
        )

    def grammar(
        self,
        functions: Sequence[Mapping[str, Any]],
        special: Callable[[str], str],
        *,
        many: bool = True,
        content: str = "",
    ) -> str:
        if content and self.calls == "bare":
            raise ValueError("calls of this model are JSON without marks, so no other JSON can be")
        return grammar_of_message(
            self.calls,
            functions,
            special,
            many=many and self.calls != "bare",
            thinking=self._opens_thought,
            content=content,
        )

    def _read(self, text: str) -> Reading:
        return _READERS[self.calls](text, thinking=self._opens_thought)

    @property
    def _opens_thought(self) -> bool:
        """True if the prompt begins a thought."""
        return self.own is not None and self.own.opens_thought

    def observation(self, results: Sequence[ToolResult]) -> str:
        return results_text(self.family, results, self.own)

    def requested(self, results: Sequence[ToolResult], request: str) -> str:
        if self.calls != "bare" or not results:
            return super().requested(results, request)
        # templates of this kind have a place for one result
        *others, last = results
        told = f"{last.content}\n\n{request}"
        return self.observation([*others, dataclasses.replace(last, content=told)])


_FORMS = {
    "json": 'a JSON object {"name": ..., "arguments": {...}} inside tool_call tags',
    "tags": "function and parameter tags inside tool_call tags",
    "pairs": "the name and then arg_key and arg_value tags inside tool_call tags",
    "bare": 'a JSON object {"name": ..., "parameters": {...}} and nothing else',
}


_READERS = {"json": read_json, "tags": read_tags, "pairs": read_pairs, "bare": read_bare}
# The key of a JSON call that holds its arguments: the one of the form, and the one that other forms
# have.
_KEYS = {"json": ("arguments", "parameters"), "bare": ("parameters", "arguments")}
# Other keys of a call that say nothing, as some models write them.
_SILENT = frozenset(("id", "type", "index"))


def _function(function: Function, form: str, tools: Mapping[str, Tool]) -> ToolCall:
    if function.error:
        error = f"{function.error}; write {_FORMS[form]}"
        return ToolCall(function.name, {}, error)
    known = Arguments(tools[function.name].schema if function.name in tools else {})
    values = {key: known.read(key, text) for key, text in function.parameters.items()}
    return ToolCall(function.name, values)


def _object(value: Any, form: str, tools: Mapping[str, Tool]) -> ToolCall:
    """A call written as JSON."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, f"the call has no name; write {_FORMS[form]}")
    name = value["name"]
    given = [key for key in _KEYS[form] if key in value]
    others = [key for key in value if key not in ("name", *_KEYS[form], *_SILENT)]
    if others or len(given) > 1:
        wrong = one_line((others or given[1:])[0], 40)
        error = f"the call has a key {wrong!r} that it must not have"
        return ToolCall(name, {}, f"{error}; write {_FORMS[form]}")
    arguments = value[given[0]] if given else {}
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, f"{given[0]} must be a JSON object")
    known = Arguments(tools[name].schema if name in tools else {})
    return ToolCall(name, {key: known.normal(key, each) for key, each in arguments.items()})
