"""The past of a generated repository: commits, of which the first has all files and each other one
changes one line. One of them made the fault.

The lines that the others changed are right today; before, another operation stood there, or another
constant. So history does not tell the fault, but which few lines may be it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import NamedTuple

from rl_code.environment.layers import commits
from rl_code.environment.layers.commits import Commit
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.inside.world import WORKSPACE
from rl_code.environment.tools.history import short_blame
from rl_code.text.lines import split_lines
from rl_code.types import Layer, Task, World


class Changed(NamedTuple):
    """Line that a commit changed. Tasks have it as a plain tuple."""

    path: str
    # Number of the line, counted from 1; changes add and remove no lines.
    number: int
    # Text of the line before the change.
    before: str


def draw(
    rng: random.Random, fault: Changed, others: Sequence[Changed], count: int
) -> tuple[Changed, ...]:
    """So many changes, in the order in which they were made: the fault's, and some of the others of
    other lines. There may be fewer where there are not so many lines.
    """
    free = [one for one in others if (one.path, one.number) != (fault.path, fault.number)]
    found = [fault, *rng.sample(free, min(count - 1, len(free)))]
    return tuple(rng.sample(found, len(found)))


def commits_of(task: Task) -> list[Commit]:
    """The commits that lead to the files of a task."""
    past = _past(task)
    states = [dict(task.files)]
    for path, number, before in reversed(past):
        lines = split_lines(states[-1][path], keepends=True)
        lines[number - 1] = f"{before}\n"
        states.append({**states[-1], path: "".join(lines)})
    subjects = ["Write the modules", *(f"Change {one.path}" for one in past)]
    return [Commit(*one) for one in zip(subjects, reversed(states), strict=True)]


def with_history(task: Task, store: LayerStore) -> Task:
    """The task in a world in which its past is a git repository. The layer is built if it is not
    there yet.
    """
    digest = commits.build(store, commits_of(task))
    return dataclasses.replace(task, world=World((Layer(digest, WORKSPACE),)))


def changed_in(task: Task) -> frozenset[tuple[str, int]]:
    """(path, number) of the lines that any commit behind the first changed."""
    return frozenset((one.path, one.number) for one in _past(task))


def blame(task: Task, path: str) -> str:
    """Result of ``history blame`` for a file."""
    ages = {(one.path, one.number): age for age, one in enumerate(reversed(_past(task)))}
    return "\n".join(
        short_blame(ages.get((path, number), ""), number, line)
        for number, line in enumerate(split_lines(task.files[path]), start=1)
    )


def _past(task: Task) -> list[Changed]:
    return [Changed(*one) for one in task.meta["past"]]
