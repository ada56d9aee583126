"""Habits of people who work with an agent: how they check, what they like, when they have enough.

No recording of such people is at hand, so the rates below are assumed. Three are fitted, on people
who were shown suggestions (``simulated.fit``): how much persons differ from each other (in logits),
how long they take to decide, and how much of a text that was kept is alive later.
"""

from __future__ import annotations

import dataclasses
import math

from people.feedback.rewards.follow_up_data import DISSATISFIED
from rl_code.config.read_config import at_least, shares


@dataclasses.dataclass(frozen=True)
class AgentHabits:
    """One kind of person. All fields are assumed; shares are chances of a person of average
    effect.
    """

    # --- care in reading
    # Chance of running one's own tests on a change.
    tests: float = 0.5
    # Without them: chance to see that a wrong change is wrong, and to take a right one for wrong.
    care: float = 0.6
    doubt: float = 0.05
    # Chance that a wrong change that was kept is found, and replaced, within the hour.
    finds: float = 0.7
    # --- patience
    # Times that the same want is asked for again.
    patience: int = 2
    # Disappointments in a row after which another model is asked, and after which one leaves.
    switches: int = 2
    leaves: int = 5
    # --- what is done about a wrong change
    # Chance to mend it by hand; to take it back before asking again; to say something at all.
    mends: float = 0.25
    reverts: float = 0.7
    talks: float = 0.8
    # Families of words of a complaint (``follow_up_data.DISSATISFIED``). The classifier of rewards
    # has never seen some of them.
    words: tuple[str, ...] = tuple(DISSATISFIED)
    # --- taste
    # Lines of a diff beyond those that are needed; more are trimmed by hand.
    spare_lines: int = 4
    # Names of variables with fewer characters are replaced.
    shortest_name: int = 1
    # A change without a run of the tests, where the agent has a tool for it, is always tested.
    wants_tests: bool = False
    # --- pull requests
    # Chance to open one for a change that passes one's own tests, and the most lines of a diff that
    # others merge.
    opens: float = 0.5
    merged_lines: int = 12
    # --- votes: chance to vote; and to vote up for what one kept, down for what one did not
    votes: float = 0.1
    fair: float = 0.8
    # --- how they differ
    # Factor on the seconds until a decision, and on how much persons of this kind differ.
    pace: float = 1.0
    persons: float = 1.0
    # Chance that what was kept is worked on further, so that less of it is alive later.
    goes_on: float = 0.2
    # --- the post: chances that an event comes late, never, or twice
    late: float = 0.1
    lost: float = 0.02
    twice: float = 0.05

    def __post_init__(self) -> None:
        shares(self, "tests", "care", "doubt", "finds", "mends", "reverts", "talks", "opens")
        shares(self, "votes", "fair", "goes_on", "late", "lost", "twice")
        at_least(self, patience=0, switches=1, leaves=1, spare_lines=0, merged_lines=0)
        unknown = sorted(set(self.words) - DISSATISFIED.keys())
        if unknown or not self.words:
            raise ValueError(f"words={self.words} must be some of {', '.join(DISSATISFIED)}")
        if not (0 < self.pace < math.inf and 0 <= self.persons < math.inf):
            raise ValueError(f"pace={self.pace} must be above 0, persons={self.persons} at least 0")


# Kinds that differ in habits and taste. What is learned on some may not hold on others.
KINDS: dict[str, AgentHabits] = {
    "steady": AgentHabits(),
    "careful": AgentHabits(tests=0.9, care=0.8, doubt=0.02, pace=1.5, opens=0.7),
    "hurried": AgentHabits(tests=0.1, care=0.35, patience=1, pace=0.4, finds=0.5, leaves=4),
    "terse": AgentHabits(spare_lines=0, merged_lines=6, words=("ignored", "wrong", "doubt")),
    "tester": AgentHabits(tests=0.8, wants_tests=True, opens=0.8, words=("broke", "doubt")),
    "namer": AgentHabits(shortest_name=2, care=0.7, mends=0.5),
    "silent": AgentHabits(talks=0.15, votes=0.02, reverts=0.9, mends=0.4),
    "voter": AgentHabits(votes=0.7, fair=0.6, care=0.4, words=("useless", "still", "undo")),
}
