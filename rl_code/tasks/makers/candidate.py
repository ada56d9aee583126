"""A candidate for a task: what is changed in a package, before anybody has run its tests."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from rl_code.tasks.makers.survey import Function
from rl_code.text.lines import split_lines


@dataclasses.dataclass(frozen=True)
class Change:
    """Lines of a file that become others."""

    path: str
    # The first of them, counted from 1.
    line: int
    # Lines with their ends.
    old: tuple[str, ...]
    new: tuple[str, ...]

    def row(self) -> dict[str, Any]:
        """Change as plain JSON values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A change that makes a task of a package, if the tests notice it."""

    # "removed", "emptied" (of a deletion), "bug" or "bugs".
    kind: str
    # Change of each function: "function", "method" or "class", or a mutation's name.
    operators: tuple[str, ...]
    functions: tuple[Function, ...]
    changes: tuple[Change, ...]
    # Facts that the task's text may tell, by name (``words.py``).
    told: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def id(self) -> str:
        """A name within the package, which depends on the change alone."""
        told = repr([change.row() for change in self.changes])
        digest = hashlib.sha256(told.encode()).hexdigest()[:10]
        return f"{self.kind}/{'+'.join(one.qualname for one in self.functions)}/{digest}"

    @property
    def deletes(self) -> bool:
        """True if something is to be written again, rather than mended."""
        return self.kind in ("removed", "emptied")


def applied(text: str, changes: Iterable[Change]) -> str:
    """The text of a file after changes of it, which do not overlap. Raises ValueError where it is
    not what the changes start from.
    """
    lines = split_lines(text, keepends=True)
    for change in sorted(changes, key=lambda change: change.line, reverse=True):
        begin = change.line - 1
        end = begin + len(change.old)
        if tuple(lines[begin:end]) != change.old:
            raise ValueError(f"line {change.line} and what follows are not {change.old[:1]}")
        lines[begin:end] = change.new
    return "".join(lines)


def broken(sources: Mapping[str, str], changes: Iterable[Change]) -> dict[str, str]:
    """Texts of the files that changes touch, after the changes, by path."""
    changes = tuple(changes)
    paths = dict.fromkeys(change.path for change in changes)
    return {
        path: applied(sources[path], [change for change in changes if change.path == path])
        for path in paths
    }
