"""Tools that a client of an agent carries out on its own side.

They are the tools of this project. Over the API each has the word by which the compact protocol
writes its call for a name, and the arguments that stand behind that word; what a call leaves out,
the path of the file that a person is at, the client knows. So a model of that protocol writes for a
client what it wrote in training, and any other model calls them by their schemas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_code.environment.tools.api import check, execute
from rl_code.environment.tools.tool import Tool, words_of
from rl_code.environment.tools.workspace import Workspace
from rl_code.types import ToolCall, ToolResult


class OwnTools:
    """Tools as a client declares and carries them out."""

    def __init__(self, tools: Mapping[str, Tool]):
        self._tools = {words_of(tool).word: tool for tool in tools.values()}

    @property
    def names(self) -> Sequence[str]:
        """Names over the API."""
        return tuple(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Function schemas, as a request declares them."""
        return [_schema(word, tool) for word, tool in self._tools.items()]

    def called(self, name: str) -> str:
        """Name of the tool behind a name over the API; "" for an unknown one."""
        return self._tools[name].name if name in self._tools else ""

    def run(self, name: str, arguments: Mapping[str, Any], workspace: Workspace) -> ToolResult:
        """Carries out a call in a workspace; one that cannot be is answered with why. Raises
        SandboxFault.
        """
        tool = self._tools.get(name)
        if tool is None:
            return ToolResult(name, f"unknown tool; use {', '.join(self._tools)}", ok=False)
        left_out = tool.schema["parameters"]["properties"].keys() - _arguments(tool)
        path = {"path": workspace.task.path} if "path" in left_out else {}
        call = ToolCall(tool.name, {**arguments, **path})
        wrong = check(call, {tool.name: tool})
        if wrong:
            return ToolResult(name, wrong, ok=False)
        return execute(call, {tool.name: tool}, workspace)


def _arguments(tool: Tool) -> dict[str, str]:
    """Arguments of a call over the API: those that stand in its words."""
    words = words_of(tool)
    return {**words.line, **words.below}


def _schema(word: str, tool: Tool) -> dict[str, Any]:
    parameters = tool.schema["parameters"]
    names = _arguments(tool)
    return {
        "name": word,
        "description": tool.schema["description"],
        "parameters": {
            "type": "object",
            "properties": {name: parameters["properties"][name] for name in names},
            "required": [name for name in parameters["required"] if name in names],
            "additionalProperties": False,
        },
    }
