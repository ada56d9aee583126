"""Decision of a simulated programmer about the jump of an episode, and the reward for it: paid as
people's decisions about suggestions are (``people.feedback.rewards.tab``).
"""

from __future__ import annotations

import dataclasses
import hashlib

from experiments.tab.asked import PAID, suggested
from people.simulated.fit import embedded
from people.simulated.jumper import JUMP_HABITS, Jumper
from rl_code.environment.finished import FinishedEpisode
from rl_code.tasks.jump_page import Place
from rl_code.tasks.jumps import place_of
from rl_code.types import Task, Trajectory


def shown(task: Task, trajectory: Trajectory) -> Place | None:
    """The place that an episode showed; None for nothing. An editor shows nothing for an answer
    that names no line of an open file.
    """
    return place_of(task, suggested(trajectory))


@dataclasses.dataclass(frozen=True)
class AskedToJump:
    """A signal: 0.75 for a jump that is taken, -0.25 for one that is not, 0 for none."""

    # Kind of programmer: a key of ``people.simulated.jumper.JUMP_HABITS``.
    habits: str = "usual"
    # Number of persons; each task is one person's.
    people: int = 64
    # Another seed gives other persons.
    seed: int = 0

    def __post_init__(self) -> None:
        if self.habits not in JUMP_HABITS:
            raise ValueError(f"habits={self.habits!r} must be one of {', '.join(JUMP_HABITS)}")
        if self.people < 1:
            raise ValueError(f"people={self.people} must be at least 1")

    def __call__(self, episode: FinishedEpisode) -> float:
        return self.paid(episode.task, episode.trajectory)

    def paid(self, task: Task, trajectory: Trajectory) -> float:
        """Reward of an episode; the same each time."""
        place = shown(task, trajectory)
        if place is None:
            return 0.0
        digest = hashlib.sha256(f"{self.seed}/{task.id}".encode()).digest()
        number = int.from_bytes(digest[:8], "big") % self.people
        habits, history = JUMP_HABITS[self.habits], f"{task.id}/{trajectory.index}"
        person = Jumper(embedded(), habits, f"{self.seed}/{number}", history)
        taken = person.takes(str(place), task.meta["remaining"])
        return PAID.accepted if taken else PAID.rejected
