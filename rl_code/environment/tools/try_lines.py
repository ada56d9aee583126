"""try_lines: replaces some lines, runs the visible tests, and takes back what does not pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_code.environment.tools.read_file import unreadable
from rl_code.environment.tools.replace_lines import LINES, with_lines
from rl_code.environment.tools.run_tests import describe, none_left, run_visible
from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import Workspace
from rl_code.environment.tools.write_file import write


@dataclasses.dataclass(frozen=True)
class TryLines(Tool):
    """Edit, test, and revert what does not pass.

    A wrong attempt leaves nothing behind: the next one starts from the same files, wherever it is.
    With ``replace_lines`` and ``run_tests`` a wrong edit has to be put right first, or no other
    edit can pass. A call takes one of ``limits.test_runs``.
    """

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "try_lines",
        "Replace some lines of a file and run the visible tests. If all pass, the change is kept; "
        "if one fails, you see why, and the change is taken back. The number of runs is limited; "
        "the answer says how many are left.",
        LINES,
        ("path", "first_line", "text"),
    )
    edits: ClassVar[bool] = True
    words: ClassVar[Words | None] = Words(
        "try",
        line={"path": "a path", "first_line": "first line", "last_line": "last line"},
        below={"text": "new lines"},
    )

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        if not len(workspace.task.visible_tests):
            return Result("there are no visible tests to try lines with", ok=False)
        if workspace.test_runs_left == 0:
            return none_left(workspace)
        path = arguments["path"]
        try:
            before = workspace.read(path)
        except (OSError, ValueError) as error:
            return unreadable(path, error, workspace)
        changed = with_lines(arguments, before)
        if isinstance(changed, Result):
            return changed
        written = write(path, changed, workspace, "")
        if not written.ok:
            return written
        passed = False
        try:
            failures = run_visible(workspace)
            passed = not failures
        finally:
            # also where the tests could not be run
            if not passed:
                workspace.write(path, before)
        verbose = workspace.verbose
        total = len(workspace.task.visible_tests)
        told = describe(failures, total, workspace.test_runs_left, verbose=verbose)
        if verbose:
            told += "\nThe change was kept." if passed else "\nThe change was taken back."
        return Result(told)
