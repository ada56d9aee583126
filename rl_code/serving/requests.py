"""Requests of the OpenAI chat API: read and checked, with errors in that API's shape."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from models.chat import ROLES

# Longest request, in bytes.
MOST_BYTES = 8 * 2**20
# The deepest nesting of JSON that is read; messages need far less.
_DEEPEST = 32
# Keys that say nothing that matters here. Every other key that is not read is refused, so that
# nobody believes it had an effect.
_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key"}
)
# What may be asked for only as it is: key -> the values that say so.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "top_logprobs": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "tool_choice": (None, "auto"),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
}


class ApiError(Exception):
    """An answer with an error: what goes wrong, in the shape of the API."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": code},
        }


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a tool in a message, as the API writes it."""

    id: str
    name: str
    # JSON.
    arguments: str

    @property
    def content(self) -> tuple[str, Any]:
        """What two calls must share to be the same: their arguments as values, where they are
        JSON.
        """
        try:
            return self.name, json.loads(self.arguments)
        except ValueError:
            return self.name, self.arguments


@dataclasses.dataclass(frozen=True)
class Message:
    """A message of a conversation, without what says nothing to the model."""

    role: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    # The call that a message of the role "tool" answers.
    call_id: str = ""

    def same_as(self, other: Message) -> bool:
        """Whether they say the same. Agents write their history anew: white space at the ends of
        the text, and that of JSON, does not count.
        """
        return (
            self.role == other.role
            and self.content.strip() == other.content.strip()
            and [call.content for call in self.calls] == [call.content for call in other.calls]
            and self.call_id == other.call_id
        )

    def for_template(self, break_up) -> dict[str, Any]:
        """As chat templates read it. break_up: takes special tokens in a text apart."""
        message: dict[str, Any] = {"role": self.role, "content": break_up(self.content)}
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": _function(call, break_up)} for call in self.calls
            ]
        return message


def _function(call: Call, break_up) -> dict[str, Any]:
    _, arguments = call.content
    if not isinstance(arguments, dict):
        arguments = {"arguments": call.arguments}
    broken = json.loads(break_up(json.dumps(arguments, ensure_ascii=False)))
    return {"name": break_up(call.name), "arguments": broken}


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """A request for the next message of a conversation."""

    messages: tuple[Message, ...]
    model: str = ""
    # Schemas of functions, each the value of "function" in the API's form.
    tools: tuple[Mapping[str, Any], ...] = ()
    # Texts that end the message; they are not part of the answer.
    stop: tuple[str, ...] = ()
    # The most tokens of the message; None for as many as there is room for.
    max_tokens: int | None = None
    # None where the request leaves it to the server.
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Whether the answer has the log-probability of each token.
    logprobs: bool = False
    stream: bool = False
    # Whether a stream ends with a chunk that says what was used.
    include_usage: bool = False


def read_request(body: bytes) -> ChatRequest:
    """The request in the body of a POST. Raises ApiError."""
    if len(body) > MOST_BYTES:
        raise ApiError(
            f"the request has {len(body)} bytes; at most {MOST_BYTES} are read",
            status=413,
            code="request_too_large",
        )
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the request is not JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(f"the request must be an object, not {type(fields).__name__}")
    _check_depth(fields)
    for key, allowed in _FIXED.items():
        if fields.get(key) not in allowed:
            raise _refuse(
                key, f"{fields[key]!r} is not supported, only {allowed[-1]!r}", "unsupported_value"
            )
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _refuse("messages", "must be a list with at least one message")
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise _refuse("stream_options", "must be an object")
    most = fields.get("max_completion_tokens")
    request = ChatRequest(
        messages=tuple(_message(each, at) for at, each in enumerate(messages)),
        model=_typed(fields, "model", str, ""),
        tools=_tools(fields.get("tools")),
        stop=_stop(fields.get("stop")),
        max_tokens=_typed(fields, "max_tokens", int, None) if most is None else most,
        seed=_typed(fields, "seed", int, None),
        temperature=_number(fields, "temperature"),
        top_p=_number(fields, "top_p"),
        logprobs=_typed(fields, "logprobs", bool, False),
        stream=_typed(fields, "stream", bool, False),
        include_usage=bool(options.get("include_usage", False)),
    )
    known = {field.name for field in dataclasses.fields(ChatRequest)} - {"include_usage"}
    known |= _IGNORED | _FIXED.keys() | {"stream_options", "max_completion_tokens"}
    for key in fields.keys() - known:
        raise _refuse(key, "is not known here", "unknown_parameter")
    if request.max_tokens is not None and (
        type(request.max_tokens) is not int or request.max_tokens < 1
    ):
        raise _refuse("max_tokens", f"{request.max_tokens!r} must be an integer above 0")
    return request


def _refuse(param: str, why: str, code: str = "invalid_value") -> ApiError:
    return ApiError(f"{param}: {why}", code=code, param=param)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            child
            for each in level
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise ApiError(f"the request is nested more than {_DEEPEST} deep", code="invalid_json")


def _typed(fields: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = fields.get(key)
    if value is None:
        return default
    if type(value) is not kind:
        raise _refuse(key, f"must be {kind.__name__}, got {type(value).__name__}")
    return value


def _number(fields: Mapping[str, Any], key: str) -> float | None:
    value = fields.get(key)
    if value is None:
        return None
    if type(value) not in (int, float):
        raise _refuse(key, f"must be a number, got {type(value).__name__}")
    return float(value)


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if (
        not isinstance(texts, list)
        or len(texts) > 4
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise _refuse("stop", "must be a text, or up to 4 texts, none of them empty")
    return tuple(texts)


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _refuse("tools", "must be a list")
    schemas = []
    for at, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise _refuse(f"tools[{at}]", 'must be {"type": "function", "function": {...}}')
        name, parameters = function.get("name"), function.get("parameters", {})
        if not isinstance(name, str) or not name or not isinstance(parameters, dict):
            raise _refuse(f"tools[{at}].function", "must have a name, and parameters as an object")
        schemas.append(function)
    return tuple(schemas)


def _message(value: Any, at: int) -> Message:
    """One message of a request."""
    param = f"messages[{at}]"
    if not isinstance(value, dict):
        raise _refuse(param, f"must be an object, not {type(value).__name__}")
    role = {"developer": "system"}.get(value.get("role"), value.get("role"))
    if role not in ROLES:
        raise _refuse(f"{param}.role", f"{role!r} must be one of {', '.join(ROLES)}")
    if role == "system" and at > 0:
        raise _refuse(f"{param}.role", "only the first message may be a system message")
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list) or (calls and role != "assistant"):
        raise _refuse(f"{param}.tool_calls", "must be a list in a message of the assistant")
    return Message(
        role=role,
        content=_text(value.get("content"), param),
        calls=tuple(_call(call, f"{param}.tool_calls[{n}]") for n, call in enumerate(calls)),
        call_id=_typed(value, "tool_call_id", str, "") if role == "tool" else "",
    )


def _text(content: Any, param: str) -> str:
    """The text of a message, which may come in parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _encodable(content)
    if isinstance(content, Sequence):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if all(isinstance(text, str) for text in texts):
            return _encodable("".join(texts))
    raise _refuse(f"{param}.content", "must be a text, or parts of the type text")


def _encodable(text: str) -> str:
    """The text without lone surrogates, which JSON can spell and no tokenizer can read."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _call(value: Any, param: str) -> Call:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise _refuse(param, 'must be {"id": ..., "type": "function", "function": {...}}')
    texts = [value.get("id", ""), function.get("name"), function.get("arguments")]
    if not all(isinstance(text, str) for text in texts):
        raise _refuse(param, "id, name and arguments must be texts")
    return Call(*texts)
