"""Sections of calls: JSON between special tokens, as Kimi K2 and DeepSeek-V3 write it.

    <section><call>NAME<separator>{…}<end of call>…<end of section>

A section ends its message. JSON is read up to its end, so what an argument holds is never a mark.
Behind JSON or marks that are broken nothing is read, since nobody knows where the call ends.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from models.marks import unquote, unquote_all
from rl_code.environment.protocols.marked import Marked, complained
from rl_code.environment.protocols.reading import THINK, Reading, Written, behind_space, scan
from rl_code.environment.tools.schema import Arguments, json_decoder
from rl_code.environment.tools.text import one_line
from rl_code.environment.tools.tool import Tool
from rl_code.types import ToolCall

_JSON = json_decoder(repeated=False)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The marks of a family."""

    begin: str
    end: str
    call: str
    called: str
    # What stands between the mark of a call and its JSON; the groups "name" and, where calls have
    # names of their own, "id".
    head: re.Pattern[str]
    # A call in words, for messages to the model.
    form: str
    # What may stand between the JSON of a call and the mark of its end.
    tail: str = ""

    @property
    def told(self) -> str:
        """The form of a section, in words."""
        return f"end the message with {self.begin}, {self.form} for each call, and {self.end}"


@dataclasses.dataclass(frozen=True)
class _Said:
    """A call as it stands in a section."""

    name: str
    id: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Sectioned(Marked):
    """A protocol whose calls stand in a section."""

    layout: ClassVar[Layout]
    tells_marks: ClassVar[bool] = True

    @property
    def thinks(self) -> bool:
        """True if messages begin inside of thoughts."""
        return False

    @property
    def form(self) -> str:
        return self.layout.told

    def _read(self, text: str) -> Reading:
        def call_at(start: int) -> tuple[list[Written], int]:
            return _calls(text, start, self.layout), len(text)

        marks = "|".join(map(re.escape, (THINK, self.layout.begin, self.layout.call)))
        return scan(text, self.thinks, call_at, re.compile(marks))

    def _call(self, written: Written, tools: Mapping[str, Tool]) -> ToolCall:
        said = written.value or _Said("", "", {})
        name = unquote(said.name)
        if written.error:
            wrong = f"the call is malformed: {written.error}; {self.form}"
            return ToolCall(name, {}, wrong, said.id)
        known = Arguments(tools[name].schema if name in tools else {})
        values = unquote_all(said.arguments)
        found = {key: known.normal(key, each) for key, each in values.items()}
        return ToolCall(name, found, id=said.id)


def _calls(text: str, start: int, layout: Layout) -> list[Written]:
    """The calls of a text from the place of the first mark on, at least one."""
    if not text.startswith(layout.begin, start):
        return [Written(start, error=f"{layout.begin} is missing")]
    found = _inside(text, start + len(layout.begin), layout)
    return [dataclasses.replace(found[0], start=start), *found[1:]]


def _inside(text: str, at: int, layout: Layout) -> list[Written]:
    """As ``_calls``, from behind the mark that opens the section."""
    found: list[Written] = []
    while True:
        at = behind_space(text, at)
        if at == len(text):
            return complained(found, at, f"{layout.end} is missing")
        if text.startswith(layout.end, at):
            rest = text[at + len(layout.end) :].strip()
            if rest:
                return complained(found, at, f"{one_line(rest, 40)!r} stands behind the calls")
            return found or complained(found, at, "no call stands in the section")
        one, at = _one(text, at, layout)
        found.append(one)
        if one.error:
            return found


def _one(text: str, at: int, layout: Layout) -> tuple[Written, int]:
    """The call at a place, and the place behind it."""
    head = layout.head.match(text, at + len(layout.call))
    if not text.startswith(layout.call, at) or head is None:
        wrong = f"{one_line(text[at : at + 200], 40)!r} stands where a call must begin"
        return Written(at, error=wrong), at
    names = head.groupdict()
    said = _Said(names["name"], names.get("id", ""), {})
    try:
        value, end = _JSON.raw_decode(text, behind_space(text, head.end()))
    except (ValueError, RecursionError, MemoryError) as error:
        return Written(at, said, f"the arguments are not valid JSON ({error})"), at
    if not isinstance(value, dict):
        return Written(at, said, "the arguments must be a JSON object"), at
    end = behind_space(text, end)
    if layout.tail and text.startswith(layout.tail, end):
        end = behind_space(text, end + len(layout.tail))
    if not text.startswith(layout.called, end):
        return Written(at, said, f"{layout.called} is missing behind the arguments"), at
    return Written(at, dataclasses.replace(said, arguments=value)), end + len(layout.called)
