"""Versions of changed files for the signal ``tested``: with a bug or without one, each in another
form (``disguise.py``).

An agent wrote these files, so this runs in a disposable process: standard library only.
"""

from __future__ import annotations

import ast
import itertools
import random
from collections.abc import Iterator, Mapping

from rl_code.rewards.disguise import disguised
from rl_code.tasks.makers import mutations
from rl_code.text.lines import split_lines

# Characters of a file whose lines are looked at.
_LONGEST = 100_000


def versions(
    before: Mapping[str, str], after: Mapping[str, str], seed: str, most: int, controls: int
) -> list[tuple[dict[str, str], bool]]:
    """Versions of the files, in no particular order: (path -> text, whether it has a bug). Empty
    where no bug can be tried in a changed line.

    before, after: path -> text of the changed files. seed: of the choice of bugs. most: of them.
    controls: versions without a bug.
    """
    anew = {path: _written_anew(text) for path, text in after.items()}
    sources = {path: text for path, text in anew.items() if text is not None}
    lines = {path: _changed_lines(before.get(path, ""), text) for path, text in sources.items()}
    tried = list(itertools.islice(_bugs(sources, lines, random.Random(seed)), most))
    if not tried:
        return []
    # what is drawn here nobody can foresee
    unknown = random.SystemRandom()
    runs = [({**sources, path: text}, True) for path, text in tried]
    runs += [(sources, False) for _ in range(controls)]
    found = []
    for number, (texts, is_bug) in enumerate(runs):
        # half of those without a bug in a form that has nothing left of any line
        share = 1.0 if number % 2 and not is_bug else 0.5
        found.append(
            ({path: disguised(text, unknown, share) for path, text in texts.items()}, is_bug)
        )
    return found


def _written_anew(text: str) -> str | None:
    """The code of a file from its syntax tree; None for what is no Python, or too long."""
    if len(text) > _LONGEST:
        return None
    try:
        return ast.unparse(ast.parse(text)) + "\n"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _changed_lines(before: str, now: str) -> set[int]:
    """Numbers of the lines, from 1, that do not stand in the file as it was, written anew."""
    old = set(split_lines(_written_anew(before) or before))
    return {n for n, line in enumerate(split_lines(now), 1) if line.strip() and line not in old}


def _bugs(
    sources: Mapping[str, str], lines: Mapping[str, set[int]], drawn: random.Random
) -> Iterator[tuple[str, str]]:
    """(path, text with a bug) for all bugs in changed lines, in a drawn order in which lines take
    turns. A text is made when it is asked for.
    """
    by_line: dict[tuple[str, int], list[tuple[ast.FunctionDef, mutations.Edit]]] = {}
    for path, numbers in lines.items():
        for node in ast.walk(ast.parse(sources[path])):
            for edit in mutations.edits(node) if isinstance(node, ast.FunctionDef) else ():
                if edit.node.lineno in numbers:
                    by_line.setdefault((path, edit.node.lineno), []).append((node, edit))
    ranked = []
    for (path, line), edits in by_line.items():
        drawn.shuffle(edits)
        ranked += [(rank, drawn.random(), path, line) for rank in range(len(edits))]
    split = {path: split_lines(text, keepends=True) for path, text in sources.items()}
    for rank, _, path, line in sorted(ranked):
        node, edit = by_line[path, line][rank]
        end = node.end_lineno or node.lineno
        if (change := mutations.as_lines(node.lineno, end, split[path], edit)) is not None:
            yield path, change.of(split[path])
