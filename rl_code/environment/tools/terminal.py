"""terminal: one shell command inside the sandbox."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_code.environment.tools.text import cut_middle
from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import Workspace

_WIDTH = 160
_VERBOSE_WIDTH = 8000
# The last line of a command that failed or was stopped (``described``).
_FAILED = re.compile(r"^(exit (?!0$)-?\d+|stopped after \S+ s)\Z", re.MULTILINE)


def described(output: str, code: int, *, verbose: bool, stopped_s: float | None = None) -> str:
    """Result of a command, for the model to read.

    output: what it printed. stopped_s: the seconds after which it was stopped, if it was.
    """
    parts = [cut_middle(output, _VERBOSE_WIDTH if verbose else _WIDTH).rstrip("\n")]
    if stopped_s is not None:
        parts.append(f"stopped after {stopped_s:g} s")
    elif code != 0 or verbose or not parts[0]:
        parts.append(f"exit {code}")
    return "\n".join(part for part in parts if part)


@dataclasses.dataclass(frozen=True)
class Terminal(Tool):
    """One shell command inside the sandbox."""

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "terminal",
        "Run a bash command in the workspace. Returns its output (standard output and error "
        "together, cut in the "
        "middle when long) and exit code. No network; processes left running are killed when the "
        "command ends.",
        {"command": {"type": "string", "description": "The command, as given to bash -c."}},
        ("command",),
    )
    runs_commands: ClassVar[bool] = True
    words: ClassVar[Words | None] = Words("run", below={"command": "the command"})

    def failed(self, content: str, *, ok: bool) -> bool:
        return not ok or _FAILED.search(content) is not None

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        if "\0" in arguments["command"]:
            return Result("the command contains a NUL character", ok=False)
        timeout_s = workspace.timeout_s
        done = workspace.sandbox.run(["bash", "-c", arguments["command"]], timeout_s=timeout_s)
        stopped_s = timeout_s if done.timed_out else None
        return Result(
            described(done.stdout, done.exit_code, verbose=workspace.verbose, stopped_s=stopped_s)
        )
