"""edit_file: replaces one exact piece of a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_code.environment.tools.read_file import unreadable
from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import Workspace
from rl_code.environment.tools.write_file import write
from rl_code.text.lines import common_ending, with_endings

_WORDS = Words("edit", below={"old": "old text", "new": "new text"})


@dataclasses.dataclass(frozen=True)
class EditFile(Tool):
    """Replaces one exact piece of a file."""

    # True if a call in the compact protocol names its file, as in ``edit h.py``. Otherwise, and
    # where it names none, it is about the task's own file.
    named: bool = False

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "edit_file",
        "Replace one piece of a file. The old text must occur in the file exactly once, character "
        "by character.",
        {
            "path": {"type": "string", "description": "Path relative to the workspace."},
            "old": {"type": "string", "description": "The text to replace, with its indentation."},
            "new": {"type": "string", "description": "The text to put in its place."},
        },
        ("path", "old", "new"),
    )
    edits: ClassVar[bool] = True
    words: ClassVar[Words | None] = _WORDS

    def __post_init__(self) -> None:
        if self.named:
            words = dataclasses.replace(_WORDS, line={"path": "a path"})
            object.__setattr__(self, "words", words)

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        path = arguments["path"]
        old = arguments["old"]
        new = arguments["new"]
        if not old:
            return Result("old is empty; give the text to replace", ok=False)
        try:
            text = workspace.read(path)
        except (OSError, ValueError) as error:
            return unreadable(path, error, workspace)
        end = common_ending(text)
        if old not in text:  # perhaps written with other ends of lines than the file's
            found = (each for each in (end, "\r\n", "\r") if with_endings(old, each) in text)
            end = next(found, end)
            old = with_endings(old, end)
        new = with_endings(new, end)
        times = text.count(old)
        if times != 1:
            advice = (
                "give it exactly as it stands" if times == 0 else "give more of the text around it"
            )
            return Result(
                f"old occurs {times} times"
                + (f" in {path}; {advice}" if workspace.verbose else ""),
                ok=False,
            )
        return write(
            path, text.replace(old, new), workspace, f"edited {path}" if workspace.verbose else "ok"
        )
