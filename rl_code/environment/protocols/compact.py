"""The protocol of small models that are trained from scratch."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from models.chat import render
from rl_code.environment.protocols.protocol import answer, break_up
from rl_code.types import Task, ToolCall, ToolResult

_COMPACT_TOKENS = ("<|pad|>", "<|bos|>", "<|eot|>", "<|call|>", "<|end|>", "<|tool|>")


@dataclasses.dataclass(frozen=True)
class Compact:
    """For a small model trained from scratch: one special token per mark, a word per tool, a line
    per answer.

    prompt       <|bos|>content of the messages<|eot|>
    assistant    <|call|>write\\n<whole file><|end|><|call|>test<|end|><|eot|>   (one or more calls,
                 nothing else) edit\\n<old>\\n=====\\n<new> | read [path [first [last]]] |
                 run\\n<command> | submit
    observation  <|tool|>answers, one a line<|eot|>

    write and edit work on ``task.path``.
    """

    stop_tokens: tuple[str, ...] = ("<|eot|>",)
    verbose: bool = False

    SPECIAL_TOKENS: typing.ClassVar[tuple[str, ...]] = _COMPACT_TOKENS
    WORDS: typing.ClassVar[Mapping[str, str]] = {
        "write": "write_file",
        "edit": "edit_file",
        "read": "read_file",
        "run": "terminal",
        "test": "run_tests",
        "submit": "submit",
    }
    SEPARATOR: typing.ClassVar[str] = "\n=====\n"

    def tools(self, task: Task) -> tuple[str, ...]:
        return task.tools

    def prompt(self, task: Task) -> str:
        return render("compact", task.messages) + task.prefill

    def message(self, calls: Sequence[ToolCall]) -> str:
        """The assistant's message that makes these calls, stop token included; ``parse`` undoes it.

        Paths of write_file and edit_file are not written: they are the task's.
        """
        return "".join(f"<|call|>{self._body(call)}<|end|>" for call in calls) + "<|eot|>"

    def _body(self, call: ToolCall) -> str:
        arguments = call.arguments
        match call.name:
            case "write_file":
                return "write\n" + arguments["content"]
            case "edit_file":
                return "edit\n" + arguments["old"] + self.SEPARATOR + arguments["new"]
            case "read_file":
                return " ".join(["read", *(str(value) for value in arguments.values())])
            case "terminal":
                return "run\n" + arguments["command"]
            case "run_tests":
                return "test"
            case "submit":
                return "submit"
            case _:
                raise ValueError(f"the compact protocol has no word for {call.name=}")

    def parse(self, text: str, task: Task) -> list[ToolCall]:
        words = [word for word, name in self.WORDS.items() if name in task.tools]
        before, *pieces = text.split("<|call|>")
        if not pieces:
            return [ToolCall("", {}, f"no call; use {', '.join(words)}")]
        calls = [_outside(before)] if before.strip() else []
        for piece in pieces:
            body, end, rest = piece.partition("<|end|>")
            head, newline, content = body.partition("\n")
            word, *extra = head.split() or [""]
            if word not in words:
                calls.append(
                    ToolCall(word, {}, f"unknown {break_up(word)[:20]!r}; use {', '.join(words)}")
                )
            elif not end:
                calls.append(ToolCall(self.WORDS[word], {}, f"{word} has no end"))
            else:
                calls.append(self._call(word, extra, content if newline else None, task))
            if rest.strip():
                calls.append(_outside(rest))
        return calls

    def _call(self, word: str, extra: list[str], content: str | None, task: Task) -> ToolCall:
        """One call from the words of its first line and the text below it (None when there is no
        second line).
        """
        name = self.WORDS[word]
        arguments: dict[str, Any] = {}
        error = ""
        match word:
            case "write" | "edit" | "run" if extra or content is None:
                below = {"write": "the file", "edit": "old text", "run": "the command"}[word]
                error = f"{word} wants a new line, then {below}"
            case "write":
                arguments = {"path": task.path, "content": content}
            case "run":
                arguments = {"command": content}
            case "edit":
                old, separator, new = f"{content}\n".partition(self.SEPARATOR)
                arguments = {"path": task.path, "old": old, "new": new.removesuffix("\n")}
                if not separator:
                    error = "edit wants old text, a line =====, new text"
            case "read":
                path, *lines = extra or [task.path]
                if (
                    content
                    or len(lines) > 2
                    or not all(line.isdecimal() and len(line) < 10 for line in lines)
                ):
                    error = "read wants a path, first line, last line"
                else:
                    lines = dict(zip(("first_line", "last_line"), map(int, lines), strict=False))
                    arguments = {"path": path, **lines}
            case _ if extra or content:
                error = f"{word} takes nothing"
        return ToolCall(name, {} if error else arguments, error)

    def observation(self, results: Sequence[ToolResult]) -> str:
        return answer("compact", results)

    def stopped(self, text: str) -> bool:
        return False


def _outside(text: str) -> ToolCall:
    return ToolCall("", {}, f"text outside a call: {break_up(' '.join(text.split()))[:20]!r}")
