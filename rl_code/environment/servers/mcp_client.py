"""A client of MCP servers (Model Context Protocol, 2025-06-18) over standard input and output.

It lists tools and calls them. The server is not trusted: it works on what a model wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from rl_code.environment.servers.stream import Stream
from rl_code.environment.tools.schema import Arguments, is_deeper, unknown_types

VERSION = "2025-06-18"
# Tools and pages of a list that are read, characters of a description and of a schema, and how
# deeply a schema may be nested.
_LISTED = 2000
_PAGES = 20
_DESCRIPTION = 4000
_SCHEMA = 20_000
_DEEPEST = 32
_NAME = re.compile(r"[\w./-]{1,128}", re.ASCII)
_NO_METHOD = -32601


class ListedTool(NamedTuple):
    """Description of one tool, as its server gives it."""

    name: str
    description: str
    # JSON schema of an object.
    parameters: dict[str, Any]
    # Reason why it cannot be offered, in words; "" where it can.
    problem: str = ""


class McpError(ValueError):
    """The server refused a request."""


class McpClient:
    """A session with a server. Every method raises StreamEnded when it has ended or is late.

    root: the workspace's folder, as the server sees it.
    """

    def __init__(self, stream: Stream, root: str, deadline: float):
        self._stream = stream
        self._roots = [{"uri": f"file://{root}", "name": "workspace"}]
        introduction = {
            "protocolVersion": VERSION,
            "capabilities": {"roots": {"listChanged": False}},
            "clientInfo": {"name": "rl-code", "version": "1"},
        }
        self._ask("initialize", introduction, deadline)
        stream.notify("notifications/initialized", deadline=deadline)

    def tools(self, deadline: float) -> list[ListedTool]:
        """The server's tools in its order, those that cannot be offered with their problem. Raises
        McpError.
        """
        found: list[ListedTool] = []
        cursor: dict[str, str] = {}
        for _ in range(_PAGES):
            page = self._ask("tools/list", cursor, deadline)
            items = page.get("tools")
            found += [_listed(item) for item in (items if isinstance(items, list) else ())]
            if len(found) >= _LISTED or not isinstance(page.get("nextCursor"), str):
                break
            cursor = {"cursor": page["nextCursor"]}
        return found[:_LISTED]

    @property
    def told_skipped(self) -> str:
        """Number of the server's lines that were no messages, in words; "" for none."""
        return self._stream.told_skipped

    def call(self, name: str, arguments: Mapping[str, Any], deadline: float) -> tuple[str, bool]:
        """Result of a tool, as text, and True if it did what was asked. Raises McpError."""
        answer = self._ask("tools/call", {"name": name, "arguments": dict(arguments)}, deadline)
        items = answer.get("content")
        items = [] if items is None else items if isinstance(items, list) else [items]
        parts = [_text(item) for item in items]
        if not parts and "structuredContent" in answer:
            parts = [json.dumps(answer["structuredContent"])]
        return "\n".join(parts), answer.get("isError") is not True

    def _ask(self, method: str, params: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """The result of a request; the server's own requests are answered meanwhile."""
        number = self._stream.request(method, dict(params), deadline)
        while True:
            message = self._stream.read(deadline)
            if "method" in message:
                if "id" in message:
                    self._stream.reply(message, self._reply(message["method"]), deadline)
                continue
            if type(message.get("id")) is not int or message["id"] != number:
                continue
            result = message.get("result")
            if isinstance(result, dict):
                return result
            error = message.get("error")
            said = error.get("message") if isinstance(error, dict) else None
            raise McpError(f"{method} was refused: {str(said)[:400]}")

    def _reply(self, method: Any) -> dict[str, Any]:
        """The answer to a request of the server's."""
        match method:
            case "ping":
                return {"result": {}}
            case "roots/list":
                return {"result": {"roots": self._roots}}
        return {"error": {"code": _NO_METHOD, "message": "this client does not do that"}}


def _listed(item: Any) -> ListedTool:
    """A tool of a list."""
    name = item.get("name") if isinstance(item, dict) else None
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        return ListedTool(str(name or item)[:80], "", {}, "it has no proper name")
    description = item.get("description")
    text = description[:_DESCRIPTION] if isinstance(description, str) else ""
    schema = item.get("inputSchema")
    try:
        return ListedTool(name, text, _parameters({} if schema is None else schema))
    except ValueError as error:
        return ListedTool(name, text, {}, str(error))


def _parameters(schema: Any) -> dict[str, Any]:
    """A tool's schema with its arguments at the root, whatever parts it is made of. Raises
    ValueError where no call can be written by it.
    """
    if not isinstance(schema, dict) or is_deeper(schema, _DEEPEST + 1):
        raise ValueError(f"its schema is no object, or nested more than {_DEEPEST} deep")
    try:
        length = len(json.dumps(schema, allow_nan=False))
    except ValueError as error:
        raise ValueError("its schema has a number that JSON does not have") from error
    if length > _SCHEMA:
        raise ValueError(f"its schema is longer than {_SCHEMA} characters")
    arguments = Arguments({"parameters": schema})
    if "$ref" in schema and not arguments.refers:
        raise ValueError(f"its schema is elsewhere: {str(schema['$ref'])[:80]}")
    if not arguments.is_object:
        raise ValueError("its schema is not that of an object")
    properties = dict(arguments.properties)
    required = dict.fromkeys(arguments.required)
    needed = schema.get("required")
    for name in needed if isinstance(needed, list) else ():
        if not isinstance(name, str):
            raise ValueError(f"its schema requires what is no name: {str(name)[:40]}")
        required[name] = None
        properties.setdefault(name, {})
    for name, value in list(properties.items()):
        if value is True:
            properties[name] = {}
        elif value is False and name not in required:
            del properties[name]
        elif not isinstance(value, dict):
            raise ValueError(f"its argument {name[:40]} has no schema: {str(value)[:40]}")
        for kind in unknown_types(value):
            raise ValueError(f"its argument {name[:40]} has the unknown type {kind[:40]!r}")
    others = schema.get("additionalProperties")
    # what these two say now stands at the root
    kept = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
    return {
        **kept,
        "type": "object",
        "properties": properties,
        "required": list(required),
        # What a call does not name stays the server's business.
        "additionalProperties": others if isinstance(others, dict) else False,
    }


def _text(item: Any) -> str:
    """A part of an answer as text."""
    match item:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "resource", "resource": {"text": str(text)}}:
            return text
        case {"type": "resource_link", "uri": str(uri)}:
            return uri
        case {"type": str(kind)}:
            return f"[{kind[:40]}]"
    return "[unreadable]"
