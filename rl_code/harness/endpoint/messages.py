"""Requests of the Anthropic Messages API, read into chats.

Blocks of a message become the parts of a chat's message: a thought, a text and calls of the
assistant are one message, results of calls are messages of their own in front of the user's text.
A system message behind the first place is the user's, since templates have no other place.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from rl_code.harness.endpoint.fields import (
    ApiError,
    check_parts,
    read_object,
    refuse,
    show,
    typed,
)
from rl_code.harness.endpoint.requests import ChatRequest, read_chat
from rl_code.harness.endpoint.thoughts import named, rebuilt, unseal

_SAME = ("model", "stream", "temperature", "top_p", "service_tier")
_READ = {
    *("messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", "metadata"),
    # checked, and without effect: the history comes whole, and the model thinks as it was trained
    *("thinking", "context_management", "output_config", "cache_control", "betas"),
}
_CACHE = "cache_control"
# The first words of a block that clients send for the counts of their own server.
_NO_MESSAGE = "x-anthropic-billing-header:"
_LONGEST_USER = 512
# Types of errors by their status, and that of all others.
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


@dataclasses.dataclass(frozen=True)
class MessagesRequest(ChatRequest):
    """A chat whose answer has the form of the Messages API."""

    form = "messages"


def read_messages(body: bytes, *, counts: bool = False) -> MessagesRequest:
    """The request in the body of a POST. counts: true if its tokens shall be counted alone. Raises
    ApiError.
    """
    fields = read_object(body)
    for key in sorted(fields.keys() - {*_SAME, *_READ}):
        if fields[key] not in (None, [], {}):
            raise refuse(key[:100], "is not known here", "unknown_parameter")
    chat: dict[str, Any] = {key: fields[key] for key in _SAME if key in fields}
    if fields.get("service_tier") == "standard_only":
        chat["service_tier"] = "default"
    if not counts:
        if fields.get("max_tokens") is None:
            raise refuse("max_tokens", "must be an integer above 0")
        chat["max_tokens"] = fields["max_tokens"]
    stops = typed(fields, "stop_sequences", list, [])
    if stops:
        chat["stop"] = stops
    for key in ("thinking", "context_management", "cache_control"):
        typed(fields, key, dict, None)
    chat |= _output(typed(fields, "output_config", dict, {}))
    user = typed(fields, "metadata", dict, {})
    check_parts(user, {"user_id"}, "metadata")
    chat["user"] = (typed(user, "user_id", str, "") or "")[:_LONGEST_USER]
    chat["tools"] = [_tool(tool, at) for at, tool in enumerate(typed(fields, "tools", list, []))]
    chat |= _choice(typed(fields, "tool_choice", dict, {}))
    chat["messages"], sources = _conversation(fields)
    request = named(sources, "messages", lambda: read_chat(chat))
    kept = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    return MessagesRequest(**kept)


def error_body(error: ApiError) -> dict[str, Any]:
    """An error as this API writes it."""
    told = error.body["error"]
    message = told["message"]
    if told["code"] == "context_length_exceeded":  # the words by which clients know it
        message = f"prompt is too long: {message}"
    kind = _ERRORS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _output(config: Mapping[str, Any]) -> dict[str, Any]:
    check_parts(config, {"effort", "format"}, "output_config")
    chat: dict[str, Any] = {"reasoning_effort": config.get("effort")}
    form = config.get("format")
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise refuse("output_config.format", f"{show(form)} must be of the type json_schema")
        schema = {"name": "answer", "schema": form.get("schema")}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def _tool(tool: Any, at: int) -> dict[str, Any]:
    """A tool as chats write it."""
    if not isinstance(tool, dict):
        raise refuse(f"tools[{at}]", "must be an object")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        why = f"{show(kind)} is not served here, only tools of the client"
        raise refuse(f"tools[{at}].type", why, "unsupported_value")
    known = {"type", "name", "description", "input_schema", "strict", _CACHE}
    check_parts(tool, {*known, "eager_input_streaming", "defer_loading"}, f"tools[{at}]")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    for key in ("description", "strict"):
        if tool.get(key) is not None:
            function[key] = tool[key]
    return {"type": "function", "function": function}


def _choice(value: Mapping[str, Any]) -> dict[str, Any]:
    """The choice of tools as chats write it."""
    if not value:
        return {}
    check_parts(value, {"type", "name", "disable_parallel_tool_use"}, "tool_choice")
    chat: dict[str, Any] = {}
    if value.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    match value.get("type"):
        case "auto" | "none" as kind:
            chat["tool_choice"] = kind
        case "any":
            chat["tool_choice"] = "required"
        case "tool":
            name = {"name": value.get("name")}
            chat["tool_choice"] = {"type": "function", "function": name}
        case kind:
            raise refuse("tool_choice.type", f"{show(kind)} must be auto, any, tool or none")
    return chat


def _conversation(fields: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages as chats write them, and where each stands in the request."""
    messages: list[dict[str, Any]] = []
    sources: list[str] = []

    def add(param: str, **message: Any) -> None:
        messages.append(message)
        sources.append(param)

    system = _system(fields.get("system"))
    if system:
        add("system", role="system", content=system)
    given = fields.get("messages")
    if not isinstance(given, list) or not given:
        raise refuse("messages", "must be a list with at least one message")
    for at, message in enumerate(given):
        param = f"messages.{at}"
        if not isinstance(message, dict):
            raise refuse(param, f"must be an object, not {type(message).__name__}")
        check_parts(message, {"role", "content"}, param)
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise refuse(f"{param}.content", "must be a text, or a list of blocks")
        match message.get("role"):
            case "assistant":
                add(param, **_assistant(blocks, param))
            case "user" | "system":
                for part in _user(blocks, param):
                    add(param, **part)
            case role:
                raise refuse(f"{param}.role", f"{show(role)} must be user or assistant")
    return messages, sources


def _system(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise refuse("system", "must be a text, or a list of blocks")
    texts = [_text(block, f"system.{at}") for at, block in enumerate(value)]
    return "\n\n".join(text for text in texts if not text.startswith(_NO_MESSAGE))


def _assistant(blocks: list[dict[str, Any]], param: str) -> dict[str, Any]:
    """A message of the assistant: its thoughts and texts, then its calls."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in enumerate(blocks):
        place = f"{param}.content.{at}"
        match block.get("type"):
            case "thinking":
                check_parts(block, {"type", "thinking", "signature"}, place)
                sealed = block.get("signature")
                texts.append(
                    unseal(sealed, f"{place}.signature")
                    if isinstance(sealed, str) and sealed
                    else rebuilt(str(block.get("thinking") or ""))
                )
            case "redacted_thinking":
                check_parts(block, {"type", "data"}, place)
                texts.append(unseal(str(block.get("data")), f"{place}.data"))
            case "tool_use":
                check_parts(block, {"type", "id", "name", "input", "caller", _CACHE}, place)
                if not isinstance(block.get("input"), dict):
                    raise refuse(f"{place}.input", "must be an object")
                arguments = json.dumps(block["input"], ensure_ascii=False)
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                texts.append(_text(block, place))
    return {"role": "assistant", "content": "".join(texts), "tool_calls": calls}


def _user(blocks: list[dict[str, Any]], param: str) -> list[dict[str, Any]]:
    """The messages that a user's blocks are: results of calls, then the text."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for at, block in enumerate(blocks):
        place = f"{param}.content.{at}"
        if block.get("type") != "tool_result":
            texts.append(_text(block, place))
            continue
        check_parts(block, {"type", "tool_use_id", "content", "is_error", _CACHE}, place)
        content = block.get("content")
        if isinstance(content, list):
            parts = [_text(one, f"{place}.content.{n}") for n, one in enumerate(content)]
            content = "\n".join(parts)
        result = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
        messages.append(result | {"content": content or ""})
    if texts or not messages:
        messages.append({"role": "user", "content": "\n".join(texts)})
    return messages


def _text(block: Any, param: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        why = f"{show(kind)} is not supported here"
        raise refuse(f"{param}.type", why, "unsupported_value")
    check_parts(block, {"type", "text", "citations", _CACHE}, param)
    if not isinstance(block.get("text"), str):
        raise refuse(f"{param}.text", "must be a text")
    return block["text"]
