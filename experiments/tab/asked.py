"""What a simulated programmer does with the suggestion of an episode, and the reward for it.

It is paid as people's decisions are (``rl_code.feedback.rewards.tab``).
"""

from __future__ import annotations

import dataclasses
import hashlib

from rl_code.feedback.rewards.tab import Tab
from rl_code.people.fit import embedded
from rl_code.people.programmer import NAMED, Programmer
from rl_code.rewards.finished import FinishedEpisode
from rl_code.tasks import infill
from rl_code.types import Task, Trajectory

# What is paid, and above which chance of acceptance showing pays.
PAID = Tab()


def suggested(trajectory: Trajectory) -> str:
    """The text that an episode suggests; "" for nothing."""
    for turn in trajectory.turns:
        for call in turn.calls:
            if call.name == "suggest" and not call.error:
                return call.arguments["text"]
    return ""


@dataclasses.dataclass(frozen=True)
class Asked:
    """A signal: 0.75 for an accepted suggestion, -0.25 for a rejected one, 0 for none."""

    # Which simulator: a key of ``rl_code.people.programmer.NAMED``.
    habits: str = "recorded"
    # How many different persons there are; each task is one person's.
    people: int = 64
    # Another seed gives other persons.
    seed: int = 0

    def __post_init__(self) -> None:
        if self.habits not in NAMED:
            raise ValueError(f"habits={self.habits!r} must be one of {', '.join(NAMED)}")
        if self.people < 1:
            raise ValueError(f"people={self.people} must be at least 1")

    def __call__(self, episode: FinishedEpisode) -> float:
        text = suggested(episode.trajectory)
        if not text.strip():
            return 0.0
        history = f"{episode.task.id}/{episode.trajectory.index}"
        person = self._person(episode.task, history)
        before, _ = infill.around(episode.task)
        reaction = person.react(before, text, episode.task.meta["wanted"])
        return PAID.accepted if reaction.accepted else PAID.rejected

    def chance(self, task: Task, text: str) -> float:
        """The chance that the person of a task accepts a text."""
        before, _ = infill.around(task)
        return self._person(task, "").chance(before, text, task.meta["wanted"])

    def _person(self, task: Task, history: str) -> Programmer:
        digest = hashlib.sha256(f"{self.seed}/{task.id}".encode()).digest()
        number = int.from_bytes(digest[:8], "big") % self.people
        return Programmer(embedded(), NAMED[self.habits], f"{self.seed}/{number}", history)
