"""Simulated programmers: people drawn from a fit, with habits that differ.

The recorded decisions do not say which text a programmer had in mind. They say how confident the
model was, and a suggestion of a confident model is more often the right one. So a simulated
programmer compares a suggestion with the text that is wanted, and what the fit says about
confidence is read as being about that match: the match is taken as a quantile of the recorded
confidences. A model's own confidence is not seen by a simulated programmer, and so cannot be raised
to please one.

Two texts of one language agree in most of their tokens even where they mean different things, so a
match of 0.9 may be a poor suggestion. A ``Reading`` says how good a match is among those that
people are shown. With it, what is accepted of them has the recorded rate.
"""

from __future__ import annotations

import bisect
import dataclasses
import difflib
import itertools
import math
import random
import re

import scipy  # reads scipy.special when it is first used

from people.feedback.records import HORIZONS_S
from people.simulated.fit import Fit
from people.simulated.telemetry import LOOKED_AT_S, Seen

_TOKEN = re.compile(r"\w+|[^\w\s]")
# Quantiles of the standard normal that stand for all times to decide.
_TIMES = (-1.28, -0.52, 0.0, 0.52, 1.28)
# Place among the recorded looks of the last one before each horizon. Nothing is recorded after ten
# minutes, so a text that is alive then is taken to be alive after an hour.
LAST_LOOK = tuple(bisect.bisect(LOOKED_AT_S, horizon_s) - 1 for horizon_s in HORIZONS_S)
# What a person who wants another text than the one in the file sees: at most this match.
_ELSEWHERE = 0.5


@dataclasses.dataclass(frozen=True)
class Habits:
    """Differences between a kind of programmer and those that were recorded."""

    # Logits added for a suggestion that is exactly what is wanted; as many are taken away for one
    # that has nothing of it.
    taste: float = 0.0
    # Logits added whatever is suggested.
    leniency: float = 0.0
    # Logits added for each doubling of the suggestion's length.
    length: float = 0.0
    # Chance that a decision is the toss of a coin.
    noise: float = 0.0
    # Chance that the person has another text in mind than the one that is wanted.
    ambiguity: float = 0.0
    # Factor on the seconds until the decision.
    pace: float = 1.0
    # Factor on how much persons differ from each other.
    persons: float = 1.0
    # Share of what is alive of an accepted text that such a person also edits away at once.
    rewriting: float = 0.0

    def __post_init__(self) -> None:
        for name in ("noise", "ambiguity", "rewriting"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1]")
        if not (0 < self.pace < math.inf and 0 <= self.persons < math.inf):
            raise ValueError(f"pace={self.pace} must be above 0, persons={self.persons} at least 0")


# Simulators that differ: what is learned on one may not hold on another.
NAMED: dict[str, Habits] = {
    "recorded": Habits(),
    "exacting": Habits(taste=2.0, leniency=-0.5, pace=1.3),
    # Of what the warm-started model of configs/tab.py shows they accept as much as those recorded,
    # but more of it is right: a confidence says less about that than the wanted text does.
    "particular": Habits(taste=4.0, leniency=-1.15),
    # Two organisations: one wants the rest of a line, the other one whole lines.
    "brief": Habits(taste=4.0, leniency=-1.15, length=-2.5),
    "thorough": Habits(taste=4.0, leniency=-1.15, length=2.5),
    "lenient": Habits(leniency=1.0, rewriting=0.3),
    "picky": Habits(taste=2.0, leniency=-3.0),
    "terse": Habits(taste=0.5, length=-0.5),
    "noisy": Habits(noise=0.3),
    "hasty": Habits(pace=0.3, noise=0.1),
    "undecided": Habits(ambiguity=0.3, rewriting=0.15),
    "diverse": Habits(persons=3.0),
}


@dataclasses.dataclass(frozen=True)
class Reading:
    """Scale by which people who are shown the suggestions of one model read a match."""

    # Quantiles of the matches of these suggestions, evenly spaced from the least to the greatest; a
    # match counts as its rank among them. () where a match is its own rank.
    matches: tuple[float, ...] = ()
    # Logits added for everybody, so that the share accepted of these suggestions is the recorded
    # one.
    leniency: float = 0.0

    def __post_init__(self) -> None:
        ordered = all(0 <= a <= b <= 1 for a, b in itertools.pairwise(self.matches))
        if len(self.matches) == 1 or not ordered:
            raise ValueError(f"matches={self.matches} must be two or more rising shares, or none")

    def rank(self, agreed: float) -> float:
        """The rank of a match, 0 to 1; the middle of the ranks of those that are equal to it."""
        if not self.matches:
            return agreed
        last = len(self.matches) - 1
        below, above = bisect.bisect_left(self.matches, agreed), bisect.bisect(self.matches, agreed)
        if below < above:
            return (below + above - 1) / 2 / last
        if not 0 < below <= last:
            return float(below > 0)
        low, high = self.matches[below - 1 : below + 1]
        return (below - 1 + (agreed - low) / (high - low)) / last


@dataclasses.dataclass(frozen=True)
class Reaction:
    """Reaction of a programmer to one suggestion."""

    # Seconds from the showing to the decision.
    seconds: float
    accepted: bool
    # (seconds after the acceptance, share of the text that is alive); empty if it was rejected.
    alive: tuple[tuple[float, float], ...]


def match(suggestion: str, wanted: str) -> float:
    """Agreement of two texts, 0 to 1: by the common runs of their tokens (2 M / T). White space
    does not count.
    """
    a, b = _TOKEN.findall(suggestion), _TOKEN.findall(wanted)
    if not a or not b:
        return float(a == b)
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()


class Programmer:
    """One simulated person. Two with the same arguments do the same, in the same order of calls."""

    def __init__(
        self,
        fit: Fit,
        habits: Habits,
        seed: int | str,
        history: str = "",
        reading: Reading = Reading(),
    ):
        """seed: which person. history: the same person decides otherwise after another history."""
        self._fit = fit
        self._habits = habits
        self._reading = reading
        self._rng = random.Random(f"programmer/{seed}")
        scale = habits.persons
        self._leaning = self._rng.gauss(0.0, scale * fit.acceptance.person_scale)
        self._slowness = self._rng.gauss(0.0, scale * fit.timing.person_scale)
        if history:
            self._rng = random.Random(f"programmer/{seed}/{history}")

    def react(self, before: str, suggestion: str, wanted: str) -> Reaction:
        """Decides about a suggestion.

        before: the text in front of the cursor. wanted: what the person is about to write.
        """
        habits, rng = self._habits, self._rng
        agreed = self._reading.rank(match(suggestion, wanted))
        if rng.random() < habits.ambiguity:
            agreed = min(agreed, _ELSEWHERE * rng.random())
        seen = Seen.of(before, suggestion, self._fit.confidence(agreed))
        seconds = self._seconds(seen, rng.gauss(0.0, 1.0))
        accepted = rng.random() < self._chance(seen, agreed, seconds)
        if rng.random() < habits.noise:
            accepted = rng.random() < 0.5
        if not accepted:
            return Reaction(seconds, False, ())
        kept = 1 - habits.rewriting
        drawn = self._fit.survival.draw(rng)
        shares = [kept * drawn[place] for place in LAST_LOOK]
        return Reaction(seconds, True, tuple(zip(HORIZONS_S, shares, strict=True)))

    def chance(self, before: str, suggestion: str, wanted: str) -> float:
        """The chance that ``react`` accepts, over the times to decide and its own habits."""
        habits = self._habits
        exact = self._reading.rank(match(suggestion, wanted))

        def at(agreed: float) -> float:
            seen = Seen.of(before, suggestion, self._fit.confidence(agreed))
            chances = [self._chance(seen, agreed, self._seconds(seen, z)) for z in _TIMES]
            return sum(chances) / len(chances)

        chance = at(exact)
        if habits.ambiguity:
            elsewhere = [at(min(exact, _ELSEWHERE * (i + 0.5) / 5)) for i in range(5)]
            chance += habits.ambiguity * (sum(elsewhere) / 5 - chance)
        return (1 - habits.noise) * chance + habits.noise / 2

    def _seconds(self, seen: Seen, z: float) -> float:
        timing = self._fit.timing
        log_s = timing.log_mean(seen) + self._slowness + timing.posterior.noise * z
        return math.exp(log_s) * self._habits.pace

    def _chance(self, seen: Seen, agreed: float, seconds: float) -> float:
        habits = self._habits
        # the fit knows times at the pace of the recorded people
        score = self._fit.acceptance.logit(seen, seconds / habits.pace) + self._leaning
        score += self._reading.leniency + habits.leniency + habits.taste * (2 * agreed - 1)
        score += habits.length * math.log2(seen.characters / 16)
        return float(scipy.special.expit(score))
