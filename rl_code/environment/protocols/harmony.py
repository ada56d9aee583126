"""Harmony, the format of gpt-oss: messages in channels, and calls as messages to a function.

    prompt       <|start|>system<|message|>…<|end|>           who the model is, its channels
                 <|start|>developer<|message|>…<|end|>        instructions, and functions as types
                 <|start|>user<|message|>…<|end|><|start|>assistant
    assistant    <|channel|>analysis<|message|>a thought<|end|><|start|>assistant
                 <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
    observation  <|start|>functions.NAME to=assistant<|channel|>commentary<|message|>…<|end|>
                 <|start|>assistant

The receiver of a call may stand in front of the channel too. Answers are in the channel "final",
and end in <|return|>. The published format drops thoughts of earlier turns and writes <|end|>
behind earlier answers; here both stay as they were sampled.

Source: the published description of the format (https://cookbook.openai.com/articles/openai-harmony),
and its renderer, the package ``openai-harmony``, which the tests compare with.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

from models.marks import unquote, unquote_all
from rl_code.environment.protocols.grammar import grammar_of_harmony
from rl_code.environment.protocols.protocol import Protocol
from rl_code.environment.protocols.typescript import declaration
from rl_code.environment.tools.schema import Arguments, json_decoder
from rl_code.environment.tools.text import one_line
from rl_code.environment.tools.tool import Tool
from rl_code.types import Task, ToolCall, ToolResult

_OPENING = "<|start|>assistant"
_CHANNEL, _MESSAGE, _END = "<|channel|>", "<|message|>", "<|end|>"
_CALL, _RETURN = "<|call|>", "<|return|>"
_FUNCTIONS = "functions."
# What a header says: who the message is for, and its channel.
_RECEIVER = re.compile(r"(?:\A|\s)to=([^\s<]+)")
_IN_CHANNEL = re.compile(r"<\|channel\|>(\w*)")
# Names of functions that may be repeated in the header of their result.
_NAME = re.compile(r"[\w.:-]{1,200}")
_JSON = json_decoder(repeated=False)
_CHANNELS = (
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
_FORM = (
    f"write {_CHANNEL}commentary to=functions.NAME <|constrain|>json{_MESSAGE}, then the arguments "
    f"as a JSON object and {_CALL}"
)

Effort = Literal["low", "medium", "high"]


@dataclasses.dataclass(frozen=True)
class Harmony(Protocol):
    """Turns in the harmony format. A sampled message is all up to a call or an answer, so that it
    holds thoughts, and one call at most. A message with neither is answered by the user.
    """

    # How long the model should think.
    reasoning: Effort = "medium"
    # The day that the model is told, such as "2025-06-28"; "" to tell none, so that a prompt is the
    # same on every day.
    date: str = ""
    stop_tokens: tuple[str, ...] = dataclasses.field(
        default=(_RETURN, _CALL, "<|endoftext|>"), kw_only=True
    )
    converses: ClassVar[bool] = True
    tells_marks: ClassVar[bool] = True
    names_results: ClassVar[bool] = True
    SPECIAL_TOKENS: ClassVar[tuple[str, ...]] = (
        *("<|pad|>", "<|endoftext|>", "<|start|>", _END, _MESSAGE, _CHANNEL),
        *("<|constrain|>", _CALL, _RETURN),
    )

    def __post_init__(self):
        if self.reasoning not in get_args(Effort):
            known = ", ".join(map(repr, get_args(Effort)))
            raise ValueError(f"reasoning={self.reasoning!r} must be one of {known}")
        if self.date and not re.fullmatch(r"\d{4}-\d\d-\d\d", self.date):
            raise ValueError(f"date={self.date!r} must be a day such as '2025-06-28', or ''")

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        schemas: Sequence[Mapping[str, Any]],
        opening: bool,
    ) -> str:
        if not messages:
            raise ValueError("a conversation needs at least one message")
        first = messages[0] if messages[0]["role"] in ("system", "developer") else None
        functions = [schema["function"] for schema in schemas]
        parts = [self._system(bool(functions)), _developer(first, functions)]
        called: list[str] = []  # functions whose results are to come
        for message in messages[first is not None :]:
            match message["role"]:
                case "system" | "developer":
                    parts.append(_developer(message, []))
                case "user":
                    parts.append(_message("user", message["content"]))
                case "tool":
                    name = message.get("name") or (called.pop(0) if called else "")
                    parts.append(_result(name, message["content"]))
                case "assistant":
                    calls = [call["function"] for call in message.get("tool_calls") or ()]
                    called = [call["name"] for call in calls]
                    parts += _said(message, calls)
                case role:
                    raise ValueError(f"a message has role {role!r}, for which harmony has no place")
        return "".join(parts) + (_OPENING if opening else "")

    def parse(self, text: str, task: Task | None, tools: Mapping[str, Tool]) -> list[ToolCall]:
        messages = list(_messages(text))
        calls = [_read(one, tools) for one in messages if one.receiver]
        if calls:
            return calls
        if self.thinking(text):
            return [ToolCall("", {}, f"the thought never ends; close it with {_END}, then {_FORM}")]
        return [ToolCall("", {}, f"no tool call; {_FORM}. Call submit when the work is done")]

    def has_call(self, text: str) -> bool:
        return any(one.receiver for one in _messages(text))

    def thinking(self, text: str) -> bool:
        *_, last = _messages(text)
        return last.channel == "analysis" and not last.receiver and not last.closed

    def before_calls(self, text: str) -> str:
        start = next((one.start for one in _messages(text) if one.receiver), len(text))
        return unquote(text[:start].removesuffix(_OPENING))

    def grammar(
        self,
        functions: Sequence[Mapping[str, Any]],
        special: Callable[[str], str],
        *,
        many: bool = True,
        content: str = "",
    ) -> str:
        """As ``Protocol.grammar``; a message has one call, whatever ``many`` says."""
        if content:
            raise ValueError("answers of this model stand in a channel, so a message is no JSON")
        return grammar_of_harmony(functions, special)

    def observation(self, results: Sequence[ToolResult]) -> str:
        return "".join(_result(one.name, one.content) for one in results) + _OPENING

    def _system(self, calls: bool) -> str:
        lines = ["You are ChatGPT, a large language model trained by OpenAI."]
        lines += ["Knowledge cutoff: 2024-06"]
        lines += [f"Current date: {self.date}"] if self.date else []
        lines += ["", f"Reasoning: {self.reasoning}", ""]
        lines += [_CHANNELS]
        if calls:
            lines += ["Calls to these tools must go to the commentary channel: 'functions'."]
        return _message("system", "\n".join(lines))


@dataclasses.dataclass(frozen=True)
class _Said:
    """One message of those that the assistant wrote at once."""

    # Place in the text behind the words that open it.
    start: int
    channel: str
    # "" for a message to nobody in particular.
    receiver: str
    body: str
    # True if its end was written.
    closed: bool


def _messages(text: str) -> Iterator[_Said]:
    """The messages of a text that follows ``<|start|>assistant``, at least one."""
    at = 0
    for number, piece in enumerate(text.split("<|start|>")):
        opening = len("assistant") if number and piece.startswith("assistant") else 0
        head, _, body = piece[opening:].partition(_MESSAGE)
        body, end, _ = body.partition(_END)
        receiver = _RECEIVER.search(head.replace("<|", " <|"))
        channel = _IN_CHANNEL.search(head)
        to = receiver[1] if receiver else ""
        yield _Said(at + opening, channel[1] if channel else "", to, body, bool(end))
        at += len(piece) + len("<|start|>")


def _read(said: _Said, tools: Mapping[str, Tool]) -> ToolCall:
    name = unquote(said.receiver).removeprefix(_FUNCTIONS)
    if not _NAME.fullmatch(name):
        return ToolCall("", {}, f"{one_line(name, 40)!r} is no name of a function; {_FORM}")
    try:
        value = _JSON.decode(said.body)
    except (ValueError, RecursionError, MemoryError) as error:
        return ToolCall(name, {}, f"the call is not valid JSON ({error}); {_FORM}")
    if not isinstance(value, dict):
        return ToolCall(name, {}, f"the arguments must be a JSON object; {_FORM}")
    known = Arguments(tools[name].schema if name in tools else {})
    value = unquote_all(value)
    return ToolCall(name, {key: known.normal(key, each) for key, each in value.items()})


def _message(head: str, body: str, end: str = _END) -> str:
    return f"<|start|>{head}{_MESSAGE}{body}{end}"


def _developer(message: Mapping[str, Any] | None, functions: Sequence[Mapping[str, Any]]) -> str:
    """The developer's message: instructions and functions; "" without either."""
    parts = []
    if message is not None and message["content"]:
        parts.append(f"# Instructions\n\n{message['content']}")
    if functions:
        types = "\n\n".join(map(declaration, functions))
        parts.append(
            f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{types}\n\n"
            "} // namespace functions"
        )
    return _message("developer", "\n\n".join(parts)) if parts else ""


def _result(name: str, content: str) -> str:
    """The result of a call. What answers no call of a function is said by the user."""
    if not name:
        return _message("user", content)
    return _message(f"{_FUNCTIONS}{name} to=assistant{_CHANNEL}commentary", content)


def _said(message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A message of the assistant in a conversation. Content that says its channel is as it was
    sampled.
    """
    content = message["content"] or ""
    if content.startswith((_CHANNEL, " to=")) and not calls:
        end = _CALL if [*_messages(content)][-1].receiver else _RETURN
        yield f"{_OPENING}{content}{end}"
        return
    if thought := message.get("reasoning_content"):
        yield _message(f"assistant{_CHANNEL}analysis", thought)
    if not calls:
        yield _message(f"assistant{_CHANNEL}final", content, _RETURN)
        return
    if content:
        yield _message(f"assistant{_CHANNEL}commentary", content)
    for call in calls:
        head = f"assistant to={_FUNCTIONS}{call['name']}{_CHANNEL}commentary <|constrain|>json"
        yield _message(head, json.dumps(call["arguments"], ensure_ascii=False), _CALL)
