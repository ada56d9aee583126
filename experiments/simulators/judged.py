"""Payments of simulated programmers of several kinds for the same suggestions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.tab.asked import Asked, suggested
from rl_code.types import Group


@dataclasses.dataclass(frozen=True)
class Judged:
    """Metrics of a step's episodes, on tasks that the policy has not seen:

    judged/<habits>: the mean pay that is expected of a programmer of these habits. It is the chance
      of acceptance that is averaged, not decisions, so that it has less noise.
    judged/shown: share that shows something; judged/shown_unknowable the same, where the wanted
      text cannot be known.
    """

    # The judges: keys of ``people.simulated.programmer.NAMED``. The rest is as for ``Asked``.
    habits: tuple[str, ...]
    people: int = 64
    seed: int = 0

    def __call__(self, groups: Sequence[Group], learner: Mapping[str, Any]) -> Mapping[str, float]:
        pairs = [(group.task, suggested(one)) for group in groups for one in group.trajectories]
        shown = np.array([bool(text.strip()) for _, text in pairs])
        unknowable = np.array([not task.meta["stated"] for task, _ in pairs])
        found = {"judged/shown": float(shown.mean())}
        if unknowable.any():
            found["judged/shown_unknowable"] = float(shown[unknowable].mean())
        for habits in self.habits:
            judge = Asked(habits, self.people, self.seed)
            pays = [judge.expected(task, text) for task, text in pairs]
            found[f"judged/{habits}"] = float(np.mean(pays))
        return found
