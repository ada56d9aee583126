"""Notes that an episode of a step may read: those that the steps some way before it left.

An episode of step b reads what the episodes of the steps up to b - k - 2 stored and forgot, k being
the bound on staleness. These steps are consumed before any episode of step b can begin, in every
mode. So the notes are a function of the record and of b alone: they do not depend on which actor
samples, on the order in which episodes end, or on when a process was killed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from rl_code.environment.notes import scope_of, with_notes, without_note
from rl_code.environment.tools.tool import Tool
from rl_code.rollout.memory import Calls, MemoryConfig, Note
from rl_code.store.store import GroupStore
from rl_code.types import Group, Task


class NoteBook:
    """Goes through the record once, step by step, and keeps the notes as they were after each of
    the last steps that may still be asked for.

    tools: by name; those without ``notes`` change none. bound: the bound on staleness. memory:
    which notes are kept. group_size: episodes of a group.
    """

    def __init__(
        self,
        store: GroupStore,
        tools: Mapping[str, Tool],
        bound: int,
        memory: MemoryConfig | None = None,
        group_size: int = 1,
    ):
        self._store = store
        self._memory = memory or MemoryConfig()
        self._rule = self._memory.found()
        # The index of a group's first episode that does not read one of the notes.
        self._first = group_size - self._memory.left_out
        self._tools = tools
        self._lag = bound + 2
        # Notes by scope, after each step. Only those of the last steps are kept.
        self._after: dict[int, dict[tuple[str, str], dict[str, Note]]] = {-1: {}}
        self._lock = threading.Lock()

    def task(self, task: Task, step: int) -> Task:
        """The task with the notes that its episodes of a step may read.

        Raises StoreError when the record of the steps before cannot be read.
        """
        if not self._rule.keeps(self._tools):
            return task
        with self._lock:
            last = max(self._after)
            wanted = max(step - self._lag, -1)
            for one in range(last + 1, wanted + 1):
                self._after[one] = self._read(one, self._after[one - 1])
            for old in [one for one in self._after if one < wanted - self._lag]:
                del self._after[old]
            notes = self._after[wanted].get(scope_of(task), {})
            task = with_notes(task, {name: note.text for name, note in notes.items()})
        return task if not self._memory.left_out else self._leave_out(task, notes, step)

    def _leave_out(self, task: Task, notes: Mapping[str, Note], step: int) -> Task:
        """The task in which some episodes do not read one of the notes: the one that was left out
        least often, of several the oldest.
        """
        recent = [
            (note.tried, age, name, note.stored)
            for age, (name, note) in enumerate(notes.items())
            if note.stored is not None and step - note.stored[0] <= self._memory.oldest
        ]
        if not recent:
            return task
        _, _, name, stored = min(recent)
        return without_note(task, name, self._first, stored)

    def _read(
        self, step: int, before: Mapping[tuple[str, str], dict[str, Note]]
    ) -> dict[tuple[str, str], dict[str, Note]]:
        """The notes after a step, whose groups change them in order."""
        after = dict(before)
        for item in self._store.items(step):
            group = self._store.record(step, item.number).group
            scope = scope_of(group.task)
            place = step, item.number
            notes = self._rule.after(group, self._tools, after.get(scope, {}), place)
            if notes:
                after[scope] = notes
            else:
                after.pop(scope, None)
        return after


def notes_after(
    group: Group, tools: Mapping[str, Tool], before: Mapping[str, str]
) -> dict[str, str]:
    """The notes of a group's scope after it: its trajectories and calls change them in order.

    tools: by name; those without ``notes`` change none. before: the notes before it.
    """
    notes = {name: Note(text) for name, text in before.items()}
    return {name: note.text for name, note in Calls().after(group, tools, notes).items()}
