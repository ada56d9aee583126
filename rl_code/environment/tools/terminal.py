"""terminal: one shell command inside the sandbox."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_code.environment.tools.text import cut_middle
from rl_code.environment.tools.tool import Answer, Tool, Words, function_schema
from rl_code.environment.tools.workspace import Workspace

_WIDTH = 160
_VERBOSE_WIDTH = 8000


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

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Answer:
        if "\0" in arguments["command"]:
            return Answer("the command contains a NUL character", ok=False)
        timeout_s = workspace.timeout_s
        done = workspace.sandbox.run(["bash", "-c", arguments["command"]], timeout_s=timeout_s)
        parts = [
            cut_middle(done.stdout, _VERBOSE_WIDTH if workspace.verbose else _WIDTH).rstrip("\n")
        ]
        if done.timed_out:
            parts.append(f"stopped after {timeout_s:g} s")
        elif done.exit_code != 0 or workspace.verbose or not parts[0]:
            parts.append(f"exit {done.exit_code}")
        return Answer("\n".join(part for part in parts if part))
