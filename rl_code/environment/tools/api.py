"""All tools by name, and the one way to call them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from models.marks import encodable
from rl_code.config import named
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.tools.text import cut_middle
from rl_code.environment.tools.tool import Result, Tool, check_arguments
from rl_code.environment.tools.workspace import Workspace
from rl_code.types import Task, ToolCall, ToolResult, Turn

# A tool is imported when a config names it.
TOOLS = {
    "write_file": "rl_code.environment.tools.write_file:WriteFile",
    "write_tests": "rl_code.environment.tools.write_tests:WriteTests",
    "edit_file": "rl_code.environment.tools.edit_file:EditFile",
    "read_file": "rl_code.environment.tools.read_file:ReadFile",
    "terminal": "rl_code.environment.tools.terminal:Terminal",
    "run_tests": "rl_code.environment.tools.run_tests:RunTests",
    "submit": "rl_code.environment.tools.submit:Submit",
    "suggest": "rl_code.environment.tools.suggest:Suggest",
    "ask": "rl_code.environment.tools.ask:Ask",
    "replace_lines": "rl_code.environment.tools.replace_lines:ReplaceLines",
    "try_lines": "rl_code.environment.tools.try_lines:TryLines",
    "grep": "rl_code.environment.tools.grep:Grep",
    "jump": "rl_code.environment.tools.jump:Jump",
    "history": "rl_code.environment.tools.history:History",
    "think": "rl_code.environment.tools.think:Think",
    "memory_store": "rl_code.environment.tools.memory:MemoryStore",
    "memory_recall": "rl_code.environment.tools.memory:MemoryRecall",
    "memory_forget": "rl_code.environment.tools.memory:MemoryForget",
    "diagnostics": "rl_code.environment.tools.diagnostics:Diagnostics",
    "semantic_search": "rl_code.environment.tools.semantic_search:SemanticSearch",
    "sub_agent": "rl_code.environment.tools.sub_agent:SubAgent",
    "mcp": "rl_code.environment.tools.mcp:Mcp",
}

# Tools that a config offers if it names none. The order is that of the prompts.
DEFAULT = tuple(
    Named(name)
    for name in ("write_file", "edit_file", "read_file", "terminal", "run_tests", "submit")
)

# Exceptions that a call may raise through the model's doing: files that do not fit, a path that is
# too deep, values nested without end, a text larger than memory. Any other exception is a bug of
# the tool.
PROVOKED = (OSError, ValueError, RecursionError, MemoryError)

# Characters of one result; what a tool of one's own leaves uncut would be tokenised in full.
_LONGEST = 1 << 16


def find_tools(config: Sequence[Named] = DEFAULT, path: str = "config.tools") -> dict[str, Tool]:
    """Name -> tool, in the order of the config.

    path: dotted key of the config, for messages.

    Raises:
      ConfigError: no such tool, settings that it does not take, or two tools of one name.
    """
    tools: dict[str, Tool] = {}
    for i, one in enumerate(config):
        tool = named.make(TOOLS, one, f"{path}[{i}]")
        if not isinstance(tool, Tool):
            raise ConfigError(
                f"{path}[{i}] = {one.name!r}: {tool!r} is no rl_code.environment.tools.tool.Tool"
            )
        try:
            members = tool.members()
        except ValueError as error:
            raise ConfigError(f"{path}[{i}] = {one.name!r}: {error}") from error
        for member in members:
            if member.name in tools:
                raise ConfigError(
                    f"{path}[{i}] = {one.name!r}: a second tool named {member.name!r}"
                )
            tools[member.name] = member
    return tools


def offered(task: Task, tools: Mapping[str, Tool]) -> dict[str, Tool]:
    """The tools that a task may use: all of the config's, or those that it names itself.

    Raises ValueError for one that the config does not have.
    """
    if task.tools is None:
        return dict(tools)
    for name in task.tools:
        if name not in tools:
            raise ValueError(
                f"task {task.id} wants the tool {name!r}; config.tools has {', '.join(tools)}"
            )
    return {name: tools[name] for name in task.tools}


def check(call: ToolCall, tools: Mapping[str, Tool]) -> str:
    """Complaint about a call, in words for the model: not parsed, unknown tool, wrong arguments. ""
    if the call is well-formed.
    """
    if call.error:
        return call.error
    if call.name not in tools:
        return f"unknown tool {call.name[:40]!r}; tools: {', '.join(tools)}"
    return check_arguments(tools[call.name], call.arguments)


def execute(call: ToolCall, tools: Mapping[str, Tool], workspace: Workspace) -> ToolResult:
    """Runs a call that ``check`` found nothing wrong with.

    What the model can provoke is answered and never ends the run. Raises SandboxFault when the
    sandbox itself failed, and whatever a bug of the tool raises.
    """
    start = time.perf_counter()
    try:
        result = tools[call.name].run(call.arguments, workspace)
    except PROVOKED as error:
        result = Result(f"{call.name} failed: {error}", ok=False)
    content = cut_middle(encodable(result.content), _LONGEST)
    return ToolResult(call.name, content, result.ok, time.perf_counter() - start, call.id)


def repeat(messages: Sequence[Turn], tools: Mapping[str, Tool], workspace: Workspace) -> None:
    """Carries out again what messages on record asked for, in order, and drops the results.

    Calls that were refused, those beyond the limit of a message and those after a submit are left
    out, as in the episode. Raises SandboxFault.
    """
    for message in messages:
        for call in message.calls[: workspace.limits.calls]:
            if workspace.handed_in is not None:
                return
            if not call.error:
                execute(call, tools, workspace)
