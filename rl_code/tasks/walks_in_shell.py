"""Walks through a repository in shell commands, as an agent of others writes them.

The agent's messages are a thought and one command (``harness.command_chat``). What a command prints
is computed from the files, in exactly the words of GNU grep and sed; nothing is executed. No short
command tries lines and takes them back. So walks in a shell have no test runs, and no mistakes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from models.marks import Marks
from rl_code.environment.parts import Part
from rl_code.environment.protocols.compact import Compact
from rl_code.harness.agent import text_of
from rl_code.harness.command_chat import CommandChat
from rl_code.tasks.repository_walks import (
    Change,
    Message,
    Move,
    Read,
    Search,
    Submit,
    lines_with,
)
from rl_code.text.lines import split_lines
from rl_code.types import Limits, Task

# What the endpoint writes conversations in.
_PROTOCOL = Compact()
_MARKS = Marks(_PROTOCOL.SPECIAL_TOKENS)
# An exchange of which only what follows it is looked at.
_BEFORE = ({"role": "user", "content": "go"}, {"role": "assistant", "content": "done"})


class Command(NamedTuple):
    """A command of the shell and what becomes of it."""

    text: str
    # Output of the command.
    output: str
    code: int


def command_of(task: Task, move: Move) -> Command:
    """The command that makes a move, while no file of the task has been changed.

    Raises ValueError for a move that no command makes.
    """
    match move:
        case Search(text):
            found = [f"{path}:{number}:{line}\n" for path, number, line in lines_with(task, text)]
            return Command(f'grep -n "{text}" *.py', "".join(found), 0 if found else 1)
        case Read(path, _):
            # the lines with their numbers, but for blank ones, which would only take tokens
            lines = [
                f"{number}:{line}\n"
                for number, line in enumerate(split_lines(task.files[path]), start=1)
                if line
            ]
            return Command(f"grep -n . {path}", "".join(lines), 0 if lines else 1)
        case Change(path, number, line):
            # a backslash behind c keeps the indentation; no operation has quotes or backslashes
            return Command(f"sed -i '{number}c\\{line}' {path}", "", 0)
        case _:
            raise ValueError(f"no shell command makes the move {move}")


@dataclasses.dataclass(frozen=True)
class ShellWords:
    """Walks as the conversation of an agent of others."""

    # No command checks names, shows who changed a line, or writes tests.
    checks: ClassVar[bool] = False
    blames: ClassVar[bool] = False
    writes: ClassVar[bool] = False

    chat: CommandChat

    def limits(self, limits: Limits) -> Limits:
        """Limits of a walk: handing in takes a message of its own, and there are no test runs."""
        return dataclasses.replace(limits, turns=limits.turns - 1, test_runs=0)

    def opening(self, task: Task) -> list[Part]:
        """The prompt."""
        messages = [
            {"role": role, "content": _MARKS.quote(content)}
            for role, content in self.chat.opening(text_of(task))
        ]
        return [(_PROTOCOL.conversation(messages, (), True), False)]

    def say(self, task: Task, message: Message) -> Iterator[tuple[str, list[Part]]]:
        """The texts of a walk's message, one for each move, and what is answered to each; nothing
        behind a submit.
        """
        thought = message.thought
        end = _PROTOCOL.stop_tokens[0]
        for move in message.moves:
            if isinstance(move, Submit):
                yield self.chat.message(thought, self.chat.hands_in) + end, []
                return
            command = command_of(task, move)
            answer = self.chat.answer(command.output, command.code)
            yield self.chat.message(thought, command.text) + end, [(self._behind(answer), False)]
            thought = ""

    def _behind(self, answer: str) -> str:
        """Text between a message of the agent, with its stop token, and the next one."""
        given = {"role": "user", "content": _MARKS.quote(answer)}
        whole = _PROTOCOL.conversation([*_BEFORE, given], (), True)
        return whole.removeprefix(_PROTOCOL.conversation(_BEFORE, (), False))
