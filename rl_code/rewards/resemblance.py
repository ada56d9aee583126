"""Resemblance of two changes, for the signal ``similarity``.

An agent made one of them, so this runs in a disposable process: standard library only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from rl_code.text.lines import split_lines

_WORDS = re.compile(r"\w+|[^\w\s]")
# Work whose change has more than this times the words of the reference's earns nothing; its ratio
# would be below 0.2.
_LONGER = 9
# And none is computed against a reference of more words.
_MOST = 5_000

type Texts = Mapping[str, str]


def resemblance(made: tuple[Texts, Texts], wanted: tuple[Texts, Texts]) -> float:
    """0 to 1: the ratio of ``difflib.SequenceMatcher`` between the words of two changes; 0 where
    one of them has too many, or none.

    made, wanted: path -> text before and after a change, of the files that differ.
    """
    reference = list(_words(*wanted))
    if not reference or len(reference) > _MOST:
        return 0.0
    most = _LONGER * len(reference)
    found = []
    for word in _words(*made):
        found.append(word)
        if len(found) > most:
            return 0.0
    if not found:
        return 0.0
    return difflib.SequenceMatcher(None, found, reference, autojunk=False).ratio()


def _words(before: Texts, after: Texts) -> Iterator[str]:
    """The words of a change: of each file its path, and then the lines that went and that came."""
    for path in sorted({*before, *after}):
        yield path
        lines = split_lines(before.get(path, "")), split_lines(after.get(path, ""))
        for line in difflib.unified_diff(*lines, n=0, lineterm=""):
            if not line.startswith(("---", "+++", "@@")):
                yield line[0]
                yield from _WORDS.findall(line[1:])
