"""replace_lines: puts a text in the place of some lines, which are named by their numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_code.environment.tools.read_file import unreadable
from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import Workspace
from rl_code.environment.tools.write_file import write
from rl_code.text.lines import common_ending, ending, split_lines, with_endings

LINES = {
    "path": {"type": "string", "description": "Path relative to the workspace."},
    "first_line": {
        "type": "integer",
        "description": "First line to replace, counted from 1.",
    },
    "last_line": {
        "type": "integer",
        "description": "Last line to replace; the first one if left out.",
    },
    "text": {
        "type": "string",
        "description": "The new lines, with their indentation; nothing deletes the lines.",
    },
}
"""The arguments, as in a schema, of a call that replaces lines."""


def with_lines(arguments: Mapping[str, Any], text: str) -> str | Result:
    """A file's text with the lines replaced as a call asks; a result where it has no such lines.

    arguments: those of LINES.
    """
    lines = split_lines(text, keepends=True)
    first = arguments["first_line"]
    last = arguments.get("last_line", first)
    if not 1 <= first <= last <= len(lines):
        path = arguments["path"]
        return Result(f"{path} has no lines {first} to {last}; it has {len(lines)} lines", ok=False)
    # the new lines end as the file's do, the last one as the last line that it replaces
    new = with_endings(arguments["text"], ending(lines[last - 1]) or common_ending(text))
    if new and (end := ending(lines[last - 1])):
        new = new.removesuffix(end) + end
    return "".join([*lines[: first - 1], new, *lines[last:]])


@dataclasses.dataclass(frozen=True)
class ReplaceLines(Tool):
    """Puts a text in the place of some lines. The old text need not be copied, as ``edit_file``
    wants it; so the lines must be known by number (``read_file`` with ``numbered``, ``grep``).
    """

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "replace_lines",
        "Replace some lines of a file, or delete them. Lines behind them get other numbers if the "
        "new text has more or fewer lines.",
        LINES,
        ("path", "first_line", "text"),
    )
    edits: ClassVar[bool] = True
    words: ClassVar[Words | None] = Words(
        "put",
        line={"path": "a path", "first_line": "first line", "last_line": "last line"},
        below={"text": "new lines"},
    )

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        path = arguments["path"]
        try:
            changed = with_lines(arguments, workspace.read(path))
        except (OSError, ValueError) as error:
            return unreadable(path, error, workspace)
        if isinstance(changed, Result):
            return changed
        first = arguments["first_line"]
        last = arguments.get("last_line", first)
        count = len(split_lines(arguments["text"]))
        done = f"replaced lines {first} to {last} of {path} by {count} lines"
        return write(path, changed, workspace, done if workspace.verbose else "ok")
