"""Calls in tags, as Qwen3-Coder and GLM write them.

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

GLM's are pairs, behind the name:

    <tool_call>name
    <arg_key>key</arg_key>
    <arg_value>value</arg_value>
    </tool_call>

Values are not escaped, so one may hold the same tags (``pairs``). A key that was given already
begins no other parameter. Tags on lines of their own, as templates write them, come before tags
that stand anywhere.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Literal

from rl_code.environment.protocols.pairs import Tag, ends_of
from rl_code.environment.tools.text import one_line

# Names in tags are short: with a bound, a text of many tags is read in one pass.
_NAME = r"([^<>\n]{0,200})"
_OUTSIDE = re.compile("</?tool_call>")


@dataclasses.dataclass(frozen=True)
class Function:
    """A call as its tags say it."""

    # Places in the text where it begins and ends.
    start: int
    end: int
    name: str
    parameters: Mapping[str, str]
    error: str = ""
    # False where tags have no partner, so that further text may move the end of the call.
    settled: bool = True


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Patterns of the places where tags may stand."""

    # The beginning of a call, its end, and a whole call without parameters.
    events: re.Pattern[str]
    # The end of a parameter and the beginning of the next one.
    between: re.Pattern[str]
    # The beginning of a parameter, or its end.
    tag: re.Pattern[str]
    # The beginning of a call's first parameter.
    begin: re.Pattern[str]
    # The end tag of a parameter.
    ending: str = "</parameter>"
    # What is complained about where no tag ends the parameters.
    unclosed: str = "the call has no closed function tag"

    @classmethod
    def tags(cls, space: str, line_before: str, line_behind: str, line_end: str) -> _Layout:
        """Functions and parameters."""
        opening = f"<tool_call>{space}<function={_NAME}>"
        closing = f"</function>{space}</tool_call>"
        end = f"{line_before}</parameter>{space}{closing}"
        return cls(
            re.compile(f"{opening}{space}({closing})|{opening}{line_behind}|({end})"),
            re.compile(f"{line_before}</parameter>{space}<parameter={_NAME}>{line_behind}"),
            re.compile(
                f"{line_before}<parameter={_NAME}>{line_behind}"
                f"|({line_before}</parameter>{line_end})"
            ),
            re.compile(rf"\s*<parameter={_NAME}>"),
        )

    @classmethod
    def pairs(cls, around: str, space: str) -> _Layout:
        """Names with keys and values. around: what may stand around the name."""
        # nothing is tried twice, however much white space there is
        opening = f"<tool_call>{around}([^<>\n]{{0,200}}+){space}"
        first = rf"<arg_key>{_NAME}</arg_key>\s*+<arg_value>"
        return cls(
            re.compile(
                f"{opening}(</tool_call>)|{opening}(?=<arg_key>)|(</arg_value>{space}</tool_call>)"
            ),
            re.compile(f"</arg_value>{space}{first}"),
            re.compile(f"{first}|(</arg_value>)"),
            re.compile(rf"\s*+{first}"),
            "</arg_value>",
            "the call has no closed argument tag",
        )


type TagForm = Literal["tags", "pairs"]
# For each form its layout as templates write it, and one that takes tags wherever they stand.
_LAYOUTS: Mapping[TagForm, tuple[_Layout, _Layout]] = {
    "tags": (
        _Layout.tags(r"\n", r"(?<=\n)", r"(?=\n)", r"(?=\n|\Z)"),
        _Layout.tags(r"\s*", "", "", ""),
    ),
    "pairs": (_Layout.pairs("", r"\n"), _Layout.pairs(r"\s*+", r"\s*+")),
}


def read_functions(text: str, start: int, form: TagForm = "tags") -> list[Function]:
    """The calls of a text from a place on, in order."""
    lines, anywhere = _LAYOUTS[form]
    found = list(_read(text, start, lines))
    if found and not any(one.error for one in found) and not _left_out(text, start, found):
        return found
    return list(_read(text, start, anywhere))


def _left_out(text: str, start: int, found: list[Function]) -> bool:
    """True if marks of calls stand outside of the calls that were found."""
    at = start
    for one in found:
        if _OUTSIDE.search(text, at, one.start):
            return True
        at = one.end
    return _OUTSIDE.search(text, at) is not None


def _read(text: str, start: int, layout: _Layout) -> Iterator[Function]:
    events = [_event(match) for match in layout.events.finditer(text, start)]
    place = 0
    ends, settled = ends_of(events)
    while place < len(events):
        first = events[place]
        if not first.opens:  # an end without a beginning says nothing
            place += 1
            continue
        if first.closes:
            yield Function(first.start, first.end, first.name, {})
            place += 1
            continue
        last = ends[place]
        if last is None:
            yield _unclosed(text, first, layout)
            return
        end = events[last]
        inside = text[first.end : end.start + len(layout.ending)]
        parameters, error = _parameters(inside, layout)
        yield Function(first.start, end.end, first.name, parameters, error, settled)
        place = last + 1


def _event(match: re.Match[str]) -> Tag:
    if match[4] is not None:
        return Tag(match.start(), match.end(), opens=False, closes=True)
    closes = match[2] is not None
    name = (match[1] if closes else match[3]).strip()
    return Tag(match.start(), match.end(), opens=True, closes=closes, name=name)


def _parameters(body: str, layout: _Layout) -> tuple[Mapping[str, str], str]:
    """The parameters between a function's tags, and what is wrong with them."""
    begin = layout.begin.match(body)
    if begin is None:
        return {}, f"not a closed parameter tag: {one_line(body, 40)!r}"
    found: dict[str, str] = {}
    key, at = begin[1].strip(), begin.end()
    for behind, next_key, next_at in [*_borders(body, key, layout), (len(body), "", 0)]:
        value = body[at : behind - len(layout.ending)]
        # pairs have no lines of their own around values
        found[key] = value if layout.ending == "</arg_value>" else _without_lines(value)
        key, at = next_key, next_at
    return found, ""


def _without_lines(value: str) -> str:
    """A value without the ends of lines that stand beside its tags: all of ``\\r\\n`` in a message
    that ends its lines so.
    """
    end = "\r\n" if value.startswith("\r\n") else "\n"
    return value.removeprefix(end).removesuffix(end)


def _borders(body: str, first: str, layout: _Layout) -> Iterator[tuple[int, str, int]]:
    """Borders between one parameter and the next: the place behind the first one's end tag, the
    next key, and the place behind the next one's tag.
    """
    depths = _depths(body, layout)
    keys = {first}
    for match in layout.between.finditer(body):
        behind = match.start() + len(layout.ending)
        key = match[1].strip()
        if key in keys or (depths is not None and depths[match.start()] > 0):
            continue
        keys.add(key)
        yield behind, key, match.end()


def _depths(body: str, layout: _Layout) -> Mapping[int, int] | None:
    """Place of an end tag of a parameter -> how many parameters are open behind it; None where the
    tags cannot be paired.
    """
    depths = {}
    depth = 0
    for match in layout.tag.finditer(body):
        if match[2] is None:
            depth += 1
            continue
        depth -= 1
        if depth < 0:
            return None
        depths[match.start()] = depth
    return depths if depth == 0 else None


def _unclosed(text: str, first: Tag, layout: _Layout) -> Function:
    """A call without an end, behind which nothing is read."""
    rest = text[first.end :]
    if "</tool_call>" not in rest:
        error = "the call is not closed"
    elif layout.begin.match(rest):
        error = f"not a closed parameter tag: {one_line(rest.strip(), 40)!r}"
    else:
        error = layout.unclosed
    return Function(first.start, len(text), first.name, {}, error)
