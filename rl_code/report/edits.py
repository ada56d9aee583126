"""Changes that a trajectory's calls made in the files, as lines of a diff, for a person to read.

An edit is a call that names a file (``path``) and gives its new text (``content``), or a piece of
its text and what replaces it (``old``, ``new``). Tools of any name that take such arguments are
understood. Changes by other tools, such as a shell command, are not seen, so a diff compares with
the text as it was last seen.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from rl_code.environment.sandbox.disposable import OutOfBounds, bounded
from rl_code.text.lines import split_lines

_MOST_LINES = 200
# CPU seconds of one difference.
_CPU_S = 2.0


def with_diffs(
    turns: Sequence[Mapping[str, Any]], files: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The logged turns; each call that is an edit has ``diff``, lines that begin with +, - or a
    space.

    files: path -> text at the start of the episode, of the files that calls name.
    """
    seen = dict(files)
    found = []
    for number, turn in enumerate(turns):
        results = turns[number + 1]["results"] if number + 1 < len(turns) else []
        calls = []
        for index, call in enumerate(turn["calls"]):
            refused = index < len(results) and not results[index]["ok"]
            after = None if call["error"] or refused else _edited(call["arguments"], seen)
            if after is None:
                calls.append(dict(call))
                continue
            path, text = after
            calls.append({**call, "diff": diff(seen.get(path, ""), text)})
            seen[path] = text
        found.append({**turn, "calls": calls})
    return found


def _edited(arguments: Mapping[str, Any], seen: Mapping[str, str]) -> tuple[str, str] | None:
    """Path and new text of the file that a call edits; None when it is no edit."""
    path, content = arguments.get("path"), arguments.get("content")
    old, new = arguments.get("old"), arguments.get("new")
    if not isinstance(path, str):
        return None
    if isinstance(content, str):
        return path, content
    if isinstance(old, str) and isinstance(new, str):
        before = seen.get(path, old)
        return path, before.replace(old, new, 1) if old in before else new
    return None


def diff(before: str, after: str) -> list[str]:
    """Lines of a unified diff without its head, at most ``_MOST_LINES``; a line that says so where
    it takes too long. An agent wrote the texts, so it is made in a disposable process.
    """
    try:
        return bounded(_diff, _CPU_S, before, after)
    except OutOfBounds as error:
        return [f"@@ no difference: {error}"]


def _diff(before: str, after: str) -> list[str]:
    lines = list(difflib.unified_diff(split_lines(before), split_lines(after), lineterm="", n=2))
    if len(lines) > _MOST_LINES + 2:
        more = len(lines) - _MOST_LINES - 2
        lines = [*lines[: _MOST_LINES + 2], f"@@ {more} more lines"]
    return lines[2:]
