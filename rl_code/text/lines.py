"""Lines of a text as editors, language servers and Python's parser count them.

A line ends at ``\\n``, ``\\r\\n`` or ``\\r``, and nowhere else. ``str.splitlines`` also ends lines
at form feeds, U+2028 and others, so its numbers are not those of other programs.
"""

from __future__ import annotations

import io
import re

_BREAK = re.compile(r"\r\n|\n")


def split_lines(text: str, keepends: bool = False) -> list[str]:
    """The lines of a text; none for "". keepends: whether they keep what ends them."""
    lines = list(io.StringIO(text, newline=""))
    return lines if keepends else [line.rstrip("\r\n") for line in lines]


def ending(line: str) -> str:
    """Ending of a line that was split with ``keepends``; "" for a last line without an end."""
    return line[len(line.rstrip("\r\n")) :]


def with_endings(text: str, end: str) -> str:
    """The text with this end of each line, where it is another than ``\\n``, which texts of models
    have.
    """
    return text if end in ("", "\n") else _BREAK.sub(end, text)


def common_ending(text: str) -> str:
    """Ending of all lines of a text; ``\\n`` where lines end differently, or none ends."""
    ends = {ending(line) for line in split_lines(text, keepends=True)} - {""}
    return ends.pop() if len(ends) == 1 else "\n"
