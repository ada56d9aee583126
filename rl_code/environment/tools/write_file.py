"""write_file: makes a file, or replaces all of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import RefusedPath, Workspace
from rl_code.text.lines import split_lines


def write(path: str, text: str, workspace: Workspace, done: str) -> Result:
    """Writes the file and answers ``done``, or says why it could not be written."""
    try:
        workspace.write(path, text)
    except RefusedPath as error:
        return Result(str(error), ok=False)
    except (OSError, ValueError) as error:
        return Result(f"could not write {path}: {error}", ok=False)
    return Result(done)


@dataclasses.dataclass(frozen=True)
class WriteFile(Tool):
    """Makes a file, or replaces all of it."""

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "write_file",
        "Write a text file of the workspace: makes it, or replaces everything in it.",
        {
            "path": {"type": "string", "description": "Path relative to the workspace."},
            "content": {"type": "string", "description": "The whole new text of the file."},
        },
        ("path", "content"),
    )
    edits: ClassVar[bool] = True
    words: ClassVar[Words | None] = Words("write", below={"content": "the file"})

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        path = arguments["path"]
        text = arguments["content"]
        lines = len(split_lines(text))
        return write(
            path, text, workspace, f"wrote {lines} lines to {path}" if workspace.verbose else "ok"
        )
