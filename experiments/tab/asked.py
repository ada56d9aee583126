"""Decision of a simulated programmer about the suggestion of an episode, and the reward for it.

It is paid as people's decisions are (``people.feedback.rewards.tab``).

How good people take a match to be, and how lenient they are, is calibrated on the suggestions of
the model after its warm start: of these the programmers as recorded accept the recorded share
(``python -m experiments.tab.calibrate``).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

from people.feedback.rewards.tab import Tab
from people.simulated.fit import embedded
from people.simulated.programmer import NAMED, Programmer, Reading
from rl_code.environment.finished import FinishedEpisode
from rl_code.environment.tools.suggest import around
from rl_code.types import Task, Trajectory

# What is paid, and above which chance of acceptance showing pays.
PAID = Tab()
# What experiments.tab.calibrate wrote.
CALIBRATED = Path(__file__).parent / "reading.json"


@functools.cache
def calibrated() -> Reading:
    """Reader of matches from the file."""
    fields = json.loads(CALIBRATED.read_text())
    return Reading(tuple(fields["matches"]), fields["leniency"])


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

    # Which simulator: a key of ``people.simulated.programmer.NAMED``.
    habits: str = "recorded"
    # How many different persons there are; each task is one person's.
    people: int = 64
    # Another seed gives other persons.
    seed: int = 0
    # Whether matches are read as calibrated; else a match is its own rank.
    calibrate: bool = True

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
        before, _ = around(episode.task)
        reaction = person.react(before, text, episode.task.meta["wanted"])
        return PAID.accepted if reaction.accepted else PAID.rejected

    def chance(self, task: Task, text: str) -> float:
        """The chance that the person of a task accepts a text."""
        before, _ = around(task)
        return self._person(task, "").chance(before, text, task.meta["wanted"])

    def expected(self, task: Task, text: str) -> float:
        """Average reward of a suggestion; 0 for nothing."""
        if not text.strip():
            return 0.0
        chance = self.chance(task, text)
        return PAID.accepted * chance + PAID.rejected * (1 - chance)

    def _person(self, task: Task, history: str) -> Programmer:
        digest = hashlib.sha256(f"{self.seed}/{task.id}".encode()).digest()
        number = int.from_bytes(digest[:8], "big") % self.people
        reading = calibrated() if self.calibrate else Reading()
        habits = NAMED[self.habits]
        return Programmer(embedded(), habits, f"{self.seed}/{number}", history, reading)
