"""How a model's text becomes tool calls and how their results become text, one class per way of writing.

What a tool says can hold anything, special tokens included; every protocol breaks those up before the text is
tokenised, so that no output of a program can end a turn or open another.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from models.tokenizer import Tokenizer
from rl_code.types import Task, ToolCall, ToolResult


class Protocol(typing.Protocol):
    """One way of writing calls.

    stop_tokens: special tokens that end an assistant message; the first is put in where a message was cut.
    verbose: whether tools answer in sentences or in as few words as will do.
    """

    stop_tokens: tuple[str, ...]
    verbose: bool

    def tools(self, task: Task) -> tuple[str, ...]:
        """Names of the tools that calls may name."""
        ...

    def prompt(self, task: Task) -> str:
        """All text before the first sampled token; it ends in ``task.prefill``."""
        ...

    def parse(self, text: str, task: Task) -> list[ToolCall]:
        """The calls of one assistant message in order, at least one; those that are malformed have ``error`` set.

        text: the message without its stop token; the first one with ``task.prefill`` before it.
        """
        ...

    def observation(self, results: Sequence[ToolResult]) -> str:
        """The text after the message's stop token, up to where the assistant goes on."""
        ...

    def stopped(self, text: str) -> bool:
        """Whether the text sampled so far is complete without a stop token; once True it stays True."""
        ...


def stop_ids(protocol: Protocol, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the tokens that end an assistant message."""
    return frozenset(tokenizer.token_id(token) for token in protocol.stop_tokens)


def stop_length(protocol: Protocol, tokenizer: Tokenizer, tokens: Sequence[int]) -> int | None:
    """Length of the first prefix of one message's sampled tokens at which it is complete; None when it is not yet.

    The token that completes it, a stop token or the one that triggers the rule on text, is part of the prefix.
    """
    ends = stop_ids(protocol, tokenizer)
    stop = next((i for i, token in enumerate(tokens) if token in ends), None)
    body = list(tokens if stop is None else tokens[:stop])
    if not protocol.stopped(tokenizer.decode(body)):
        return None if stop is None else stop + 1
    low, high = 0, len(body)  # not stopped after low tokens, stopped after high
    while high - low > 1:
        middle = (low + high) // 2
        if protocol.stopped(tokenizer.decode(body[:middle])):
            high = middle
        else:
            low = middle
    return high


def break_up(text: str) -> str:
    """The text with every special token of the form ``<|...|>`` taken apart."""
    return text.replace("<|", "< |")


_COMPACT_TOKENS = ("<|pad|>", "<|bos|>", "<|eot|>", "<|call|>", "<|end|>", "<|tool|>")


@dataclasses.dataclass(frozen=True)
class Compact:
    """For a small model trained from scratch: one special token per mark, a word per tool, a line per answer.

    prompt       <|bos|>content of the messages<|eot|>
    assistant    <|call|>write\\n<whole file><|end|><|call|>test<|end|><|eot|>   (one or more calls, nothing else)
                 edit\\n<old>\\n=====\\n<new> | read [path [first [last]]] | run\\n<command> | submit
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
        return "<|bos|>" + "\n".join(message["content"] for message in task.messages) + "<|eot|>" + task.prefill

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
                calls.append(ToolCall(word, {}, f"unknown {break_up(word)[:20]!r}; use {', '.join(words)}"))
            elif not end:
                calls.append(ToolCall(self.WORDS[word], {}, f"{word} has no end"))
            else:
                calls.append(self._call(word, extra, content if newline else None, task))
            if rest.strip():
                calls.append(_outside(rest))
        return calls

    def _call(self, word: str, extra: list[str], content: str | None, task: Task) -> ToolCall:
        """One call from the words of its first line and the text below it (None when there is no second line)."""
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
                if content or len(lines) > 2 or not all(line.isdecimal() and len(line) < 10 for line in lines):
                    error = "read wants a path, first line, last line"
                else:
                    lines = dict(zip(("first_line", "last_line"), map(int, lines), strict=False))
                    arguments = {"path": path, **lines}
            case _ if extra or content:
                error = f"{word} takes nothing"
        return ToolCall(name, {} if error else arguments, error)

    def observation(self, results: Sequence[ToolResult]) -> str:
        return "<|tool|>" + break_up("\n".join(result.content for result in results)) + "<|eot|>"

    def stopped(self, text: str) -> bool:
        return False


def _outside(text: str) -> ToolCall:
    return ToolCall("", {}, f"text outside a call: {break_up(' '.join(text.split()))[:20]!r}")


PROTOCOLS: dict[str, Protocol] = {"compact": Compact()}
