"""Simulated programmers who carry a change through several files, and are shown where to go next.

They know which places their change still needs (``tasks.jumps``), and in which order they would go
there. A jump to the next one is taken most often, to a later one less often, and to a line that
needs nothing hardly ever: only by somebody hasty, who goes there and finds nothing to do. How much
persons differ (in logits) and how long they take to decide are fitted on people who were shown
suggestions (``simulated.fit``). The rates below are assumed: nothing is recorded of people who were
shown jumps.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import scipy  # reads scipy.special when it is first used

from people.simulated.fit import Fit
from people.simulated.telemetry import Seen
from rl_code.config.read_config import shares


@dataclasses.dataclass(frozen=True)
class JumpHabits:
    """One kind of programmer. Shares are chances of a person of average effect."""

    # Chance to take a jump to the place where they would go next.
    next: float = 0.9
    # Chance to take one to another place that they still have to edit.
    later: float = 0.75
    # Chance to take one to a line that needs nothing.
    wrong: float = 0.02
    # Factor on how much persons differ from each other.
    persons: float = 1.0
    # Factor on the seconds until the decision.
    pace: float = 1.0
    # Chances that an event of theirs comes late, never, or twice.
    late: float = 0.1
    lost: float = 0.02
    twice: float = 0.05

    def __post_init__(self) -> None:
        shares(self, "next", "later", "wrong", "late", "lost", "twice")
        if not 0 <= self.persons < math.inf:
            raise ValueError(f"persons={self.persons} must be at least 0 and finite")
        if not 0 < self.pace < math.inf:
            raise ValueError(f"pace={self.pace} must be above 0 and finite")


# Kinds that differ: what is learned on one may not hold on another.
JUMP_HABITS: dict[str, JumpHabits] = {
    "usual": JumpHabits(),
    # Reads the line before going there.
    "careful": JumpHabits(next=0.85, later=0.6, wrong=0.0, pace=1.5),
    # Goes first and reads then.
    "hasty": JumpHabits(next=0.95, later=0.9, wrong=0.15, pace=0.4),
    # Follows an order of their own.
    "orderly": JumpHabits(next=0.9, later=0.3, wrong=0.01),
}


class Jumper:
    """One simulated person. Two with the same arguments do the same, in the same order of calls."""

    def __init__(self, fit: Fit, habits: JumpHabits, seed: int | str, history: str = ""):
        """seed: which person. history: the same person decides otherwise after another history."""
        self.habits = habits
        self._timing = fit.timing
        rng = random.Random(f"jumper/{seed}")
        self._leaning = rng.gauss(0.0, habits.persons * fit.acceptance.person_scale)
        self._slowness = rng.gauss(0.0, habits.persons * fit.timing.person_scale)
        self._rng = random.Random(f"jumper/{seed}/{history}")

    def takes(self, place: str, remaining: Sequence[str]) -> bool:
        """True if the person takes a jump.

        place: such as views.py:4. remaining: the places that still have to be edited, in the
        order in which the person would go there.
        """
        return self._rng.random() < self.chance(place, remaining)

    def chance(self, place: str, remaining: Sequence[str]) -> float:
        """The chance that ``takes`` is True."""
        habits = self.habits
        if place not in remaining:
            share = habits.wrong
        else:
            share = habits.next if place == remaining[0] else habits.later
        # what nobody of a kind does, no person of it does, and the same for what all do
        if share in (0.0, 1.0):
            return share
        return float(scipy.special.expit(scipy.special.logit(share) + self._leaning))

    def seconds(self, page: str, place: str) -> float:
        """Seconds from the showing of a jump to the decision, as of a suggestion of this length."""
        log_s = self._timing.log_mean(Seen.of(page, place, None)) + self._slowness
        noise = self._timing.posterior.noise * self._rng.gauss(0.0, 1.0)
        return math.exp(log_s + noise) * self.habits.pace
