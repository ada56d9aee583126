"""jump: the editor's move to a line of a file, or to where a name is defined."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rl_code.environment.tools.grep import search
from rl_code.environment.tools.read_file import unreadable, with_numbers
from rl_code.environment.tools.text import cut_middle, one_line
from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import Workspace
from rl_code.text.lines import split_lines

_WIDTH = 400
_VERBOSE_WIDTH = 8000
_NAME = re.compile(r"[^\W\d]\w{0,99}")
# Definitions that are looked for; the first is shown and the others are named.
_MOST = 5


@dataclasses.dataclass(frozen=True)
class Jump(Tool):
    """Lines around a line of a file, or around the definition of a name."""

    # Lines shown before the line and behind it.
    before: int = 2
    behind: int = 8
    # Wall-clock seconds in which a definition is looked for.
    seconds: float = 4.0
    # True if lines are shown behind their numbers, as ``read_file`` does it.
    numbered: bool = False

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "jump",
        "Go to a line of a file, or to the definition of a function, class or variable of the "
        "workspace, and see the lines around it.",
        {"to": {"type": "string", "description": "path:line, or a name."}},
        ("to",),
    )
    documents: ClassVar[bool] = True
    words: ClassVar[Words | None] = Words("jump", line={"to": "path:line or a name"})

    def __post_init__(self) -> None:
        if min(self.before, self.behind) < 0 or not 0 < self.seconds <= 60:
            raise ValueError(
                f"{self.before=} and {self.behind=} must not be negative, {self.seconds=} above 0 "
                "and at most 60"
            )

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        path, colon, number = arguments["to"].strip().rpartition(":")
        if colon and number.isascii() and number.isdecimal() and len(number) < 9:
            return self._window(path, int(number), workspace, "")
        name = arguments["to"].strip().rpartition(".")[2]
        if not _NAME.fullmatch(name):
            return Result("jump goes to path:line or to a name", ok=False)
        # a definition, or an assignment that begins a line
        pattern = rf"^\s*(?:async\s+def|def|class)\s+{name}\b|^{name}\s*(?::[^=]+)?=(?!=)"
        found = search(workspace, pattern, most=_MOST, seconds=self.seconds, bounded=True)
        if found.error:
            return Result(one_line(found.error, _WIDTH), ok=False)
        if not found.matches:
            return Result(f"no definition of {name}", ok=False)
        first, *others = found.matches
        also = "".join(f"\nalso {other.path}:{other.line}" for other in others)
        return self._window(first.path, first.line, workspace, also)

    def _window(self, path: str, line: int, workspace: Workspace, also: str) -> Result:
        """The lines around a line, below the path and the number of the first."""
        try:
            lines = split_lines(workspace.read(path))
        except (OSError, ValueError) as error:
            return unreadable(path, error, workspace)
        if not 1 <= line <= len(lines):
            return Result(f"no line {line}; {path} has {len(lines)} lines", ok=False)
        return Result(self.shown(path, lines, line, also, verbose=workspace.verbose))

    def shown(
        self, path: str, lines: Sequence[str], line: int, also: str = "", *, verbose: bool
    ) -> str:
        """The lines of a file around one, as the model reads them."""
        first = max(line - self.before, 1)
        text = "\n".join(lines[first - 1 : line + self.behind])
        if self.numbered:
            text = with_numbers(text, first)
        return cut_middle(f"{path}:{first}\n{text}{also}", _VERBOSE_WIDTH if verbose else _WIDTH)
