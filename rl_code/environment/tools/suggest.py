"""suggest: puts a text into the hole of a file, or nothing. The episode is over."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import Workspace
from rl_code.types import Task


def around(task: Task) -> tuple[str, str]:
    """The text before and behind the hole of a task."""
    text = task.files[task.path]
    return text[: task.meta["hole"]], text[task.meta["hole"] :]


@dataclasses.dataclass(frozen=True)
class Suggest(Tool):
    """Fills the hole of a task of the source ``infill``, and hands the file in."""

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "suggest",
        "Suggest the text that belongs at the cursor; an empty text suggests nothing. There is no "
        "way back.",
        {"text": {"type": "string", "description": "What belongs at the cursor."}},
        ("text",),
    )
    edits: ClassVar[bool] = True
    words: ClassVar[Words | None] = Words("suggest", below={"text": "the text"})

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        before, behind = around(workspace.task)
        if arguments["text"]:
            workspace.write(workspace.task.path, before + arguments["text"] + behind)
        workspace.hand_in()
        return Result("suggested")
