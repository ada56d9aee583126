"""Reward of an episode that may ask before it edits, and how often episodes ask and edit.

Two rewards. One is made of edits alone, so that an episode without an edit earns nothing: whoever
expects to fail does best to ask, and ask again. The other judges every episode by the edit that it
ends with, and one without an edit as a failed one, so that deferring avoids no risk; and a question
costs the person's time, as in ``people.feedback.rewards.asked``. Then asking pays where what is
learned from the answer is worth more than that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.incidents.tasks import by_clarity
from rl_code.environment.finished import FinishedEpisode
from rl_code.types import Group, Trajectory

ASK = "ask"


@dataclasses.dataclass(frozen=True)
class Edited:
    """A signal: 1 for an edit that is right, and less than nothing for one that is wrong."""

    # What a wrong edit earns: the person has to find and undo it.
    wrong: float = -1.0
    # What an episode earns that hands no edit in.
    without: float = 0.0
    # What a question costs on a task that is clear, and on one that is not.
    clear: float = 0.0
    unclear: float = 0.0

    def __post_init__(self) -> None:
        if not self.wrong < 0:
            raise ValueError(f"wrong={self.wrong} must be below 0")
        for name in ("clear", "unclear"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least 0: it is taken away"
                )

    def __call__(self, episode: FinishedEpisode) -> float:
        cost = self.clear if episode.task.meta["clear"] else self.unclear
        paid = -cost * questions(episode.trajectory)
        if not episode.grade.submitted:
            return paid + self.without
        return paid + (1.0 if episode.grade.solved else self.wrong)


def questions(trajectory: Trajectory) -> int:
    """Rate at which an episode asks."""
    return sum(
        call.name == ASK and not call.error for turn in trajectory.turns for call in turn.calls
    )


@dataclasses.dataclass(frozen=True)
class Questions:
    """Shares of a step's episodes that edit, that ask, and that solve their task:
    questions/edits_clear, questions/asks_clear and questions/solved_clear of tasks that say all
    that is wanted, and the same names with ``unclear`` of the others.
    """

    def __call__(self, groups: Sequence[Group], learner: Mapping[str, Any]) -> Mapping[str, float]:
        found = {}
        for name, ones in by_clarity(groups):
            shares = {
                "edits": [one.status == "submitted" for one in ones],
                "asks": [questions(one) > 0 for one in ones],
                "solved": [one.solved for one in ones],
            }
            found |= {
                f"questions/{what}_{name}": float(np.mean(values))
                for what, values in shares.items()
            }
        return found
