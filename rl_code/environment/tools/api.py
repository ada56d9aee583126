"""All tools by name, and the one way to call them."""

from __future__ import annotations

import time

from rl_code.environment.tools import edit_file, read_file, run_tests, submit, terminal, write_file
from rl_code.environment.tools.tool import Answer, Tool, check_arguments
from rl_code.environment.tools.workspace import Workspace
from rl_code.types import ToolCall, ToolResult

TOOLS: dict[str, Tool] = {
    module.TOOL.name: module.TOOL
    for module in (terminal, read_file, write_file, edit_file, run_tests, submit)
}


def check(call: ToolCall, allowed: tuple[str, ...]) -> str:
    """What is wrong with a call, in words for the model: not parsed, unknown tool, wrong arguments.
    "" if nothing.
    """
    if call.error:
        return call.error
    if call.name not in allowed:
        return f"unknown tool {call.name[:40]!r}; tools: {', '.join(allowed)}"
    return check_arguments(TOOLS[call.name], call.arguments)


def execute(call: ToolCall, workspace: Workspace) -> ToolResult:
    """Runs a call that ``check`` found nothing wrong with. Raises SandboxFault when the sandbox
    itself failed.
    """
    start = time.perf_counter()
    try:
        answer = TOOLS[call.name].function(call.arguments, workspace)
    except (OSError, ValueError) as error:
        # What a workspace cannot do (files that do not fit, a path that is too deep) is the
        # agent's to mend. It must never end the run.
        answer = Answer(f"{call.name} failed: {error}", ok=False)
    return ToolResult(call.name, answer.content, answer.ok, time.perf_counter() - start)
