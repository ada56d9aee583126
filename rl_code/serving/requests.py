"""Requests of the OpenAI chat API: read and checked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from models.chat import ROLES
from models.marks import Marks
from rl_code.serving.fields import (
    Request,
    check_keys,
    common,
    read_object,
    refuse,
    show,
    typed,
)

# Keys that only chats have and that say nothing that matters here.
_IGNORED = ("parallel_tool_calls", "prompt_cache_key", "max_completion_tokens")
# What only chats have, and may be asked for only as it is.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "top_logprobs": (None, 0),
    "tool_choice": (None, "auto"),
    "response_format": (None, {"type": "text"}),
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

    def for_template(self, marks: Marks) -> dict[str, Any]:
        """As chat templates read it. marks: of the tokenizer, quoted in all that was sent."""
        message: dict[str, Any] = {"role": self.role, "content": marks.quote(self.content)}
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": _function(call, marks)} for call in self.calls
            ]
        return message


def _function(call: Call, marks: Marks) -> dict[str, Any]:
    _, arguments = call.content
    if not isinstance(arguments, dict):
        arguments = {"arguments": call.arguments}
    return marks.quote_all({"name": call.name, "arguments": arguments})


@dataclasses.dataclass(frozen=True)
class ChatRequest(Request):
    """A request for the next message of a conversation."""

    kind = "chat"
    messages: tuple[Message, ...]
    # Schemas of functions, each the value of "function" in the API's form.
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def held(self) -> bool:
        return bool(self.tools)  # what looks like text may become a call


def read_request(body: bytes) -> ChatRequest:
    """The request in the body of a POST. Raises ApiError."""
    fields = read_object(body)
    check_keys(fields, ChatRequest, _IGNORED, _FIXED)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refuse("messages", "must be a list with at least one message")
    if fields.get("max_completion_tokens") is not None:
        # the newer name of the same
        fields = fields | {"max_tokens": fields["max_completion_tokens"]}
    return ChatRequest(
        messages=tuple(_message(each, at) for at, each in enumerate(messages)),
        tools=_tools(fields.get("tools")),
        logprobs=typed(fields, "logprobs", bool, False),
        **common(fields),
    )


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise refuse("tools", "must be a list")
    schemas = []
    for at, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise refuse(f"tools[{at}]", 'must be {"type": "function", "function": {...}}')
        name, parameters = function.get("name"), function.get("parameters", {})
        if not isinstance(name, str) or not name or not isinstance(parameters, dict):
            raise refuse(f"tools[{at}].function", "must have a name, and parameters as an object")
        schemas.append(function)
    return tuple(schemas)


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
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list) or (calls and role != "assistant"):
        raise refuse(f"{param}.tool_calls", "must be a list in a message of the assistant")
    return Message(
        role=role,
        content=_text(value.get("content"), param),
        calls=tuple(_call(call, f"{param}.tool_calls[{n}]") for n, call in enumerate(calls)),
        call_id=typed(value, "tool_call_id", str, "") if role == "tool" else "",
    )


def _text(content: Any, param: str) -> str:
    """The text of a message, which may come in parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise refuse(f"{param}.content", "must be a text, or parts of the type text")


def _call(value: Any, param: str) -> Call:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise refuse(param, 'must be {"id": ..., "type": "function", "function": {...}}')
    texts = [value.get("id", ""), function.get("name"), function.get("arguments")]
    if not all(isinstance(text, str) for text in texts):
        raise refuse(param, "id, name and arguments must be texts")
    return Call(*texts)
