"""Notes that an agent leaves for later episodes on the same repository.

Notes belong to a scope: the split and the repository of a task. So what an agent notes in training
is read in training alone, and an evaluation begins without notes.

The notes that an episode may read stand in its task (``meta["notes"]``), which is on record with
the group. A replay of the episode therefore reads the same ones. What it stores and forgets changes
its own copy, and reaches later episodes by ``rl_code.rollout.note_book``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rl_code.types import Task

# Key of ``Task.meta``: the notes as pairs of a name and a text, the oldest first.
NOTES = "notes"


def scope_of(task: Task) -> tuple[str, str]:
    """The split and the repository of a task; a task that names no repository is its own."""
    return str(task.meta.get("split", "")), str(task.meta.get("repository", task.id))


def notes_of(task: Task) -> dict[str, str]:
    """The notes with which an episode of a task begins, the oldest first."""
    return dict(task.meta.get(NOTES, ()))


def with_notes(task: Task, notes: Mapping[str, str]) -> Task:
    """The task with these notes; as it is where there are none."""
    if not notes:
        return task
    return dataclasses.replace(task, meta={**task.meta, NOTES: tuple(notes.items())})
