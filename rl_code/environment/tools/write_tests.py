"""write_tests: writes the file of one's own tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import Workspace
from rl_code.environment.tools.write_file import write
from rl_code.text.lines import split_lines


@dataclasses.dataclass(frozen=True)
class WriteTests(Tool):
    """Makes the file of one's own tests, or replaces all of it. Its path is not the agent's to
    choose, so a protocol that writes no paths can say it too.
    """

    # The file, as the signal ``tested`` looks for it.
    path: str = "test_own.py"

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "write_tests",
        "Write the file of your own tests: makes it, or replaces everything in it.",
        {"content": {"type": "string", "description": "The whole text of the file."}},
        ("content",),
    )
    words: ClassVar[Words | None] = Words("tests", below={"content": "the file"})

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        text = arguments["content"]
        lines = len(split_lines(text))
        told = f"wrote {lines} lines to {self.path}" if workspace.verbose else "ok"
        return write(self.path, text, workspace, told)
