"""The protocol of small models that are trained from scratch."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from models.chat import render
from models.marks import Marks, unquote, unquote_all
from rl_code.environment.protocols.protocol import Protocol, results_text
from rl_code.environment.tools.schema import Arguments
from rl_code.environment.tools.tool import Tool, Words, words_of
from rl_code.types import Task, ToolCall, ToolResult

_COMPACT_TOKENS = ("<|pad|>", "<|bos|>", "<|eot|>", "<|call|>", "<|end|>", "<|tool|>")
_MARKS = Marks(_COMPACT_TOKENS)
_SEPARATOR = "====="
_LONGER = re.compile("={6,}")
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"(?!\S)|\S+')
_DIGITS = 10  # a number on a line has fewer


@dataclasses.dataclass(frozen=True)
class Compact(Protocol):
    """A protocol for small models trained from scratch: each mark is one special token, each tool
    has one word, and each result is one line.

    prompt       <|bos|>content of the messages<|eot|>
    assistant    <|call|>write\\n<whole file><|end|><|call|>test<|end|><|eot|>   (one or more calls,
                 nothing else) edit\\n<old>\\n=====\\n<new> | read [path [first [last]]] |
                 run\\n<command> | submit
    observation  <|tool|>results, one a line<|eot|>

    Where one of several texts has a line ===== itself, a longer line stands between them, which the
    call's first line names: edit ======. A word with white space is written as a string of JSON.

    With ``thoughts`` an assistant's message may begin with text in front of its calls.
    The ``words`` of a tool say how its calls are written. write and edit work on ``task.path``.
    """

    # True if a message may begin with a thought, a text in front of its calls; else such text is a
    # malformed call.
    thoughts: bool = False
    stop_tokens: tuple[str, ...] = dataclasses.field(default=("<|eot|>",), kw_only=True)
    verbose: bool = dataclasses.field(default=False, kw_only=True)
    converses: typing.ClassVar[bool] = True
    tells_marks: typing.ClassVar[bool] = True

    SPECIAL_TOKENS: typing.ClassVar[tuple[str, ...]] = _COMPACT_TOKENS

    def check_tools(self, tools: Mapping[str, Tool]) -> None:
        by_word = _by_word(tools)
        if len(by_word) < len(tools):
            words = [words_of(tool).word for tool in tools.values()]
            raise ValueError(f"the compact protocol writes two tools alike: {words}")
        for tool in tools.values():
            words = words_of(tool)
            written = {*words.line, *words.below, "path"}
            missing = [name for name in Arguments(tool.schema).required if name not in written]
            if missing:
                raise ValueError(
                    f"the compact protocol cannot write {', '.join(missing)} of {tool.name}; "
                    "give the tool words that name all its arguments"
                )

    def prompt(self, task: Task, tools: Mapping[str, Tool]) -> str:
        return render("compact", task.messages) + task.prefill

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        schemas: Sequence[Mapping[str, Any]],
        opening: bool,
    ) -> str:
        """As ``Protocol.conversation``. Tools are declared nowhere: the model knows those it was
        trained with. Calls of earlier messages are written as ``message`` writes them.
        """
        return render("compact", [_with_calls(one) for one in messages], (), opening)

    def message(self, calls: Sequence[ToolCall], tools: Mapping[str, Tool]) -> str:
        """The assistant's message that makes these calls, stop token included; ``parse`` undoes it.

        Marks in the arguments are quoted (``models.marks``), so that the message may hold any text.
        The path of a tool that works on the task's file is not written. Raises KeyError for a call
        of a tool that is not among ``tools``.
        """
        quoted = [
            dataclasses.replace(call, arguments=_MARKS.quote_all(call.arguments)) for call in calls
        ]
        bodies = [_body(call, words_of(tools[call.name])) for call in quoted]
        return "".join(f"<|call|>{body}<|end|>" for body in bodies) + "<|eot|>"

    def parse(self, text: str, task: Task | None, tools: Mapping[str, Tool]) -> list[ToolCall]:
        known = _by_word(tools)
        before, *pieces = text.split("<|call|>")
        if not pieces:
            return [ToolCall("", {}, f"no call; use {', '.join(known)}")]
        calls = [_outside(before)] if before.strip() and not self.thoughts else []
        for piece in pieces:
            body, end, rest = piece.partition("<|end|>")
            head, newline, content = body.partition("\n")
            word, *extra = _words(head) or [""]
            if word not in known:
                word = unquote(word)
                calls.append(ToolCall(word, {}, f"unknown {word[:20]!r}; use {', '.join(known)}"))
            elif not end:
                calls.append(ToolCall(known[word].name, {}, f"{word} has no end"))
            else:
                calls.append(_call(known[word], extra, content if newline else None, task))
            if rest.strip():
                calls.append(_outside(rest))
        return [dataclasses.replace(call, arguments=unquote_all(call.arguments)) for call in calls]

    def has_call(self, text: str) -> bool:
        return "<|call|>" in text

    def observation(self, results: Sequence[ToolResult]) -> str:
        return results_text("compact", results)


def _with_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose calls stand in its content: numbers on their line, texts below."""
    calls = message.get("tool_calls") or ()
    if not calls:
        return message
    written = ""
    for one in calls:
        name, arguments = one["function"]["name"], one["function"]["arguments"]
        texts = {key: key for key, value in arguments.items() if isinstance(value, str)}
        line = {key: key for key in arguments if key not in texts}
        body = _body(ToolCall(name, arguments), Words(name, line, texts))
        written += f"<|call|>{body}<|end|>"
    return {"role": message["role"], "content": message["content"] + written}


def _by_word(tools: Mapping[str, Tool]) -> dict[str, Tool]:
    return {words_of(tool).word: tool for tool in tools.values()}


def _body(call: ToolCall, words: Words) -> str:
    """A call between its marks."""
    on_line = [_word(call.arguments[name]) for name in words.line if name in call.arguments]
    texts = [call.arguments[name] for name in words.below]
    separator = _separator(texts)
    if separator != _SEPARATOR:
        on_line.append(separator)
    line = " ".join([words.word, *on_line])
    if not words.below:
        return line
    return f"{line}\n" + f"\n{separator}\n".join(texts)


def _separator(texts: Sequence[str]) -> str:
    """The line between texts. Where one of several has such a line itself, it is a longer line,
    which the call's first line then names.
    """
    lines = {line for text in texts for line in text.split("\n") if line and not line.strip("=")}
    if len(texts) < 2 or _SEPARATOR not in lines:
        return _SEPARATOR
    return "=" * (1 + max(map(len, lines)))


def _word(value: Any) -> str:
    """An argument on a call's line: as it is, or as a string of JSON where it is no single word."""
    text = str(value)
    if text and text[0] not in '"=' and not re.search(r"\s", text):
        return text
    return json.dumps(text, ensure_ascii=False)


def _words(line: str) -> list[str]:
    """The words of a call's line; a string of JSON is one word."""
    return [_unquoted(match[0]) for match in _WORD.finditer(line)]


def _unquoted(word: str) -> str:
    if not word.startswith('"'):
        return word
    try:
        return json.loads(word)
    except ValueError:
        return word


def _call(tool: Tool, extra: list[str], content: str | None, task: Task | None) -> ToolCall:
    """One call from the words after the first one on its line, and the text below (None when there
    is no second line).
    """
    words = words_of(tool)
    arguments: dict[str, Any] = {}
    # no task of ours stands behind a client's tools
    if task is not None and "path" in Arguments(tool.schema).required:
        arguments["path"] = task.path
    separator = _SEPARATOR
    if len(words.below) > 1 and extra and _LONGER.fullmatch(extra[-1]):
        *extra, separator = extra
    if words.line:
        on_line = _on_line(tool, words, extra)
        if on_line is None or (content and not words.below):
            return ToolCall(tool.name, {}, f"{words.word} wants {', '.join(words.line.values())}")
        arguments |= on_line
    elif extra or (content and not words.below):
        return ToolCall(tool.name, {}, _misplaced(words))
    if words.below:
        if content is None:
            return ToolCall(tool.name, {}, _misplaced(words))
        # The first or the last text may be empty.
        texts = f"\n{content}\n".split(f"\n{separator}\n", len(words.below) - 1)
        if len(texts) < len(words.below):
            wanted = ", a line =====, ".join(words.below.values())
            return ToolCall(tool.name, {}, f"{words.word} wants {wanted}")
        texts[0] = texts[0].removeprefix("\n")
        texts[-1] = texts[-1].removesuffix("\n")
        arguments |= dict(zip(words.below, texts, strict=True))
    return ToolCall(tool.name, arguments)


def _misplaced(words: Words) -> str:
    """Complaint about a call that has too much on its line or nothing below it."""
    if words.below:
        return f"{words.word} wants a new line, then {next(iter(words.below.values()))}"
    return f"{words.word} takes nothing"


def _on_line(tool: Tool, words: Words, extra: list[str]) -> dict[str, Any] | None:
    """The arguments on a call's first line; None for too many, or for no number where one must
    stand.
    """
    if len(extra) > len(words.line):
        return None
    values: dict[str, Any] = {}
    known = Arguments(tool.schema)
    for name, text in zip(words.line, extra, strict=False):
        if known.kinds(name) == ("integer",):
            if not text.isdecimal() or len(text) >= _DIGITS:
                return None
            values[name] = int(text)
        else:
            values[name] = text
    return values


def _outside(text: str) -> ToolCall:
    return ToolCall("", {}, f"text outside a call: {' '.join(unquote(text).split())[:20]!r}")
