"""A client of MCP servers (Model Context Protocol, 2025-06-18) over standard input and output.

It lists tools and calls them. The server is not trusted: it works on what a model wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from rl_code.environment.servers.stream import Stream

VERSION = "2025-06-18"
# Tools of one server, pages of their list, and characters of a description and of a schema.
_TOOLS = 200
_PAGES = 20
_DESCRIPTION = 4000
_SCHEMA = 20_000
_NAME = re.compile(r"[\w./-]{1,128}", re.ASCII)
_NO_METHOD = -32601


class ListedTool(NamedTuple):
    """What a server says of one of its tools."""

    name: str
    description: str
    # JSON schema of an object.
    parameters: dict[str, Any]


class McpError(ValueError):
    """The server refused a request, or lists what cannot be offered."""


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
        stream.write({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def tools(self, deadline: float) -> list[ListedTool]:
        """The server's tools in its order. Raises McpError for one that cannot be offered."""
        found: list[ListedTool] = []
        cursor: dict[str, str] = {}
        for _ in range(_PAGES):
            page = self._ask("tools/list", cursor, deadline)
            items = page.get("tools")
            found += [_listed(item) for item in (items if isinstance(items, list) else ())]
            if not isinstance(page.get("nextCursor"), str):
                break
            cursor = {"cursor": page["nextCursor"]}
        if len(found) > _TOOLS:
            raise McpError(f"it lists {len(found)} tools; at most {_TOOLS} are read")
        return found

    def call(self, name: str, arguments: Mapping[str, Any], deadline: float) -> tuple[str, bool]:
        """What a tool answers, as text, and whether it did what was asked. Raises McpError."""
        answer = self._ask("tools/call", {"name": name, "arguments": dict(arguments)}, deadline)
        items = answer.get("content")
        parts = [_text(item) for item in (items if isinstance(items, list) else ())]
        if not parts and "structuredContent" in answer:
            parts = [json.dumps(answer["structuredContent"])]
        return "\n".join(parts), answer.get("isError") is not True

    def _ask(self, method: str, params: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """The result of a request; the server's own requests are answered meanwhile."""
        number = self._stream.request(method, dict(params))
        while True:
            message = self._stream.read(deadline)
            if "method" in message:
                if "id" in message:
                    reply = self._reply(message["method"])
                    self._stream.write({"jsonrpc": "2.0", "id": message["id"], **reply})
                continue
            if message.get("id") != number:
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
    """A tool of a list. Raises McpError for what cannot be offered."""
    name = item.get("name") if isinstance(item, dict) else None
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise McpError(f"it lists a tool without a proper name: {str(item)[:80]}")
    schema = item.get("inputSchema")
    properties = schema.get("properties", {}) if isinstance(schema, dict) else None
    required = schema.get("required", []) if isinstance(schema, dict) else None
    proper = (
        isinstance(properties, dict)
        and all(isinstance(value, dict) for value in properties.values())
        and isinstance(required, list)
        and all(argument in properties for argument in required)
    )
    if not proper or len(json.dumps(schema)) > _SCHEMA:
        raise McpError(
            f"the schema of {name} is no object with properties, or longer than {_SCHEMA} "
            "characters"
        )
    # What a call does not name stays the server's business.
    parameters = {**schema, "type": "object", "properties": properties, "required": required}
    parameters["additionalProperties"] = False
    description = item.get("description")
    text = description if isinstance(description, str) else ""
    return ListedTool(name, text[:_DESCRIPTION], parameters)


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
