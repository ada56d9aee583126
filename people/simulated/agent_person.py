"""A simulated person who reads an agent's work and decides what becomes of it.

All that is decided follows from what the agent did: its change, whether the person's own tests pass
on it, and whether it is right. The last is known to a person who reads with care, or finds out
later. How content the person truly is, 0 to 1, is part of the decision and no part of the events.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping
from typing import Any

import scipy  # reads scipy.special when it is first used

from people.feedback.records import HORIZONS_S
from people.feedback.rewards.follow_up_data import messages
from people.simulated.agent_habits import AgentHabits
from people.simulated.changes import Change, Files, renamed
from people.simulated.fit import Fit
from people.simulated.programmer import LAST_LOOK
from people.simulated.telemetry import Seen

# Chances that the persons of a kind differ in.
_OWN = ("tests", "care", "mends", "reverts", "talks", "opens", "votes")
# Events of a person who looks only hours later.
_LATE = ("accepted", "rejected", "retained", "merged", "left")
# Part of the satisfaction with a right change that goes with each thing that had to be done about
# it: trimmed, renamed, tested; and with a question about a clear task. Assumed.
_TASTE = 0.2
# Satisfaction with a wrong change that was found at once and mended by hand, and with an attempt
# that came to nothing. One that was kept and found out later is worth 0. Assumed.
_MENDED, _NOTHING = 0.35, 0.15


@dataclasses.dataclass(frozen=True)
class Turn:
    """Work of the agent between two messages of the person, as the person finds it."""

    # Ids of the answers that made it, and of those that asked something.
    answers: tuple[str, ...]
    questions: tuple[str, ...]
    change: Change
    # Files as the person would have written them.
    wanted: Files
    handed_in: bool
    # True if the want could be read in more than one way.
    ambiguous: bool
    # True if the agent has run the tests; None if it has no tool for that.
    tested: bool | None
    # Whether the change passes the person's own tests, and all tests that decide.
    passes: bool
    right: bool


@dataclasses.dataclass(frozen=True)
class Happened:
    """Reaction to answers: an event without its key, by seconds after the end of the turn."""

    answers: tuple[str, ...]
    kind: str
    after_s: float
    value: float | None = None
    horizon_s: float | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Decision:
    """Decision of a person about a turn."""

    happened: tuple[Happened, ...]
    # The files as the person leaves them, and whether the want is done.
    files: Files
    done: bool
    # Words for the agent; "" where the person says nothing.
    says: str
    # A disappointment: nothing of the turn was of use.
    disappointed: bool
    # True satisfaction with the turn, 0 to 1. It is never sent.
    satisfaction: float


class AgentPerson:
    """One person. Two with the same arguments do the same, in the same order of calls."""

    def __init__(self, fit: Fit, habits: AgentHabits, seed: int | str, history: str = ""):
        """seed: which person. history: the same person decides otherwise after another history."""
        self._fit = fit
        rng = random.Random(f"agent person/{seed}")
        scale = habits.persons * fit.acceptance.person_scale
        own = {name: _moved(getattr(habits, name), rng.gauss(0.0, scale)) for name in _OWN}
        self.habits = dataclasses.replace(habits, **own)
        self._slowness = rng.gauss(0.0, habits.persons * fit.timing.person_scale)
        self._rng = random.Random(f"agent person/{seed}/{history}")

    def decide(self, turn: Turn, attempt: int) -> Decision:
        """Decide about a turn. attempt: how often the want was asked for before."""
        needless = turn.questions and not turn.ambiguous
        seconds = self._seconds(turn.change)
        # what is asked is seen, and the person knows whether it was unclear
        asked = Happened(turn.questions, "shown", 0.0, 0.0, extra={"ambiguous": turn.ambiguous})
        happened = [asked] if turn.questions else []
        if turn.answers:
            happened.append(Happened(turn.answers, "shown", 0.0, 0.0))
        believed = bool(turn.change.paths) and self._believes(turn)
        decision = self._keeps(turn, seconds) if believed else self._refuses(turn, seconds, attempt)
        voted = self._votes(turn, seconds, believed)
        spent = _TASTE * len(turn.questions) if needless else 0.0
        return dataclasses.replace(
            decision,
            happened=(*happened, *decision.happened, *voted),
            satisfaction=max(decision.satisfaction - spent, 0.0),
        )

    def _believes(self, turn: Turn) -> bool:
        """True if the person takes the change for right: by their own tests, or by reading."""
        habits = self.habits
        tests = self._rng.random() < habits.tests
        read = self._rng.random()
        if tests or (habits.wants_tests and turn.tested is False):
            return turn.passes
        return read >= habits.doubt if turn.right else read >= habits.care

    def _keeps(self, turn: Turn, seconds: float) -> Decision:
        """The change is kept, perhaps trimmed or renamed; a mistake in it may be found later."""
        habits, rng, change = self.habits, self._rng, turn.change
        files = self._tidied(turn)
        taste = (files != change.after) + bool(habits.wants_tests and turn.tested is False)
        answers = turn.answers
        happened = [Happened(answers, "accepted", seconds, seconds)]
        edited = 1.0 - change.alive(files)
        if edited:
            happened.append(Happened(answers, "edited", seconds + 60.0, edited))
        later = dict(turn.wanted) if not turn.right and rng.random() < habits.finds else files
        drawn = self._fit.survival.draw(rng)
        works_on = rng.random() < habits.goes_on
        for place, horizon_s in zip(LAST_LOOK, HORIZONS_S, strict=True):
            now = later if horizon_s == HORIZONS_S[-1] else files
            share = change.alive(now) * (drawn[place] if works_on else 1.0)
            happened.append(Happened(answers, "retained", seconds + horizon_s, share, horizon_s))
        if turn.passes and rng.random() < habits.opens:
            happened.append(Happened(answers, "opened", seconds + 900.0, 1.0))
            if turn.right and change.lines <= habits.merged_lines:
                happened.append(Happened(answers, "merged", seconds + 7_200.0, 1.0))
        content = 1.0 - _TASTE * taste if turn.right else 0.0
        return Decision(
            tuple(happened), files, True, "", not turn.right and later != files, content
        )

    def _tidied(self, turn: Turn) -> Files:
        """The files of a change as the person likes them: as few lines, and names as long."""
        habits, change = self.habits, turn.change
        files = dict(change.after)
        needed = Change(change.before, turn.wanted).lines
        if turn.right and change.lines > needed + habits.spare_lines:
            files = dict(turn.wanted)
        if habits.shortest_name > 1:
            for path in change.paths:
                if path in files:
                    files[path] = renamed(files[path], habits.shortest_name)
        return files

    def _refuses(self, turn: Turn, seconds: float, attempt: int) -> Decision:
        """The change is not kept as it is: it is mended by hand, or taken back, and the person asks
        again or does the work.
        """
        habits, rng, change = self.habits, self._rng, turn.change
        mends, reverts, talks = (rng.random() for _ in range(3))
        # an agent that only asks has given nothing else
        answers = turn.answers or turn.questions
        if change.paths and mends < habits.mends:
            share = change.alive(turn.wanted)
            happened = [
                Happened(answers, "accepted", seconds, seconds),
                Happened(answers, "edited", seconds + 120.0, 1.0 - share),
                *(
                    Happened(answers, "retained", seconds + horizon_s, share, horizon_s)
                    for horizon_s in HORIZONS_S
                ),
            ]
            return Decision(tuple(happened), turn.wanted, True, "", False, _MENDED)
        gives_up = attempt >= habits.patience
        happened = [Happened(answers, "rejected", seconds, seconds)]
        files: Files = change.after
        if change.paths and (gives_up or reverts < habits.reverts):
            files = turn.wanted if gives_up else change.before
            happened.append(Happened(answers, "reverted", seconds + 5.0, 1.0))
        says = self._complaint() if talks < habits.talks else ""
        if says:
            happened.append(Happened(answers, "follow_up", seconds + 10.0, extra={"text": says}))
        return Decision(tuple(happened), files, gives_up, says, True, _NOTHING)

    def _votes(self, turn: Turn, seconds: float, kept: bool) -> list[Happened]:
        habits, rng = self.habits, self._rng
        if rng.random() >= habits.votes or not turn.answers:
            return []
        up = kept if rng.random() < habits.fair else not kept
        return [Happened(turn.answers[-1:], "thumbs", seconds + 3.0, 1.0 if up else -1.0)]

    def _complaint(self) -> str:
        """A message that says that something is wrong, in this person's way."""
        family = self._rng.choice(self.habits.words)
        return messages((family,), 1, self._rng.randrange(2**31))[0].text

    def _seconds(self, change: Change) -> float:
        """Seconds until the decision, by the fit for a suggestion of as many characters."""
        text = "".join(change.after.get(path, "") for path in change.paths)
        timing = self._fit.timing
        log_s = timing.log_mean(Seen.of("", text, None)) + self._slowness
        log_s += timing.posterior.noise * self._rng.gauss(0.0, 1.0)
        return math.exp(log_s) * self.habits.pace


def unhurried(habits: AgentHabits) -> AgentHabits:
    """Habits of the same kind of people where they look only every few hours: all that was done
    meanwhile is run against their own tests.
    """
    return dataclasses.replace(habits, tests=1.0)


def is_late(one: Happened) -> bool:
    """True for what a person who looks only hours later tells: what was kept and how much of it is
    alive at the last horizon, what was refused, and what was merged. No words, votes or early
    looks.
    """
    return one.kind in _LATE and one.horizon_s in (None, HORIZONS_S[-1])


def _moved(chance: float, logits: float) -> float:
    """A chance that is moved in logits; 0 and 1 stay."""
    if chance in (0.0, 1.0):
        return chance
    return float(scipy.special.expit(scipy.special.logit(chance) + logits))
