"""read_file: a file of the workspace, or some of its lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_code.environment.tools.text import cut_middle
from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import RefusedPath, Workspace
from rl_code.text.lines import split_lines

_WIDTH = 400
_VERBOSE_WIDTH = 16000


def unreadable(path: str, error: Exception, workspace: Workspace) -> Result:
    """The result of a call that named a file which cannot be read."""
    match error:
        case RefusedPath():
            return Result(str(error), ok=False)
        case FileNotFoundError():
            files = ", ".join(workspace.paths()[:20]) or "none"
            return Result(f"no file {path}; files: {files}", ok=False)
        case _:
            return Result(f"{path} is not a readable text file", ok=False)


def with_numbers(text: str, first: int) -> str:
    """Puts its number in front of each line that is not blank. first: that of the first line."""
    return "".join(
        f"{number}:{line}" if line.strip() else line
        for number, line in enumerate(split_lines(text, keepends=True), start=first)
    )


def shown(path: str, text: str, *, verbose: bool, first: int | None = None) -> str:
    """A file's text, or some of it, as the model reads it.

    first: the number of the first line, where lines are shown with their numbers.
    """
    if first is not None:
        text = with_numbers(text, first)
    return cut_middle(text, _VERBOSE_WIDTH if verbose else _WIDTH) or f"{path} is empty"


@dataclasses.dataclass(frozen=True)
class ReadFile(Tool):
    """A file of the workspace, or some of its lines."""

    # True if lines are shown behind their numbers, as in ``7:    return xs``; blank ones, which
    # would take tokens, go without.
    numbered: bool = False

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "read_file",
        "Read a text file of the workspace, whole or some of its lines.",
        {
            "path": {"type": "string", "description": "Path relative to the workspace."},
            "first_line": {"type": "integer", "description": "First line to show, counted from 1."},
            "last_line": {"type": "integer", "description": "Last line to show."},
        },
        ("path",),
    )
    documents: ClassVar[bool] = True
    words: ClassVar[Words | None] = Words(
        "read", line={"path": "a path", "first_line": "first line", "last_line": "last line"}
    )

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        path = arguments["path"]
        try:
            text = workspace.read(path)
        except (OSError, ValueError) as error:
            return unreadable(path, error, workspace)
        lines = split_lines(text, keepends=True)
        first = arguments.get("first_line", 1)
        last = arguments.get("last_line", len(lines))
        if {"first_line", "last_line"} & arguments.keys() and not 1 <= first <= last:
            return Result(
                f"lines {first} to {last} make no range; {path} has {len(lines)} lines", ok=False
            )
        if first > len(lines) > 0:
            return Result(f"no line {first}; {path} has {len(lines)} lines", ok=False)
        text = "".join(lines[first - 1 : last])
        number = first if self.numbered else None
        return Result(shown(path, text, verbose=workspace.verbose, first=number))
