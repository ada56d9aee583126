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
# Key of ``Task.meta``: a note that some episodes of the group do not read, so that the others tell
# its worth: (its name, the index of the first of them, where it was stored: step, number of the
# group, index of the episode).
LEFT_OUT = "note_left_out"


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


def without_note(task: Task, name: str, first: int, stored: tuple[int, int, int]) -> Task:
    """The task of a group whose episodes from index ``first`` on do not read a note.

    stored: step, number of the group and index of the episode that stored it.
    """
    left_out = name, first, stored
    return dataclasses.replace(task, meta={**task.meta, LEFT_OUT: left_out})


def as_read_by(task: Task, index: int) -> Task:
    """The task with the notes that the episode of this index in its group reads."""
    name, first, _ = task.meta.get(LEFT_OUT, ("", index + 1, None))
    if index < first:
        return task
    notes = {other: text for other, text in notes_of(task).items() if other != name}
    return dataclasses.replace(task, meta={**task.meta, NOTES: tuple(notes.items())})
