"""Texts of values and outputs for the model: on one line, cut, and the same on every run."""

from __future__ import annotations

from typing import Any


def show(value: Any) -> str:
    """``repr`` of a plain Python value, with the elements of sets in a fixed order."""
    match value:
        case list():
            return "[" + ", ".join(map(show, value)) + "]"
        case tuple():
            return "(" + ", ".join(map(show, value)) + (",)" if len(value) == 1 else ")")
        case set() if value:
            return "{" + ", ".join(sorted(map(show, value))) + "}"
        case frozenset() if value:
            return f"frozenset({show(set(value))})"
        case dict():
            return (
                "{" + ", ".join(f"{show(key)}: {show(item)}" for key, item in value.items()) + "}"
            )
        case _:
            return repr(value)


def one_line(text: str, width: int) -> str:
    """The text with runs of white space made single spaces, cut to ``width`` characters (ending in
    "...").
    """
    line = " ".join(text[: 4 * width].split())
    return line if len(line) <= width else line[: width - 3] + "..."


def cut_middle(text: str, width: int) -> str:
    """The text, or its beginning and end (``width`` characters of it) with a note of how much was
    left out.
    """
    if len(text) <= width:
        return text
    head = width - width // 2
    tail = width // 2
    return f"{text[:head]}\n[{len(text) - width} characters cut]\n{text[-tail:]}"
