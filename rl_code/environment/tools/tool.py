"""What a tool is, and how the arguments of a call are checked against its schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rl_code.environment.tools.workspace import Workspace

_PYTHON_TYPES = {"string": str, "integer": int}


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a tool says to the model. ``ok`` is False when it could not do what was asked."""

    content: str
    ok: bool = True


@dataclasses.dataclass(frozen=True)
class Tool:
    """One tool.

    schema: the function schema that is shown to the model (OpenAI's form, the value of "function").
    function: does the work; its arguments have been checked against the schema.
    edits: whether a successful call changes a file by intention (the first of them is graded on its
    own).
    """

    schema: Mapping[str, Any]
    function: Callable[[Mapping[str, Any], Workspace], Answer]
    edits: bool = False

    @property
    def name(self) -> str:
        return self.schema["name"]


def schema(
    name: str, description: str, properties: Mapping[str, Any], required: tuple[str, ...]
) -> dict[str, Any]:
    """A function schema in OpenAI's form; arguments outside ``properties`` are not allowed."""
    parameters = {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }
    return {"name": name, "description": description, "parameters": parameters}


def check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of a call, in words for the model; "" when nothing is."""
    properties = tool.schema["parameters"]["properties"]
    expected = ", ".join(properties) or "none"
    for name in tool.schema["parameters"]["required"]:
        if name not in arguments:
            return f"{tool.name}: missing argument {name}; arguments: {expected}"
    for name, value in arguments.items():
        if name not in properties:
            return f"{tool.name}: unknown argument {name}; arguments: {expected}"
        kind = properties[name]["type"]
        if type(value) is not _PYTHON_TYPES[kind]:
            return f"{tool.name}: argument {name} must be {kind}, got {type(value).__name__}"
        if kind == "string" and not _encodable(value):
            return f"{tool.name}: argument {name} is not valid Unicode"
    return ""


def _encodable(text: str) -> bool:
    """Whether the text can be written to a file; lone surrogates, which JSON can spell, cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
