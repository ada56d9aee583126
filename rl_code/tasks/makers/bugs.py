"""Bugs by mutation of the syntax tree: one small thing in a function is another.

Only code that tests run is changed, and only the text of the changed node, so the rest of the file
is as its authors wrote it.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator

from rl_code.tasks.makers import mutations, testfiles
from rl_code.tasks.makers.candidate import Candidate, Change
from rl_code.tasks.makers.package import Package
from rl_code.tasks.makers.survey import Function, Survey
from rl_code.text.lines import split_lines

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def candidates(package: Package, survey: Survey, of_each: int) -> Iterator[Candidate]:
    """Bugs in functions that tests run, in an order that mixes functions: first one of each
    function, then a second one.

    of_each: bugs of one function, at most.
    """
    mutated = [
        _of_function(package, survey, function, of_each)
        for function in survey.functions
        if len(function.tests) > 1  # one is shown, another one is hidden
    ]
    random.Random(package.pin.label).shuffle(mutated)
    for number in range(of_each):
        yield from (found[number] for found in mutated if len(found) > number)


def pair(one: Candidate, other: Candidate) -> Candidate:
    """Two bugs of different files in one."""
    return Candidate(
        "bugs",
        one.operators + other.operators,
        one.functions + other.functions,
        one.changes + other.changes,
    )


def _of_function(
    package: Package, survey: Survey, function: Function, count: int
) -> list[Candidate]:
    """Up to ``count`` bugs, of as many different kinds as there are."""
    text = package.sources[function.path]
    lines = split_lines(text, keepends=True)
    executed = survey.lines.get(function.path, frozenset())
    node = next(
        (
            one
            for one in ast.walk(testfiles.parse(text))
            if isinstance(one, _FUNCTIONS)
            and one.end_lineno == function.end
            and one.name == function.qualname.rpartition(".")[2]
        ),
        None,
    )
    if node is None:
        return []
    found = [edit for edit in mutations.edits(node) if edit.node.lineno in executed]
    drawn = random.Random(f"{package.pin.label} {function.key}")
    drawn.shuffle(found)
    # kinds take turns
    rank: dict[str, int] = {}
    turns = []
    for edit in found:
        rank[edit.operator] = rank.get(edit.operator, -1) + 1
        turns.append((rank[edit.operator], len(turns), edit))
    made: dict[Change, Candidate] = {}
    for _, _, edit in sorted(turns, key=lambda turn: turn[:2]):
        if len(made) == count:
            break
        changed = mutations.as_lines(function.line, function.end, lines, edit)
        if changed is None:
            continue
        change = Change(function.path, *changed)
        if change not in made:
            made[change] = Candidate("bug", (edit.operator,), (function,), (change,))
    return list(made.values())
