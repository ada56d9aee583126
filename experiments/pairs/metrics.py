"""Metrics of pairs: whether both tasks are solved, and what is stored and read in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.pairs.source import FIRST, MODULE, SECOND, WANTED
from rl_code.environment.notes import as_read_by, notes_of
from rl_code.types import Group, Trajectory


@dataclasses.dataclass(frozen=True)
class OfPairs:
    """Shares of the episodes of a step, by task of the pair; none of a task that the step lacks.

    pairs/solved_first, pairs/solved_second: solved; of second tasks by those that read all notes
    (``memory.left_out``). pairs/stored, pairs/stored_wanted: of first
    tasks, those that stored a note, and one of what the second task asks for. pairs/there: of
    second tasks, those whose notes tell what they ask for. pairs/notes: notes of a second task.
    """

    def __call__(self, groups: Sequence[Group], learner: Mapping[str, float]) -> dict[str, float]:
        shown = [group for group in groups if group.task.meta["kind"] == FIRST]
        firsts = [t for group in shown for t in group.trajectories]
        seconds = [group for group in groups if group.task.meta["kind"] == SECOND]
        found: dict[str, list[float]] = {
            "pairs/solved_first": [t.solved for t in firsts],
            "pairs/stored": [bool(stored(t)) for t in firsts],
            "pairs/stored_wanted": [WANTED in stored(t) for t in firsts],
            "pairs/copied": [
                text in group.task.files[MODULE].split("\n")
                for group in shown
                for t in group.trajectories
                for text in stored(t).values()
            ],
            "pairs/solved_second": [
                t.solved
                for group in seconds
                for t in group.trajectories
                if notes_of(as_read_by(group.task, t.index)) == notes_of(group.task)
            ],
            "pairs/there": [WANTED in notes_of(group.task) for group in seconds],
            "pairs/notes": [len(notes_of(group.task)) for group in seconds],
        }
        return {name: float(np.mean(values)) for name, values in found.items() if values}


def stored(trajectory: Trajectory) -> dict[str, str]:
    """Name -> text of the notes that the calls of an episode stored."""
    return {
        str(call.arguments.get("name")): str(call.arguments.get("text"))
        for turn in trajectory.turns
        for call in turn.calls
        if call.name == "memory_store" and not call.error
    }
