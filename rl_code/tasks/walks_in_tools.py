"""Walks through a repository in calls of tools, as episodes of our own in the compact protocol.

A move is said by the tool that is made for it where the config has it, else by a command in the
terminal (``walks_in_shell.command_of``). What is searched is the definition of a name, for which
``semantic_search`` is asked where there is no grep. Where names may be wrong, ``diagnostics``
checks them if the config has it. Where there is a past, ``history blame`` reads the files if the
config has it, so as to see which lines were changed. A thought is a call of ``think``, else the
text in front of the calls where the protocol allows that, else it is not said. What tools say is
computed from the files, in exactly the words of an episode; nothing is executed in a sandbox.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

from models.marks import Marks
from rl_code.config.named import Named
from rl_code.environment.documents import DocumentsConfig
from rl_code.environment.parts import Part, prompt_parts, result_parts
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.search.index import Chunk, Index, make_chunks
from rl_code.environment.search.parse import cut
from rl_code.environment.servers.language_server import WARNING, Diagnostic
from rl_code.environment.tools import tool as tool_lib
from rl_code.environment.tools.api import find_tools
from rl_code.environment.tools.diagnostics import Diagnostics
from rl_code.environment.tools.diagnostics import describe as describe_problems
from rl_code.environment.tools.grep import Found, Grep, Match
from rl_code.environment.tools.grep import describe as describe_found
from rl_code.environment.tools.history import described as describe_past
from rl_code.environment.tools.jump import Jump
from rl_code.environment.tools.read_file import shown
from rl_code.environment.tools.run_tests import describe, failed_case
from rl_code.environment.tools.semantic_search import SemanticSearch
from rl_code.environment.tools.semantic_search import describe as describe_pieces
from rl_code.environment.tools.terminal import described
from rl_code.environment.tools.text import show
from rl_code.environment.tools.tool import Tool
from rl_code.tasks.operations import Failure
from rl_code.tasks.repository_past import blame
from rl_code.tasks.repository_walks import (
    Change,
    Check,
    Message,
    Move,
    Read,
    Search,
    Submit,
    Try,
    WriteTests,
    lines_with,
    misnamed_line,
)
from rl_code.tasks.walks_in_shell import command_of
from rl_code.text.lines import split_lines
from rl_code.types import Limits, Task, ToolCall, ToolResult

# Those of a tokenizer that is trained on walks.
_MARKS = Marks(Compact.SPECIAL_TOKENS)
# What walks call, of which a config may leave out some.
TOOLS = find_tools(
    (
        Named("terminal"),
        Named("grep"),
        Named("semantic_search"),
        Named("read_file", {"numbered": True}),
        Named("jump", {"numbered": True}),
        Named("think"),
        Named("replace_lines"),
        Named("try_lines"),
        Named("submit"),
    )
)
# The tools that say a move, of which the first that there is is taken; without one the terminal.
_SAID_BY = {
    Search: ("grep", "semantic_search"),
    Read: ("read_file", "jump"),
    Change: ("replace_lines",),
}
# What a tool answers depends on its settings.
_AS_SET = ("grep", "semantic_search", "read_file", "terminal")


def check_tools(tools: Mapping[str, Tool]) -> None:
    """Raises ValueError where a walk cannot be said in these tools, or where one is written in
    another way than in ``TOOLS``, or answers otherwise.
    """
    missing = [] if "submit" in tools else ["submit"]
    if "terminal" not in tools:
        missing += [names[0] for kind, names in _SAID_BY.items() if not _says(kind, tools)]
    if missing:
        raise ValueError(
            f"demonstrations of repositories call {', '.join(sorted(missing))}, and the config has "
            f"{', '.join(tools)}; offer them, or the terminal, or leave sft out"
        )
    for name in TOOLS.keys() & tools.keys():
        written, other = tool_lib.words_of(TOOLS[name]), tool_lib.words_of(tools[name])
        if written != other:
            raise ValueError(
                f"demonstrations of repositories write {name} as {written}, and the tool of the "
                f"config as {other}; leave sft out"
            )
    for name in {"terminal", *(_says(kind, tools) for kind in _SAID_BY)} & tools.keys():
        if name in _AS_SET and tools[name] != TOOLS[name]:
            raise ValueError(
                f"demonstrations of repositories show what {TOOLS[name]} answers, and the config "
                f"has {tools[name]}; give it the same settings, or leave sft out"
            )


def _says(kind: type[Move], tools: Mapping[str, Tool]) -> str | None:
    """The tool that says moves of a kind; None where the terminal has to. Walks name lines by their
    numbers, which not every ``jump`` shows.
    """
    fit = {name for name in tools if name != "jump" or tools[name] == TOOLS[name]}
    return next((name for name in _SAID_BY[kind] if name in fit), None)


@dataclasses.dataclass(frozen=True)
class ToolWords:
    """Walks as episodes of our own."""

    # Those of the config, by name.
    tools: Mapping[str, Tool]
    # Results that are documents; None for none.
    documents: DocumentsConfig | None = None
    protocol: Compact = Compact()

    @property
    def checks(self) -> bool:
        """True if there is a tool that checks names."""
        return "diagnostics" in self.tools

    @property
    def blames(self) -> bool:
        """True if there is a tool that shows who changed a line."""
        return "history" in self.tools

    @property
    def writes(self) -> bool:
        """True if there is a tool that writes tests."""
        return "write_tests" in self.tools

    def limits(self, limits: Limits) -> Limits:
        """Limits of a walk: no test runs where nothing tries lines."""
        return limits if "try_lines" in self.tools else dataclasses.replace(limits, test_runs=0)

    def opening(self, task: Task) -> list[Part]:
        """The prompt."""
        return prompt_parts(self.protocol, task, self.tools, self.documents, _MARKS)

    def say(self, task: Task, message: Message) -> Iterator[tuple[str, list[Part]]]:
        """The text of a walk's message, and what is answered; nothing behind a submit."""
        said = [self._called(task, move) for move in message.moves]
        if message.thought and "think" in self.tools:
            thought = ToolCall("think", {"thought": message.thought})
            said.insert(0, (thought, ToolResult("think", "ok")))
        calls = [call for call, _ in said]
        given: list[Part] = []
        if calls[-1].name != "submit":
            results = [result for _, result in said]
            given = result_parts(self.protocol, results, self.tools, self.documents, _MARKS)
        # it thinks first where that is no call
        first = message.thought if self.protocol.thoughts and "think" not in self.tools else ""
        yield first + self.protocol.message(calls, self.tools), given

    def _called(self, task: Task, move: Move) -> tuple[ToolCall, ToolResult]:
        """A move as a call, and its result."""
        if isinstance(move, Submit):
            return ToolCall("submit", {}), ToolResult("submit", "")
        if isinstance(move, Try):
            return _tried(task, move)
        if isinstance(move, WriteTests):
            call = ToolCall("write_tests", {"content": move.text})
            return call, ToolResult("write_tests", "ok")
        if isinstance(move, Check):
            if (tool := self.tools["diagnostics"]) != Diagnostics():
                raise ValueError(
                    f"demonstrations of repositories show what {Diagnostics()} answers, and the "
                    f"config has {tool}; give it the same settings, or leave sft out"
                )
            told = describe_problems(_problems(task), (), Diagnostics.most, verbose=False)
            return ToolCall("diagnostics", {}), ToolResult("diagnostics", told)
        if isinstance(move, Read) and self.blames and task.meta["past"]:
            told = describe_past(blame(task, move.path), verbose=False)
            call = ToolCall("history", {"action": "blame", "of": move.path})
            return call, ToolResult("history", told)
        tool = _says(type(move), self.tools)
        if tool is None:
            command = command_of(task, move)
            told = described(command.output, command.code, verbose=False)
            call = ToolCall("terminal", {"command": command.text})
            return call, ToolResult("terminal", told)
        match move:
            case Search(text) if tool == "semantic_search":
                question = text.removeprefix("def ")
                told = describe_pieces(_about(task, question), verbose=False)
                call = ToolCall("semantic_search", {"question": question})
                return call, ToolResult("semantic_search", told)
            case Search(text):
                found = list(itertools.starmap(Match, lines_with(task, text)))
                shown_most = Found(found[: Grep().most], len(found))
                told = describe_found(shown_most, verbose=False)
                return ToolCall("grep", {"pattern": text}), ToolResult("grep", told)
            case Read(path, name) if tool == "jump":
                if task.meta["misnamed"] is not None and not self.checks:
                    raise ValueError(
                        f"{task.id}: a walk that jumps does not see the imports, which say what "
                        "the name should be; offer read_file or diagnostics, or have no wrong names"
                    )
                lines = split_lines(task.files[path])
                line = lines.index(f"def {name}(xs):") + 1
                told = Jump(numbered=True).shown(path, lines, line, verbose=False)
                return ToolCall("jump", {"to": name}), ToolResult("jump", told)
            case Read(path, _):
                told = shown(path, task.files[path], verbose=False, first=1)
                return ToolCall("read_file", {"path": path}), ToolResult("read_file", told)
        return ToolCall("replace_lines", _arguments(move)), ToolResult("replace_lines", "ok")


def _arguments(change: Change) -> dict[str, str | int]:
    """Arguments of a call that changes a line."""
    return {"path": change.path, "first_line": change.number, "text": change.line}


def _about(task: Task, question: str) -> list[Chunk]:
    """The pieces of a task's files that the tool finds. The parser reads here what no model wrote,
    so it needs no sandbox.
    """
    tool = SemanticSearch()
    chunks = [
        chunk
        for path, text in sorted(task.files.items())
        for chunk in make_chunks(path, text, cut(tool.grammars[".py"], text))
    ]
    return Index(chunks).search(question, tool.most)


def _problems(task: Task) -> list[Diagnostic]:
    """Findings of ruff and ty in a task's files: a name that is called and nowhere defined, and the
    import that nothing uses for it.
    """
    if task.meta["misnamed"] is None:
        return []
    path, line = task.meta["cause"], misnamed_line(task)
    wrong, right = task.meta["misnamed"]
    lines = split_lines(task.files[path])
    at = next(i for i, one in enumerate(lines, start=1) if one.endswith(f" import {right}"))
    module = lines[at - 1].split()[1]
    problems = (
        (at, "ruff", "F401", f"`{module}.{right}` imported but unused"),
        (line, "ruff", "F821", f"Undefined name `{wrong}`"),
        (line, "ty", "unresolved-reference", f"Name `{wrong}` used when not defined"),
    )
    return [Diagnostic(path, number, 0, WARNING, *said) for number, *said in problems]


def _tried(task: Task, move: Try) -> tuple[ToolCall, ToolResult]:
    failures = [
        failed_case(
            task.entry_point,
            case,
            "" if isinstance(value, Failure) else show(value),
            value.error if isinstance(value, Failure) else "",
            verbose=False,
        )
        for case, value in move.failures
    ]
    told = describe(failures, len(task.visible_tests), move.runs_left, verbose=False)
    return ToolCall("try_lines", _arguments(move.change)), ToolResult("try_lines", told)
