"""The runs of lines in which two sets of files differ.

An agent wrote them, so they are compared in a disposable process: this file uses the standard
library alone.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping

from rl_code.environment.sandbox.disposable import bounded
from rl_code.text.lines import split_lines

# CPU seconds of one comparison.
_CPU_S = 20.0


@dataclasses.dataclass(frozen=True)
class Hunk:
    """Neighbouring lines of one file that work changed."""

    path: str
    # The first line, from 0, of the file as it was and as it is.
    at: int
    now_at: int
    # The lines as they were and as they are; () for none.
    before: tuple[str, ...]
    now: tuple[str, ...]

    @property
    def diff(self) -> list[str]:
        """The hunk as lines that begin with - and +."""
        lines = [f"-{line.rstrip()}" for line in self.before]
        return lines + [f"+{line.rstrip()}" for line in self.now]


def hunks(before: Mapping[str, str], now: Mapping[str, str]) -> list[Hunk]:
    """The hunks between two sets of files, by path and line; a new file is one of them. Raises
    OutOfBounds, and SandboxFault.
    """
    paths = [path for path in sorted({*before, *now}) if before.get(path) != now.get(path)]
    pairs = [(before.get(path, ""), now.get(path, "")) for path in paths]
    found = []
    for path, (old, new), spans in zip(paths, pairs, bounded(_spans, _CPU_S, pairs), strict=True):
        lines, now_lines = _lines(old), _lines(new)
        for i, i_end, j, j_end in spans:
            found.append(Hunk(path, i, j, tuple(lines[i:i_end]), tuple(now_lines[j:j_end])))
    return found


def _lines(text: str) -> list[str]:
    return split_lines(text, keepends=True)


def _spans(pairs: list[tuple[str, str]]) -> list[list[tuple[int, ...]]]:
    """For each pair of texts, the lines that differ: first and end of the one and of the other."""
    found = []
    for before, now in pairs:
        matcher = difflib.SequenceMatcher(None, _lines(before), _lines(now), autojunk=False)
        found.append([tuple(span) for kind, *span in matcher.get_opcodes() if kind != "equal"])
    return found
