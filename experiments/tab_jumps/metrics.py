"""Metrics of each step, on the trajectories that it trains on. Each task is used once, so these are
measured on tasks that the policy has not seen, of the kinds of change that it is trained on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.tab.asked import suggested
from experiments.tab_jumps.asked import AskedToJump, shown
from rl_code.types import Group


def counts(groups: Sequence[Group], asked: AskedToJump) -> np.ndarray:
    """float64 [episodes, 7]: whether a jump was shown, taken, right (to a place that still has to
    be edited), right and in another file than the last edit; whether there was a place at all;
    whether nothing was shown and there was none; whether the answer could not be read.

    asked: the people who take jumps.
    """
    pairs = [(group.task, one) for group in groups for one in group.trajectories]
    rows = np.zeros((len(pairs), 7))
    for row, (task, one) in zip(rows, pairs, strict=True):
        place, remaining = shown(task, one), task.meta["remaining"]
        row[4] = bool(remaining)
        if place is None:
            row[5] = not remaining
            row[6] = bool(suggested(one).strip())
            continue
        row[0] = True
        row[1] = asked.paid(task, one) > 0
        row[2] = str(place) in remaining
        row[3] = str(place) in remaining and place.path != task.meta["here"]
    return rows


def shares(rows: np.ndarray) -> dict[str, float]:
    """Metrics of such rows; those of which there is nothing to divide by are left out."""
    each, total = rows.sum(axis=0), len(rows)
    found = {
        "shown": each[0] / total,
        "taken": each[1] / total,
        "right": (each[2] + each[5]) / total,
        "unreadable": each[6] / total,
    }
    if each[0]:
        found["taken_of_shown"] = each[1] / each[0]
        found["right_of_shown"] = each[2] / each[0]
        found["other_file_of_shown"] = each[3] / each[0]
    if each[4]:
        found["found"] = each[2] / each[4]
    if total > each[4]:
        found["needless"] = (total - each[4] - each[5]) / (total - each[4])
    return {name: float(value) for name, value in found.items()}


@dataclasses.dataclass(frozen=True)
class TabJumps:
    """Metrics of a step's episodes:

    tab_jumps/shown, taken: share that shows a jump, and whose jump is taken; taken_of_shown,
      right_of_shown, other_file_of_shown: of those shown, taken, to a place that still has to be
      edited, and to one in another file than the last edit.
    tab_jumps/found: share that shows a right place where there is one. needless: share that shows
      something where there is none. right: share that does the right thing of the two.
    tab_jumps/unreadable: share whose answer names no line of an open file, so that nothing is
      shown.
    """

    # The people, as in the reward.
    asked: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, groups: Sequence[Group], learner: Mapping[str, Any]) -> Mapping[str, float]:
        found = shares(counts(groups, AskedToJump(**self.asked)))
        return {f"tab_jumps/{name}": value for name, value in found.items()}
