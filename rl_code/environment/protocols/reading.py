"""Structure of a chat message: where its thoughts end and where its calls stand.

A message is read from its beginning, and what a call holds is skipped as a whole. So marks inside
of an argument are text of the argument, and a mark inside of a thought is a part of the thought.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from rl_code.environment.protocols.tags import Function, read_functions
from rl_code.environment.tools.schema import json_decoder

THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"
_FUNCTION = "<function="
_PYTHON_TAG = "<|python_tag|>"
_MARK = re.compile(f"{THINK}|{CALL}")
_AFTER = re.compile(r"\s*+")
# The name of a call that is followed by pairs, and one that a message was cut behind.
_NAMED = re.compile(r"\s*+([^<>\n]{0,200}+)\s*+(?=<arg_key>|</tool_call>)")
_CUT = re.compile(r"\n*+[\w.:-]{0,200}+\s*+(<[/\w]{0,10}+)?\Z")
_JSON = json_decoder(repeated=False)
_QUOTES = frozenset("`'\"")


@dataclasses.dataclass(frozen=True)
class Written:
    """One call as it stands in a message."""

    # Place in the text where it begins.
    start: int
    # The call itself: a value of JSON, or a function with its parameters as text. None where it
    # cannot be read.
    value: Any = None
    # Complaint about it; "" if there is none.
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Reading:
    """Content of a message: its calls and thoughts."""

    calls: Sequence[Written] = ()
    # True if the message ends inside a thought.
    thinking: bool = False

    def before(self, text: str) -> str:
        """The text in front of the first call; all of it where there is none."""
        return text[: self.calls[0].start].rstrip() if self.calls else text


def read_json(text: str, *, thinking: bool = False) -> Reading:
    """Calls that are JSON between ``<tool_call>`` and ``</tool_call>``.

    A mark without JSON behind it and without an end is only mentioned. Where the JSON of a call is
    broken, nobody knows where the call ends, so nothing behind it is read. thinking: the message
    begins inside a thought.
    """
    closes = _Finder(text, CALLED)

    def call_at(start: int) -> tuple[list[Written], int]:
        at = start + len(CALL)
        body = behind_space(text, at)
        if body == len(text):
            return [Written(start, error="the call is not closed")], body
        if text[body] not in "{[":
            end = closes.behind(at)
            if end >= 0 and text.find(CALL, at, end) < 0:
                wrong = _broken(text[at:end])
                return [Written(start, error=wrong)], end + len(CALLED)
            return [], at
        try:
            value, end = _JSON.raw_decode(text, body)
        except (ValueError, RecursionError, MemoryError):
            return [Written(start, error=_broken(text[at:]))], len(text)
        behind = behind_space(text, end)
        if text.startswith(CALLED, behind):
            return [Written(start, value)], behind + len(CALLED)
        close = closes.behind(end)
        if close < 0 or text.find(CALL, end, close) >= 0:
            return [Written(start, value, "the call is not closed")], end
        wrong = _broken(text[at:close])
        return [Written(start, error=wrong)], close + len(CALLED)

    return scan(text, thinking, call_at)


def read_tags(text: str, *, thinking: bool = False) -> Reading:
    """Calls that are tags between ``<tool_call>`` and ``</tool_call>``. thinking: as above."""
    closes = _Finder(text, CALLED)
    functions: dict[int, Function] | None = None  # by their places, from the first one on

    def call_at(start: int) -> tuple[list[Written], int]:
        nonlocal functions
        at = start + len(CALL)
        body = behind_space(text, at)
        beginning = text[body : body + len(_FUNCTION)]
        if functions is None and beginning == _FUNCTION:
            functions = {one.start: one for one in read_functions(text, start)}
        if functions is not None and start in functions:
            call = functions[start]
            return [Written(start, call, call.error)], call.end
        wrong = Written(start, error="the call has no closed function tag")
        end = closes.behind(at)
        if end >= 0 and text.find(CALL, at, end) < 0:
            return [wrong], end + len(CALLED)
        if _FUNCTION.startswith(beginning):
            return [wrong], len(text)
        return [], at

    return scan(text, thinking, call_at)


def read_pairs(text: str, *, thinking: bool = False) -> Reading:
    """Calls that are a name and pairs of keys and values between ``<tool_call>`` and
    ``</tool_call>``. thinking: as above.
    """
    closes = _Finder(text, CALLED)
    functions: dict[int, Function] | None = None  # by their places, from the first one on

    def call_at(start: int) -> tuple[list[Written], int]:
        nonlocal functions
        at = start + len(CALL)
        named = _NAMED.match(text, at)
        begun = named is not None and bool(named[1].strip())
        if functions is None and begun:
            functions = {one.start: one for one in read_functions(text, start, "pairs")}
        if functions is not None and start in functions:
            call = functions[start]
            return [Written(start, call, call.error)], call.end
        wrong = Written(start, error="the call has no closed argument tag")
        end = closes.behind(at)
        if end >= 0 and text.find(CALL, at, end) < 0:
            return [wrong], end + len(CALLED)
        if begun or _CUT.match(text, at):
            return [wrong], len(text)
        return [], at

    return scan(text, thinking, call_at)


def read_bare(text: str, *, thinking: bool = False) -> Reading:
    """One call that is all of the message, or all that follows its thoughts."""
    at = _behind_thought(text, 0) if thinking else 0
    if at is None:
        return Reading(thinking=True)
    while True:
        at = behind_space(text, at)
        if text.startswith(THINK, at):
            at = _behind_thought(text, at)
            if at is None:
                return Reading(thinking=True)
            continue
        body = at + len(_PYTHON_TAG) if text.startswith(_PYTHON_TAG, at) else at
        body = behind_space(text, body)
        if text.startswith("{", body):
            return Reading([_whole(text, at, body)])
        at = _behind_thought(text, at)
        if at is None:
            return Reading()


def _whole(text: str, start: int, body: int) -> Written:
    """A call that goes to the end of the text."""
    try:
        value, end = _JSON.raw_decode(text, body)
    except (ValueError, RecursionError, MemoryError):
        return Written(start, error=_broken(text[body:]))
    if text[end:].strip():
        return Written(start, error=_broken(text[body:]))
    return Written(start, value)


def scan(
    text: str,
    thinking: bool,
    call_at: Callable[[int], tuple[list[Written], int]],
    marks: re.Pattern[str] = _MARK,
) -> Reading:
    """The calls outside of thoughts. A mark between two quotation marks is only mentioned.

    thinking: the message begins inside a thought. call_at: place of a mark -> the calls that begin
    there, none if the mark is only mentioned, and where to read on. marks: the beginnings of
    thoughts and of calls.
    """
    at = _behind_thought(text, 0) if thinking else 0
    if at is None:
        return Reading(thinking=True)
    calls: list[Written] = []
    while (mark := marks.search(text, at)) is not None:
        if _quoted(text, mark.start(), mark.end()):
            at = mark.end()
        elif mark[0] == THINK:
            at = _behind_thought(text, mark.end())
            if at is None:
                return Reading(calls, thinking=True)
        else:
            found, at = call_at(mark.start())
            calls += found
    return Reading(calls)


def _behind_thought(text: str, at: int) -> int | None:
    """The place behind the next end of a thought; None where the thought never ends."""
    end = text.find(THOUGHT, at)
    return end + len(THOUGHT) if end >= 0 else None


class _Finder:
    """Places of a word in a text, asked for in ascending order; the text is searched once."""

    def __init__(self, text: str, word: str):
        self._text, self._word = text, word
        self._next = -1
        self._searched = -1

    def behind(self, at: int) -> int:
        """The first place from ``at`` on; -1 for none."""
        if self._searched < 0 or 0 <= self._next < at:
            self._next = self._text.find(self._word, at)
            self._searched = at
        return self._next


def behind_space(text: str, at: int) -> int:
    """The next place without white space."""
    return _AFTER.match(text, at).end()


def _quoted(text: str, start: int, end: int) -> bool:
    """True if the same quotation mark stands on both sides: a tag that is only mentioned."""
    quote = text[start - 1 : start]
    return quote in _QUOTES and text[end : end + 1] == quote


def _broken(body: str) -> str:
    """Complaint about JSON that cannot be read."""
    try:
        _JSON.decode(body)
    except (ValueError, RecursionError, MemoryError) as error:
        return f"the call is not valid JSON ({error})"
    return "the call is not valid JSON"
