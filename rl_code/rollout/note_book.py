"""Notes that an episode of a step may read: those that the steps some way before it left.

An episode of step b reads what the episodes of the steps up to b - k - 2 stored and forgot, k being
the bound on staleness. These steps are consumed before any episode of step b can begin, in every
mode. So the notes are a function of the record and of b alone: they do not depend on which actor
samples, on the order in which episodes end, or on when a process was killed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from rl_code.environment.notes import scope_of, with_notes
from rl_code.environment.tools.tool import Tool
from rl_code.store.store import GroupStore
from rl_code.types import Group, Task, ToolCall, Trajectory


class NoteBook:
    """Goes through the record once, step by step, and keeps the notes as they were after each of
    the last steps that may still be asked for.

    tools: by name; those without ``notes`` change none. bound: the bound on staleness.
    """

    def __init__(self, store: GroupStore, tools: Mapping[str, Tool], bound: int):
        self._store = store
        self._tools = {name: tool for name, tool in tools.items() if tool.notes}
        self._lag = bound + 2
        # Notes by scope, after each step. Only those of the last steps are kept.
        self._after: dict[int, dict[tuple[str, str], dict[str, str]]] = {-1: {}}
        self._lock = threading.Lock()

    def task(self, task: Task, step: int) -> Task:
        """The task with the notes that its episodes of a step may read.

        Raises StoreError when the record of the steps before cannot be read.
        """
        if not self._tools:
            return task
        with self._lock:
            last = max(self._after)
            wanted = max(step - self._lag, -1)
            for one in range(last + 1, wanted + 1):
                self._after[one] = self._read(one, self._after[one - 1])
            for old in [one for one in self._after if one < wanted - self._lag]:
                del self._after[old]
            return with_notes(task, self._after[wanted].get(scope_of(task), {}))

    def _read(
        self, step: int, before: Mapping[tuple[str, str], dict[str, str]]
    ) -> dict[tuple[str, str], dict[str, str]]:
        """The notes after a step: its groups, trajectories and calls change them in order."""
        after = dict(before)
        for item in self._store.items(step):
            group = self._store.record(step, item.number).group
            scope = scope_of(group.task)
            notes = notes_after(group, self._tools, after.get(scope, {}))
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
    notes = dict(before)
    for trajectory in group.trajectories:
        for call in _carried_out(trajectory):
            if call.name in tools and tools[call.name].notes:
                tools[call.name].note(call.arguments, notes)
    return notes


def _carried_out(trajectory: Trajectory) -> Iterator[ToolCall]:
    """The calls of an episode that did what they were asked to, in order."""
    for message, told in zip(trajectory.turns, trajectory.turns[1:], strict=False):
        if message.role == "assistant" and told.role == "tool":
            for call, result in zip(message.calls, told.results, strict=False):
                if result.ok and not call.error:
                    yield call
