"""Requests of the OpenAI chat API: read and checked."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from models.chat import ROLES
from rl_code.environment.tools.schema import Arguments
from rl_code.harness.endpoint.conversation import Call, Message, in_order_of_calls
from rl_code.harness.endpoint.fields import (
    ApiError,
    Request,
    check_keys,
    check_parts,
    common,
    one_of,
    read_object,
    refuse,
    short_text,
    show,
    typed,
)
from rl_code.types import MOST_ALTERNATIVES

# Keys that only chats have.
_KEYS = (
    "messages tools tool_choice parallel_tool_calls max_completion_tokens top_logprobs "
    "response_format reasoning_effort verbosity service_tier prediction safety_identifier "
    "prompt_cache_key prompt_cache_retention prompt_cache_options"
).split()
# What only chats have, and may be asked for only as it is.
_FIXED: Mapping[str, tuple[Any, ...]] = {"modalities": (None, ["text"])}
# Hints for other models and for the caches of other servers. They are checked and change nothing:
# key -> the values there are, () for a text, None for an object.
_HINTS: Mapping[str, tuple[str, ...] | None] = {
    "reasoning_effort": ("none", "minimal", "low", "medium", "high", "xhigh", "max"),
    "verbosity": ("low", "medium", "high"),
    "service_tier": ("auto", "default", "flex", "scale", "priority", "fast"),
    "prompt_cache_key": (),
    "prompt_cache_retention": ("in_memory", "24h"),
    "prompt_cache_options": None,
    "prediction": None,
}
_LONGEST_HINT = 1024
# Of a part of a message: where a cache may end. Here every beginning of a conversation is kept.
_CACHE_MARKS = ("cache_control", "prompt_cache_breakpoint")
# Names of tools, which calls repeat.
_TOOL_NAME = re.compile(r"[\w./:-]{1,128}")
# The longest schema of an answer, in characters of JSON.
_LONGEST_SCHEMA = 1 << 16


@dataclasses.dataclass(frozen=True)
class ChatRequest(Request):
    """A request for the next message of a conversation."""

    kind = "chat"
    messages: tuple[Message, ...]
    # Schemas of functions, each the value of "function" in the API's form.
    tools: tuple[Mapping[str, Any], ...] = ()
    # Names of the tools of which the message must call at least one; () where it need not.
    forced: tuple[str, ...] = ()
    # True if a message may have several calls.
    parallel: bool = True

    @property
    def held(self) -> bool:
        return bool(self.tools)  # what looks like text may become a call


def read_request(body: bytes) -> ChatRequest:
    """The request in the body of a POST. Raises ApiError."""
    return read_chat(read_object(body))


def read_chat(fields: dict[str, Any]) -> ChatRequest:
    """The request that an object is. Raises ApiError."""
    check_keys(fields, _KEYS, _FIXED)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refuse("messages", "must be a list with at least one message")
    newer = typed(fields, "max_completion_tokens", int, None)
    if newer is not None:
        # the newer name of the same
        if fields.get("max_tokens") not in (None, newer):
            raise refuse("max_tokens", "is not what max_completion_tokens is")
        fields = fields | {"max_tokens": newer}
    logprobs = typed(fields, "logprobs", bool, False)
    tools = _tools(fields.get("tools"))
    json_schema = _json_schema(fields.get("response_format"))
    choice = fields.get("tool_choice")
    forced, one = _forced(choice, [tool["name"] for tool in tools])
    parallel = typed(fields, "parallel_tool_calls", bool, True)
    read = common(fields)
    end_user = short_text(fields, "safety_identifier", _LONGEST_HINT) or read.pop("end_user")
    return ChatRequest(
        messages=tuple(in_order_of_calls([_message(one, at) for at, one in enumerate(messages)])),
        tools=() if choice == "none" else tools,
        forced=forced,
        parallel=parallel and not one,
        logprobs=logprobs,
        alternatives=_alternatives(fields, logprobs),
        json_schema="" if forced else json_schema,  # calls alone have no content
        unheeded=_hints(fields),
        **read | {"end_user": end_user},
    )


def _alternatives(fields: Mapping[str, Any], logprobs: bool) -> int:
    count = typed(fields, "top_logprobs", int, 0)
    if not 0 <= count <= MOST_ALTERNATIVES:
        raise refuse("top_logprobs", f"{show(count)} must be 0 to {MOST_ALTERNATIVES}")
    if count and not logprobs:
        raise refuse("top_logprobs", "needs logprobs=true")
    return count


def _hints(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The hints that a request has. Raises ApiError for what is none."""
    for key, values in _HINTS.items():
        if values is None:
            typed(fields, key, dict, None)
        elif values:
            one_of(fields, key, values)
        else:
            short_text(fields, key, _LONGEST_HINT)
    return tuple(key for key in _HINTS if fields.get(key) is not None)


def _forced(choice: Any, tools: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """The names of the tools of which one must be called, () for none, and whether it is called
    only once.

    tools: names of all tools.
    """
    if choice in (None, "auto", "none"):
        return (), False
    if choice == "required":
        names, one = tools, False
    else:
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind == "function":
            check_parts(choice, {"type", "function"}, "tool_choice")
            names, one = [_name_of(choice.get("function"), "tool_choice.function")], True
        elif kind == "allowed_tools":
            check_parts(choice, {"type", "allowed_tools"}, "tool_choice")
            names, one = _allowed(choice.get("allowed_tools")), False
        else:
            why = f"{show(choice)} must be 'none', 'auto', 'required' or name functions"
            raise refuse("tool_choice", why, "unsupported_value")
    for name in names:
        if name not in tools:
            raise refuse("tool_choice", f"{show(name)} is none of the tools")
    if not names:
        raise refuse("tool_choice", "there are no tools to call")
    return tuple(dict.fromkeys(names)), one


def _allowed(value: Any) -> list[str]:
    """The names in the choice of a part of the tools."""
    param = "tool_choice.allowed_tools"
    if not isinstance(value, dict) or not isinstance(value.get("tools"), list):
        raise refuse(param, "must have a mode, and tools as a list")
    check_parts(value, {"mode", "tools"}, param)
    if value.get("mode") != "required":
        # the message may then be text, for which there is no grammar
        why = f"{show(value.get('mode'))} is not supported, only 'required'"
        raise refuse(f"{param}.mode", why, "unsupported_value")
    names = []
    for at, tool in enumerate(value["tools"]):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise refuse(f"{param}.tools[{at}]", "must be of the type function")
        check_parts(tool, {"type", "function"}, f"{param}.tools[{at}]")
        names.append(_name_of(tool.get("function"), f"{param}.tools[{at}].function"))
    return names


def _name_of(function: Any, param: str) -> str:
    """The name of a function in a choice."""
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise refuse(param, "must have a name")
    check_parts(function, {"name"}, param)
    return name


def _json_schema(value: Any) -> str:
    """The schema that an answer must have, as text; "" for none."""
    if value is None:
        return ""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        check_parts(value, {"type"}, "response_format")
        return ""
    if kind == "json_object":
        check_parts(value, {"type"}, "response_format")
        return '{"type": "object"}'
    given = value.get("json_schema") if kind == "json_schema" else None
    if not isinstance(given, dict):
        why = f"{show(value)} must be of the type text, json_object or json_schema"
        raise refuse("response_format", why)
    check_parts(value, {"type", "json_schema"}, "response_format")
    param = "response_format.json_schema"
    check_parts(given, {"name", "description", "schema", "strict"}, param)
    schema = given.get("schema", {"type": "object"})
    name = given.get("name")
    if not isinstance(schema, dict) or not isinstance(name, str) or not name:
        raise refuse(param, "must have a name, and a schema as an object")
    _check_said(given, param)
    text = json.dumps(schema)
    if len(text) > _LONGEST_SCHEMA:
        raise refuse(param, f"has {len(text)} characters; at most {_LONGEST_SCHEMA} are read")
    return text


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise refuse("tools", "must be a list")
    schemas: list[Mapping[str, Any]] = []
    for at, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise refuse(f"tools[{at}]", 'must be {"type": "function", "function": {...}}')
        name, parameters = function.get("name"), function.get("parameters", {})
        param = f"tools[{at}].function"
        if not isinstance(name, str) or not name or not isinstance(parameters, dict):
            raise refuse(param, "must have a name, and parameters as an object")
        if not _TOOL_NAME.fullmatch(name):
            why = f"{show(name)} must be at most 128 letters, digits and _-./:"
            raise refuse(f"{param}.name", why)
        if any(name == other["name"] for other in schemas):
            raise refuse(f"{param}.name", f"{show(name)} is the name of an earlier tool")
        if not Arguments(function).is_object:
            raise refuse(f"{param}.parameters", "must be the schema of an object")
        _check_said(function, param)
        check_parts(tool, {"type", "function", *_CACHE_MARKS}, f"tools[{at}]")
        schemas.append(function)
    return tuple(schemas)


def _check_said(value: Mapping[str, Any], param: str) -> None:
    """Raises ApiError for a description, or a word on strictness, that is none."""
    for key, kind in (("description", str), ("strict", bool)):
        if type(value.get(key)) not in (kind, type(None)):
            raise refuse(f"{param}.{key}", f"must be {kind.__name__}")


def _message(value: Any, at: int) -> Message:
    """One message of a request."""
    param = f"messages[{at}]"
    if not isinstance(value, dict):
        raise refuse(param, f"must be an object, not {type(value).__name__}")
    role = value.get("role")
    role = "system" if role == "developer" else role
    if not isinstance(role, str) or role not in ROLES:
        raise refuse(f"{param}.role", f"{show(role)} must be one of {', '.join(ROLES)}")
    if role == "system" and at > 0:
        raise refuse(f"{param}.role", "only the first message may be a system message")
    known = {"role", "content", "name", "tool_calls" if role == "assistant" else "tool_call_id"}
    check_parts(value, known, param)
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list) or (calls and role != "assistant"):
        raise refuse(f"{param}.tool_calls", "must be a list in a message of the assistant")
    content, spans = _content(value.get("content"), param)
    return Message(
        role=role,
        content=content,
        spans=spans,
        calls=tuple(_call(call, f"{param}.tool_calls[{n}]") for n, call in enumerate(calls)),
        call_id=short_text(value, "tool_call_id", _LONGEST_HINT),
        name=short_text(value, "name", _LONGEST_HINT),
    )


def _content(content: Any, param: str) -> tuple[str, tuple[tuple[int, int], ...] | None]:
    """The text of a message, which may come in parts, and ``Message.spans``."""
    if content is None:
        return "", None
    if isinstance(content, str):
        return content, None
    text = ""
    spans = []
    for part in content if isinstance(content, Sequence) else [None]:
        said = _part(part, param)
        if said is None:
            raise refuse(
                f"{param}.content", "must be a text, or parts of the types text and document"
            )
        if part["type"] == "document":
            spans.append((len(text), len(text) + len(said)))
        text += said
    return text, tuple(spans)


def _part(part: Any, param: str) -> str | None:
    """The text of a part; None for one that is no text."""
    kinds = ("text", "refusal", "document")
    if not isinstance(part, dict) or part.get("type") not in kinds:
        return None
    key = "refusal" if part["type"] == "refusal" else "text"
    check_parts(part, {"type", key, *_CACHE_MARKS}, f"{param}.content")
    said = part.get(key)
    return said if isinstance(said, str) else None


def _call(value: Any, param: str) -> Call:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise refuse(param, 'must be {"id": ..., "type": "function", "function": {...}}')
    texts = [value.get("id", ""), function.get("name"), function.get("arguments")]
    if not all(isinstance(text, str) for text in texts):
        raise refuse(param, "id, name and arguments must be texts")
    if value.get("type") not in (None, "function"):
        raise refuse(f"{param}.type", f"{show(value['type'])} must be function")
    # clients that put a stream together keep each call's place
    check_parts(value, {"id", "type", "function", "index"}, param)
    check_parts(function, {"name", "arguments"}, f"{param}.function")
    id, name, arguments = texts
    return Call(id, name, _arguments(arguments, f"{param}.function.arguments"))


def _arguments(text: str, param: str) -> str:
    """Arguments of a call as they stand; those of a call without any may be left empty."""
    if not text.strip():
        return "{}"
    try:
        read_object(text.encode())
    except ApiError as error:
        raise refuse(param, f"must be an object as JSON: {error}") from error
    return text
