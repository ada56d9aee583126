"""How a model's text becomes tool calls and how their results become text, one class per way of
writing.

What a tool says can hold anything, special tokens included; every protocol breaks those up before
the text is tokenised, so that no output of a program can end a turn or open another.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from models.chat import render, render_tool_results
from models.tokenizer import Tokenizer
from rl_code.environment.tools.api import TOOLS
from rl_code.environment.tools.text import one_line
from rl_code.types import Task, ToolCall, ToolResult


class Protocol(typing.Protocol):
    """One way of writing calls.

    stop_tokens: special tokens that end an assistant message; the first is put in where a message
    was cut. verbose: whether tools answer in sentences or in as few words as will do.
    """

    stop_tokens: tuple[str, ...]
    verbose: bool

    def tools(self, task: Task) -> tuple[str, ...]:
        """Names of the tools that calls may name."""
        ...

    def prompt(self, task: Task) -> str:
        """All text before the first sampled token; it ends in ``task.prefill``."""
        ...

    def parse(self, text: str, task: Task) -> list[ToolCall]:
        """The calls of one assistant message in order, at least one; those that are malformed have
        ``error`` set.

        text: the message without its stop token; the first one with ``task.prefill`` before it.
        """
        ...

    def observation(self, results: Sequence[ToolResult]) -> str:
        """The text after the message's stop token, up to where the assistant goes on."""
        ...

    def stopped(self, text: str) -> bool:
        """Whether the text sampled so far is complete without a stop token; once True it stays
        True.
        """
        ...


def stop_ids(protocol: Protocol, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the tokens that end an assistant message."""
    return frozenset(tokenizer.token_id(token) for token in protocol.stop_tokens)


def stop_length(protocol: Protocol, tokenizer: Tokenizer, tokens: Sequence[int]) -> int | None:
    """Length of the first prefix of one message's sampled tokens at which it is complete; None when
    it is not yet.

    The token that completes it, a stop token or the one that triggers the rule on text, is part of
    the prefix.
    """
    ends = stop_ids(protocol, tokenizer)
    stop = next((i for i, token in enumerate(tokens) if token in ends), None)
    body = list(tokens if stop is None else tokens[:stop])
    if not protocol.stopped(tokenizer.decode(body)):
        return None if stop is None else stop + 1
    low, high = 0, len(body)  # not stopped after low tokens, stopped after high
    while high - low > 1:
        middle = (low + high) // 2
        if protocol.stopped(tokenizer.decode(body[:middle])):
            high = middle
        else:
            low = middle
    return high


_MARKS = re.compile(r"<(?=\||/?(?:tool_call|tool_response|think|function|parameter)\b)")


def break_up(text: str) -> str:
    """The text with every special token (``<|...|>``) and every tag of a chat template taken apart
    by a space.

    Lone surrogates, which no encoding can carry, become question marks.
    """
    return _MARKS.sub("< ", text.encode("utf-8", "replace").decode("utf-8"))


@functools.cache
def _frame(family: str, count: int) -> tuple[str, ...]:
    """The template's text before, between and after ``count`` results; rendered once, since
    rendering is slow.
    """
    return tuple(render_tool_results(family, ["\0"] * count).split("\0"))


def _answer(family: str, results: Sequence[ToolResult]) -> str:
    """What follows an assistant's message in the family's template: the results, broken up, and the
    next opening.
    """
    first, *others = _frame(family, len(results))
    return first + "".join(
        break_up(result.content) + after for result, after in zip(results, others, strict=True)
    )


_COMPACT_TOKENS = ("<|pad|>", "<|bos|>", "<|eot|>", "<|call|>", "<|end|>", "<|tool|>")


@dataclasses.dataclass(frozen=True)
class Compact:
    """For a small model trained from scratch: one special token per mark, a word per tool, a line
    per answer.

    prompt       <|bos|>content of the messages<|eot|>
    assistant    <|call|>write\\n<whole file><|end|><|call|>test<|end|><|eot|>   (one or more calls,
                 nothing else) edit\\n<old>\\n=====\\n<new> | read [path [first [last]]] |
                 run\\n<command> | submit
    observation  <|tool|>answers, one a line<|eot|>

    write and edit work on ``task.path``.
    """

    stop_tokens: tuple[str, ...] = ("<|eot|>",)
    verbose: bool = False

    SPECIAL_TOKENS: typing.ClassVar[tuple[str, ...]] = _COMPACT_TOKENS
    WORDS: typing.ClassVar[Mapping[str, str]] = {
        "write": "write_file",
        "edit": "edit_file",
        "read": "read_file",
        "run": "terminal",
        "test": "run_tests",
        "submit": "submit",
    }
    SEPARATOR: typing.ClassVar[str] = "\n=====\n"

    def tools(self, task: Task) -> tuple[str, ...]:
        return task.tools

    def prompt(self, task: Task) -> str:
        return render("compact", task.messages) + task.prefill

    def message(self, calls: Sequence[ToolCall]) -> str:
        """The assistant's message that makes these calls, stop token included; ``parse`` undoes it.

        Paths of write_file and edit_file are not written: they are the task's.
        """
        return "".join(f"<|call|>{self._body(call)}<|end|>" for call in calls) + "<|eot|>"

    def _body(self, call: ToolCall) -> str:
        arguments = call.arguments
        match call.name:
            case "write_file":
                return "write\n" + arguments["content"]
            case "edit_file":
                return "edit\n" + arguments["old"] + self.SEPARATOR + arguments["new"]
            case "read_file":
                return " ".join(["read", *(str(value) for value in arguments.values())])
            case "terminal":
                return "run\n" + arguments["command"]
            case "run_tests":
                return "test"
            case "submit":
                return "submit"
            case _:
                raise ValueError(f"the compact protocol has no word for {call.name=}")

    def parse(self, text: str, task: Task) -> list[ToolCall]:
        words = [word for word, name in self.WORDS.items() if name in task.tools]
        before, *pieces = text.split("<|call|>")
        if not pieces:
            return [ToolCall("", {}, f"no call; use {', '.join(words)}")]
        calls = [_outside(before)] if before.strip() else []
        for piece in pieces:
            body, end, rest = piece.partition("<|end|>")
            head, newline, content = body.partition("\n")
            word, *extra = head.split() or [""]
            if word not in words:
                calls.append(
                    ToolCall(word, {}, f"unknown {break_up(word)[:20]!r}; use {', '.join(words)}")
                )
            elif not end:
                calls.append(ToolCall(self.WORDS[word], {}, f"{word} has no end"))
            else:
                calls.append(self._call(word, extra, content if newline else None, task))
            if rest.strip():
                calls.append(_outside(rest))
        return calls

    def _call(self, word: str, extra: list[str], content: str | None, task: Task) -> ToolCall:
        """One call from the words of its first line and the text below it (None when there is no
        second line).
        """
        name = self.WORDS[word]
        arguments: dict[str, Any] = {}
        error = ""
        match word:
            case "write" | "edit" | "run" if extra or content is None:
                below = {"write": "the file", "edit": "old text", "run": "the command"}[word]
                error = f"{word} wants a new line, then {below}"
            case "write":
                arguments = {"path": task.path, "content": content}
            case "run":
                arguments = {"command": content}
            case "edit":
                old, separator, new = f"{content}\n".partition(self.SEPARATOR)
                arguments = {"path": task.path, "old": old, "new": new.removesuffix("\n")}
                if not separator:
                    error = "edit wants old text, a line =====, new text"
            case "read":
                path, *lines = extra or [task.path]
                if (
                    content
                    or len(lines) > 2
                    or not all(line.isdecimal() and len(line) < 10 for line in lines)
                ):
                    error = "read wants a path, first line, last line"
                else:
                    lines = dict(zip(("first_line", "last_line"), map(int, lines), strict=False))
                    arguments = {"path": path, **lines}
            case _ if extra or content:
                error = f"{word} takes nothing"
        return ToolCall(name, {} if error else arguments, error)

    def observation(self, results: Sequence[ToolResult]) -> str:
        return _answer("compact", results)

    def stopped(self, text: str) -> bool:
        return False


def _outside(text: str) -> ToolCall:
    return ToolCall("", {}, f"text outside a call: {break_up(' '.join(text.split()))[:20]!r}")


@dataclasses.dataclass(frozen=True)
class Chat:
    """Turns in a model family's own chat template, with its own way of writing calls.

    family: name of the template in ``models.chat``. calls: "json" for ``<tool_call>`` blocks that
    hold ``{"name": ..., "arguments": {...}}``, as Hermes, Qwen2.5 and Qwen3 write them; "tags" for
    blocks that hold ``<function=name><parameter=key>value</parameter></function>``, as Qwen3-Coder
    does; "bare" for one call that is all of the message, ``{"name": ..., "parameters": {...}}``, as
    Llama 3.1 does. Text around blocks is the model's own business.
    """

    family: str
    calls: Literal["json", "tags", "bare"]
    stop_tokens: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")
    verbose: bool = True

    def tools(self, task: Task) -> tuple[str, ...]:
        return task.tools

    def prompt(self, task: Task) -> str:
        schemas = [{"type": "function", "function": TOOLS[name].schema} for name in task.tools]
        return render(self.family, task.messages, schemas) + task.prefill

    def parse(self, text: str, task: Task) -> list[ToolCall]:
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
                else _parse_function(body)
            )
            calls.append(
                call if end or call.error else ToolCall(call.name, {}, "the call is not closed")
            )
        return calls

    def _no_call(self) -> ToolCall:
        return ToolCall(
            "", {}, f"no tool call; write {_FORMS[self.calls]}. Call submit when the work is done"
        )

    def observation(self, results: Sequence[ToolResult]) -> str:
        return _answer(self.family, results)

    def stopped(self, text: str) -> bool:
        return False


_FORMS = {
    "json": 'a JSON object {"name": ..., "arguments": {...}} inside tool_call tags',
    "tags": "function and parameter tags inside tool_call tags",
    "bare": 'a JSON object {"name": ..., "parameters": {...}} and nothing else',
}


def _parse_json(body: str, key: str, form: str) -> ToolCall:
    """A call written as JSON, its arguments under ``key``."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the call is not valid JSON ({error}); write {form}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, f"the call has no name; write {form}")
    arguments = value.get(key, {})
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], {}, f"{key} must be a JSON object")
    return ToolCall(value["name"], arguments)


_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>(.*?)</parameter>\s*", re.DOTALL)


def _parse_function(body: str) -> ToolCall:
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
        arguments[key] = _typed(name, key, value)
        position = parameter.end()
    return ToolCall(name, arguments)


def _typed(tool: str, key: str, value: str) -> Any:
    """The value as the tool's schema wants it; text where that cannot be, for the check of
    arguments to name.
    """
    properties = TOOLS[tool].schema["parameters"]["properties"] if tool in TOOLS else {}
    if (
        key in properties
        and properties[key]["type"] == "integer"
        and re.fullmatch(r"-?[0-9]{1,9}", value.strip())
    ):
        return int(value)
    return value


_COLUMN_0 = re.compile(r"\n[^\s)\]}]")
_FENCE = re.compile(r"\A```\w*\n")


@dataclasses.dataclass(frozen=True)
class Completion:
    """Single shot: the assistant's text continues ``task.prefill``; the two are written to
    ``task.path`` and submitted.

    The text ends before the first line that starts in column 0 with neither white space nor a
    closing bracket. A code fence that opens the prefill is no part of the file. family: chat
    template around the messages (without tools), or None for raw completion: the prompt is the
    prefill alone, the beginning of a document.
    """

    family: str | None
    stop_tokens: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")
    verbose: bool = False

    def tools(self, task: Task) -> tuple[str, ...]:
        return ("write_file", "submit")

    def prompt(self, task: Task) -> str:
        return ("" if self.family is None else render(self.family, task.messages)) + task.prefill

    def parse(self, text: str, task: Task) -> list[ToolCall]:
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


PROTOCOLS: dict[str, Protocol] = {
    "compact": Compact(),
    "hermes": Chat("qwen", "json"),
    "qwen3_coder": Chat("qwen3_coder", "tags"),
    "llama3": Chat("llama3", "bare", stop_tokens=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")),
    "completion": Completion("smollm2"),
    "raw_completion": Completion(None),
}
