"""Requests of the OpenAI Responses API, read into chats.

Items of the input become messages: a reasoning item, a text and calls that follow each other are
one message of the assistant, as they were sampled. Instructions and the developer's messages in
front are the system message; later ones are the user's, since templates have no other place.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from rl_code.harness.endpoint.fields import (
    check_parts,
    one_of,
    read_object,
    refuse,
    short_text,
    show,
    typed,
)
from rl_code.harness.endpoint.requests import ChatRequest, read_chat
from rl_code.harness.endpoint.thoughts import named, rebuilt, unseal

# Keys with the same meaning in both APIs.
_SAME = (
    "model stream temperature top_p metadata user store parallel_tool_calls safety_identifier "
    "prompt_cache_key prompt_cache_retention prompt_cache_options service_tier"
).split()
_READ = {
    *("input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning"),
    *("include", "truncation", "top_logprobs", "stream_options", "client_metadata"),
}
_INCLUDED = ("reasoning.encrypted_content", "message.output_text.logprobs")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_LONGEST_ID = 1024
# Parameters of a tool whose call is a text.
_FREE = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
# What joins the name of a group of tools and that of a tool.
_JOINT = "."


@dataclasses.dataclass(frozen=True)
class ResponsesRequest(ChatRequest):
    """A chat whose answer has the form of the Responses API."""

    form = "responses"
    # What the answer repeats of the request.
    echo: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # The tools whose calls are texts, and by the name here of those in groups: (group, name).
    free: frozenset[str] = frozenset()
    grouped: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)


def read_responses(body: bytes) -> ResponsesRequest:
    """The request in the body of a POST. Raises ApiError."""
    fields = read_object(body)
    for key in sorted(fields.keys() - {*_SAME, *_READ}):
        if fields[key] in (None, False, [], {}):
            continue
        why = "is not supported: send the whole conversation as input"
        if key not in ("previous_response_id", "conversation", "prompt", "background"):
            why = "is not known here"
        raise refuse(key[:100], why, "unknown_parameter")
    chat: dict[str, Any] = {key: fields[key] for key in _SAME if key in fields}
    included = typed(fields, "include", list, [])
    for one in included:
        if one not in _INCLUDED:
            raise refuse("include", f"{show(one)} is not supported", "unsupported_value")
    most = typed(fields, "max_output_tokens", int, None)
    if most is not None and most < 1:
        raise refuse("max_output_tokens", f"{show(most)} must be an integer above 0")
    chat["max_tokens"] = most
    if _INCLUDED[1] in included or fields.get("top_logprobs"):
        chat |= {"logprobs": True, "top_logprobs": fields.get("top_logprobs") or 0}
    one_of(fields, "truncation", ("auto", "disabled"))
    options = typed(fields, "stream_options", dict, {})
    check_parts(options, {"include_obfuscation"}, "stream_options")
    typed(fields, "client_metadata", dict, None)
    said = typed(fields, "text", dict, {})
    check_parts(said, {"format", "verbosity"}, "text")
    chat |= {"verbosity": said.get("verbosity"), "response_format": _format(said.get("format"))}
    reasoning = typed(fields, "reasoning", dict, {})
    chat["reasoning_effort"] = reasoning.get("effort")
    tools, free, grouped = _tools(fields.get("tools"))
    chat |= {"tools": tools, "tool_choice": _choice(fields.get("tool_choice"))}
    chat["messages"], sources = _Conversation(grouped).read(fields)
    request = named(sources, "input", lambda: read_chat(chat))
    kept = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    echoed = ("instructions", "max_output_tokens", "metadata", "temperature", "tool_choice")
    echo = {key: fields.get(key) for key in (*echoed, "top_p", "tools", "parallel_tool_calls")}
    return ResponsesRequest(**kept, echo=echo, free=free, grouped=grouped)


def _format(value: Any) -> Any:
    """The form of the answer as chats ask for it."""
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return value
    return {"type": "json_schema", "json_schema": {k: v for k, v in value.items() if k != "type"}}


def _choice(value: Any) -> Any:
    """The choice of tools as chats write it."""
    if not isinstance(value, dict):
        return value
    if value.get("type") in ("function", "custom"):
        check_parts(value, {"type", "name"}, "tool_choice")
        return {"type": "function", "function": {"name": value.get("name")}}
    if value.get("type") == "allowed_tools" and isinstance(value.get("tools"), list):
        check_parts(value, {"type", "mode", "tools"}, "tool_choice")
        tools = [_choice(tool) for tool in value["tools"]]
        if value.get("mode") == "auto":
            why = "'auto' is not supported, only 'required'"
            raise refuse("tool_choice.mode", why, "unsupported_value")
        return {"type": "allowed_tools", "allowed_tools": {"mode": value["mode"], "tools": tools}}
    return value


def _tools(value: Any) -> tuple[list[Any], frozenset[str], dict[str, tuple[str, str]]]:
    """The tools as chats write them; names of those whose calls are texts; those in groups."""
    if value is None:
        return [], frozenset(), {}
    if not isinstance(value, list):
        raise refuse("tools", "must be a list")
    tools: list[Any] = []
    free: set[str] = set()
    grouped: dict[str, tuple[str, str]] = {}
    for at, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and isinstance(tool.get("tools"), list):
            check_parts(tool, {"type", "name", "description", "tools"}, f"tools[{at}]")
            for inner in tool["tools"]:
                name = f"{tool.get('name')}{_JOINT}{inner.get('name')}"
                grouped[name] = (str(tool.get("name")), str(inner.get("name")))
                tools.append(_tool({**inner, "name": name}, at, free))
            continue
        tools.append(_tool(tool, at, free))
    return tools, frozenset(free), grouped


def _tool(tool: Any, at: int, free: set[str]) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind == "custom":
        check_parts(tool, {"type", "name", "description", "format"}, f"tools[{at}]")
        free.add(str(tool.get("name")))
        texts = [tool.get("description") or "", _grammar_of(tool.get("format"))]
        described = "\n".join(filter(None, texts))
        function = {"name": tool.get("name"), "description": described, "parameters": _FREE}
        return {"type": "function", "function": function}
    if kind != "function":
        why = f"{show(kind)} is not served here, only function and custom"
        raise refuse(f"tools[{at}].type", why, "unsupported_value")
    known = ("name", "description", "parameters", "strict")
    check_parts(tool, {"type", *known, "defer_loading"}, f"tools[{at}]")
    function = {key: tool[key] for key in known if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _grammar_of(value: Any) -> str:
    """The form of a text, in words: nothing enforces it."""
    if isinstance(value, dict) and value.get("type") == "grammar":
        return f"The input follows this {value.get('syntax')} grammar:\n{value.get('definition')}"
    return ""


class _Conversation:
    """Items of the input on their way to messages."""

    def __init__(self, grouped: Mapping[str, tuple[str, str]]):
        self._names = {pair: name for name, pair in grouped.items()}
        self._messages: list[dict[str, Any]] = []
        # The client's name of each message.
        self._sources: list[str] = []
        # Parts that a message of the assistant has so far: 1 a thought, 2 a text, 3 calls.
        self._stage = 0

    def read(self, fields: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
        """Messages as chats write them, and where each stands in the request."""
        instructions = typed(fields, "instructions", str, "")
        if instructions:
            self._add({"role": "system", "content": instructions}, "instructions")
        given = fields.get("input")
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        if not isinstance(given, list) or not given:
            raise refuse("input", "must be a text, or a list with at least one item")
        for at, item in enumerate(given):
            if not isinstance(item, dict):
                raise refuse(f"input[{at}]", f"must be an object, not {type(item).__name__}")
            self._item(item, f"input[{at}]")
        return self._messages, self._sources

    def _item(self, item: dict[str, Any], param: str) -> None:
        kind = item.get("type", "message")
        short_text(item, "id", _LONGEST_ID)
        match kind:
            case "message":
                self._message(item, param)
            case "reasoning":
                known = {"type", "id", "summary", "content", "encrypted_content", "status"}
                check_parts(item, known, param)
                self._assistant(1, param)["content"] += _thought(item, param)
            case "function_call" | "custom_tool_call":
                self._call(item, kind, param)
            case "function_call_output" | "custom_tool_call_output":
                check_parts(item, {"type", "id", "call_id", "output", "status", "name"}, param)
                answer = {"role": "tool", "tool_call_id": item.get("call_id")}
                self._add(answer | {"content": _text(item.get("output"), f"{param}.output")}, param)
            case _:
                raise refuse(f"{param}.type", f"{show(kind)} is not supported", "unsupported_value")

    def _message(self, item: dict[str, Any], param: str) -> None:
        check_parts(item, {"type", "id", "role", "content", "status", "phase"}, param)
        role, text = item.get("role"), _text(item.get("content"), f"{param}.content")
        if role == "assistant":
            self._assistant(2, param)["content"] += text
        elif role not in ("system", "developer"):
            self._add({"role": role, "content": text}, param)
        elif not self._messages:
            self._add({"role": "system", "content": text}, param)
        elif len(self._messages) == 1 and self._messages[0]["role"] == "system":
            self._messages[0]["content"] += f"\n\n{text}"
        else:
            self._add({"role": "user", "content": text}, param)

    def _call(self, item: dict[str, Any], kind: str, param: str) -> None:
        argument = "arguments" if kind == "function_call" else "input"
        known = {"type", "id", "call_id", "name", argument, "status", "namespace"}
        check_parts(item, known, param)
        name, value = item.get("name"), item.get(argument)
        if not isinstance(name, str) or not isinstance(value, str):
            raise refuse(param, f"name and {argument} must be texts")
        arguments = value if argument == "arguments" else json.dumps({"input": value})
        pair = (str(item.get("namespace")), name)
        function = {"name": self._names.get(pair, name), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        self._assistant(3, param)["tool_calls"].append(call)

    def _add(self, message: dict[str, Any], param: str) -> None:
        self._messages.append(message)
        self._sources.append(param)
        self._stage = 0

    def _assistant(self, stage: int, param: str) -> dict[str, Any]:
        """The message that a part belongs to: the one in progress, or else a new one."""
        begun = self._stage
        if not begun or stage < begun or stage == begun < 3:
            self._add({"role": "assistant", "content": "", "tool_calls": []}, param)
        self._stage = stage
        return self._messages[-1]


def _thought(item: Mapping[str, Any], param: str) -> str:
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed:
        return unseal(sealed, f"{param}.encrypted_content")
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise refuse(param, "summary and content must be lists of parts")
    return rebuilt("\n".join(str(part.get("text", "")) for part in parts))


def _text(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse(param, "must be a text, or a list of parts")
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXTS:
            why = f"{show(kind)} is not supported, only texts"
            raise refuse(f"{param}[{at}].type", why, "unsupported_value")
        text = part.get(_TEXTS[kind])
        if not isinstance(text, str):
            raise refuse(f"{param}[{at}]", "must have a text")
        texts.append(text)
    return "\n".join(texts) if len(texts) > 1 else "".join(texts)
