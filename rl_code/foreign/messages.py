"""Chat messages of a dump as spans of text.

A dump without token ids does not say which template made tokens of its messages. So each message
is written as ``[role]``, its content, and its calls of tools: a layout of ours, for readers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl_code.foreign.dump import Span
from rl_code.foreign.reading import wrong
from rl_code.types import ToolCall, ToolResult


def prompt_spans(place: object, field: str, prompt: Any) -> list[Span]:
    """Spans of a prompt: a text, or a list of messages."""
    if isinstance(prompt, str):
        return [Span("prompt", prompt)]
    return [
        Span("prompt", text_of(place, field, message))
        for message in messages_of(place, field, prompt)
    ]


def answer_spans(place: object, field: str, answer: Any) -> list[Span]:
    """Spans of what followed a prompt: a text, or a list of messages."""
    if isinstance(answer, str):
        return [Span("assistant", answer)]
    return [
        span_of(place, field, message, sampled=message["role"] == "assistant")
        for message in messages_of(place, field, answer)
    ]


def span_of(place: object, field: str, message: Mapping[str, Any], sampled: bool) -> Span:
    """The span of a message behind the prompt."""
    text = text_of(place, field, message)
    if sampled:
        return Span("assistant", text, calls=calls_of(place, field, message))
    results = ()
    if message["role"] == "tool":
        name = message.get("name") or message.get("tool_call_id") or "tool"
        results = (ToolResult(str(name), content_of(place, field, message.get("content"))),)
    return Span("tool", text, results=results)


def messages_of(place: object, field: str, value: Any) -> list[dict[str, Any]]:
    """A list of messages, each with its role, without the keys that are None."""
    if not isinstance(value, list):
        wrong(place, field, "a text or a list of messages", value)
    found = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            wrong(place, field, "messages with a role", message)
        found.append({key: item for key, item in message.items() if item is not None})
    return found


def content_of(place: object, field: str, content: Any) -> str:
    """The text of a message's content, its parts one after another; parts that are no text are
    named.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        wrong(place, field, "content that is a text or a list of parts", content)
    parts = []
    for part in content:
        if not isinstance(part, dict):
            wrong(place, field, "content of parts", part)
        text = part.get("text")
        parts.append(text if isinstance(text, str) else f"[{part.get('type', 'part')}]")
    return "\n".join(parts)


def text_of(place: object, field: str, message: Mapping[str, Any]) -> str:
    """A message as a text."""
    lines = [f"[{message['role']}]"]
    if isinstance(reasoning := message.get("reasoning_content"), str) and reasoning:
        lines.append(reasoning)
    lines.append(content_of(place, field, message.get("content")))
    for call in calls_of(place, field, message):
        lines.append(f"[call {call.name}] {json.dumps(call.arguments, default=repr)}")
    return "\n".join(lines) + "\n"


def calls_of(place: object, field: str, message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """Calls of tools that a message makes, as the chat API or verifiers write them."""
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence):
        wrong(place, field, "tool_calls that are a list", calls)
    found = []
    for call in calls:
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            wrong(place, field, "a call of a tool with a name", call)
        arguments = inner.get("arguments")
        error = ""
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                error = "arguments that are no JSON"
        if not isinstance(arguments, dict):
            arguments = {} if arguments is None else {"input": inner.get("arguments")}
        found.append(ToolCall(inner["name"], arguments, error))
    return tuple(found)
