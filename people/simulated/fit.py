"""Model of programmers' reactions to a suggestion, fitted on recorded decisions.

Three parts, which multiply to the chance of a whole decision:
- the time until the decision is log-normal, with an effect of the person;
- the decision is a logistic regression on confidence, length, place in the line and that time,
  with an effect of the person, and with bends where the plain effects change their slope;
- the share of an accepted text that is alive at five moments has masses at 0 and at 1 and a beta
  density between, and mostly stays what it was at the moment before.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy  # reads scipy.stats when it is first used, which servers and clients never do

from people.simulated.regression import Posterior, fit_linear, fit_logistic, mean_chance
from people.simulated.telemetry import LOOKED_AT_S, Decision, Seen

# Blocks of columns that share a prior scale.
PLAIN, BENDS, PERSONS = 0, 1, 2
_KNOTS = (0.25, 0.5, 0.75)  # quantiles at which a plain effect may change its slope
_QUANTILES = 41


@dataclasses.dataclass(frozen=True)
class Parts:
    """Parts that a regression has besides the constant."""

    plain: bool = True
    bends: bool = True
    persons: bool = True
    # True if the time shown is known; it is not when that time itself is predicted.
    time: bool = True


@dataclasses.dataclass(frozen=True)
class Columns:
    """Turns what was seen into rows of numbers, standardised as on the data it was made from."""

    parts: Parts
    people: tuple[int, ...]
    # Mean and scale of each plain column, and the knots of those that may bend.
    mean: np.ndarray
    scale: np.ndarray
    knots: np.ndarray
    typical: float

    @classmethod
    def of(cls, decisions: Sequence[Decision], parts: Parts) -> Columns:
        """Make the columns from training data."""
        known = [one.seen.confidence for one in decisions if one.seen.confidence is not None]
        typical = float(np.median(known)) if known else 0.5
        plain = np.array([_plain(one.seen, one.shown_s, parts, typical) for one in decisions])
        people = tuple(sorted({one.person for one in decisions}))
        scale = plain.std(axis=0)
        scale = np.where(scale > 1e-6, scale, 1.0)  # what never changes says nothing
        mean = plain.mean(axis=0)
        knots = np.quantile((plain - mean) / scale, _KNOTS, axis=0)
        return cls(parts, people, mean, scale, knots, typical)

    @property
    def _bending(self) -> list[int]:
        """Confidence, length and time; the others have few values."""
        return [0, 1] + ([_TIME] if self.parts.time else [])

    @property
    def blocks(self) -> list[int]:
        """The block of each column; -1 for the constant."""
        blocks = [-1]
        if self.parts.plain:
            blocks += [PLAIN] * len(self.mean)
        if self.parts.bends:
            blocks += [BENDS] * (len(_KNOTS) * len(self._bending))
        if self.parts.persons:
            blocks += [PERSONS] * len(self.people)
        # numbers without gaps, so that there is one scale for each block in use
        used = sorted({block for block in blocks if block >= 0})
        return [used.index(block) if block >= 0 else -1 for block in blocks]

    @property
    def person_block(self) -> int:
        """The number of the persons' block among the scales; -1 where there is none."""
        return int(self.parts.plain) + int(self.parts.bends) if self.parts.persons else -1

    def row(self, seen: Seen, shown_s: float, person: int | None) -> np.ndarray:
        """[columns]. person: None or an unknown one for a person of average effect."""
        plain = (np.array(_plain(seen, shown_s, self.parts, self.typical)) - self.mean) / self.scale
        row = [1.0]
        if self.parts.plain:
            row += list(plain)
        if self.parts.bends:
            for i in self._bending:
                row += list(np.maximum(plain[i] - self.knots[:, i], 0.0))
        if self.parts.persons:
            row += [float(person == one) for one in self.people]
        return np.array(row)

    def rows(self, decisions: Sequence[Decision]) -> np.ndarray:
        """[decisions, columns]."""
        return np.array([self.row(one.seen, one.shown_s, one.person) for one in decisions])

    def unknown(self, decisions: Sequence[Decision]) -> np.ndarray:
        """bool [decisions], where the person's own effect is not known."""
        if not self.parts.persons:
            return np.zeros(len(decisions), bool)
        return np.array([one.person not in self.people for one in decisions])


_TIME = 6  # the place of the time among the plain columns


def _plain(seen: Seen, shown_s: float, parts: Parts, typical: float) -> list[float]:
    confidence = typical if seen.confidence is None else seen.confidence
    row = [
        _logit(confidence),
        math.log(seen.characters),
        float(seen.confidence is None),
        float(seen.lines > 1),
        float(seen.place == "blank"),
        float(seen.place == "word"),
    ]
    if parts.time:
        row.append(math.log(shown_s))
    return [*row, math.log1p(seen.column)]


def _logit(chance: float) -> float:
    chance = min(max(chance, 1e-3), 1 - 1e-3)
    return math.log(chance / (1 - chance))


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """The chance that a suggestion is accepted."""

    columns: Columns
    posterior: Posterior

    @classmethod
    def fit(cls, decisions: Sequence[Decision], parts: Parts = Parts()) -> Acceptance:
        columns = Columns.of(decisions, parts)
        labels = np.array([one.accepted for one in decisions], float)
        return cls(columns, fit_logistic(columns.rows(decisions), labels, columns.blocks))

    @property
    def person_scale(self) -> float:
        """Standard deviation of the effects of persons, in logits."""
        block = self.columns.person_block
        return self.posterior.scales[block] if block >= 0 else 0.0

    def chances(self, decisions: Sequence[Decision]) -> np.ndarray:
        """[decisions], averaged over what is not known, an unknown person's effect included."""
        mean, variance = self.posterior.linear(self.columns.rows(decisions))
        variance = variance + self.columns.unknown(decisions) * self.person_scale**2
        return mean_chance(mean, variance)

    def logit(self, seen: Seen, shown_s: float) -> float:
        """The score of a person of average effect."""
        return float(self.columns.row(seen, shown_s, None) @ self.posterior.mean)

    def log_likelihoods(self, decisions: Sequence[Decision]) -> np.ndarray:
        """[decisions], in nats."""
        chances = self.chances(decisions)
        accepted = np.array([one.accepted for one in decisions])
        return np.log(np.where(accepted, chances, 1 - chances))


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time from the showing to the decision, log-normal."""

    columns: Columns
    posterior: Posterior

    @classmethod
    def fit(cls, decisions: Sequence[Decision], parts: Parts = Parts()) -> Timing:
        columns = Columns.of(decisions, dataclasses.replace(parts, time=False))
        values = np.log([one.shown_s for one in decisions])
        return cls(columns, fit_linear(columns.rows(decisions), values, columns.blocks))

    @property
    def person_scale(self) -> float:
        """Standard deviation of the persons' effects on the logarithm of the seconds."""
        block = self.columns.person_block
        return self.posterior.scales[block] if block >= 0 else 0.0

    def log_mean(self, seen: Seen) -> float:
        """The mean logarithm of the seconds of a person of average effect."""
        return float(self.columns.row(seen, 1.0, None) @ self.posterior.mean)

    def log_likelihoods(self, decisions: Sequence[Decision]) -> np.ndarray:
        """[decisions], of the density of the logarithm of the seconds, in nats."""
        mean, variance = self.posterior.linear(self.columns.rows(decisions))
        variance = variance + self.columns.unknown(decisions) * self.person_scale**2
        spread = np.sqrt(variance + self.posterior.noise**2)
        return scipy.stats.norm.logpdf(np.log([one.shown_s for one in decisions]), mean, spread)


@dataclasses.dataclass(frozen=True)
class Share:
    """A share with masses at 0 and at 1, and a beta density between."""

    none: float
    whole: float
    a: float
    b: float

    @classmethod
    def fit(cls, shares: Sequence[float]) -> Share:
        """The masses are counts with one observation of each kind added; a, b by moments."""
        inner = [x for x in shares if 0 < x < 1]
        total = len(shares) + 3
        none = (sum(x <= 0 for x in shares) + 1) / total
        whole = (sum(x >= 1 for x in shares) + 1) / total
        mean, variance = (np.mean(inner), np.var(inner)) if len(inner) > 1 else (0.5, 1 / 12)
        size = float(np.clip(mean * (1 - mean) / max(variance, 1e-6) - 1, 0.5, 100.0))
        return cls(none, whole, float(mean) * size, float(1 - mean) * size)

    def log_likelihood(self, share: float) -> float:
        """Log-likelihood of a share, in nats: a mass at 0 and at 1, a density between."""
        if share <= 0:
            return math.log(self.none)
        if share >= 1:
            return math.log(self.whole)
        inner = min(max(share, 1e-3), 1 - 1e-3)
        density = float(scipy.stats.beta.logpdf(inner, self.a, self.b))
        return math.log(1 - self.none - self.whole) + density

    def draw(self, rng: random.Random) -> float:
        """Draw one share."""
        at = rng.random()
        if at < self.none:
            return 0.0
        if at < self.none + self.whole:
            return 1.0
        return rng.betavariate(self.a, self.b)


@dataclasses.dataclass(frozen=True)
class Survival:
    """Share of an accepted text that is alive at each recorded moment: a Markov chain."""

    # The share at the first moment, and a share after a change.
    first: Share
    changed: Share
    # Chance that the share at each later moment is that of the moment before.
    stays: tuple[float, ...]

    @classmethod
    def fit(cls, decisions: Sequence[Decision]) -> Survival:
        alive = [one.alive for one in decisions if one.accepted]
        moments = range(1, len(LOOKED_AT_S))
        same = [sum(one[i] == one[i - 1] for one in alive) for i in moments]
        changed = [one[i] for i in moments for one in alive if one[i] != one[i - 1]]
        stays = tuple((count + 1) / (len(alive) + 2) for count in same)
        return cls(Share.fit([one[0] for one in alive]), Share.fit(changed), stays)

    def log_likelihood(self, alive: Sequence[float]) -> float:
        """Log-likelihood of the shares at all moments, in nats."""
        total = self.first.log_likelihood(alive[0])
        for before, now, stays in zip(alive, alive[1:], self.stays, strict=False):
            changes = math.log(1 - stays) + self.changed.log_likelihood(now)
            total += math.log(stays) if now == before else changes
        return total

    def draw(self, rng: random.Random) -> tuple[float, ...]:
        """Shares at all moments."""
        shares = [self.first.draw(rng)]
        for stays in self.stays:
            shares.append(shares[-1] if rng.random() < stays else self.changed.draw(rng))
        return tuple(shares)


@dataclasses.dataclass(frozen=True)
class Fit:
    """All that a simulated programmer is drawn from."""

    acceptance: Acceptance
    timing: Timing
    survival: Survival
    # Quantiles of the recorded confidences, evenly spaced from the least to the greatest.
    confidences: np.ndarray

    @classmethod
    def of(cls, decisions: Sequence[Decision]) -> Fit:
        """Raises ValueError when nothing was accepted, or nothing rejected."""
        accepted = sum(one.accepted for one in decisions)
        if not 0 < accepted < len(decisions):
            raise ValueError(
                f"{accepted} of {len(decisions)} decisions are acceptances: a fit needs both kinds"
            )
        known = [one.seen.confidence for one in decisions if one.seen.confidence is not None]
        return cls(
            Acceptance.fit(decisions),
            Timing.fit(decisions),
            Survival.fit(decisions),
            np.quantile(known if known else [0.5], np.linspace(0, 1, _QUANTILES)),
        )

    def confidence(self, quantile: float) -> float:
        """The recorded confidence below which this share of them lies."""
        return float(
            np.interp(quantile, np.linspace(0, 1, len(self.confidences)), self.confidences)
        )

    def to_json(self) -> str:
        """Parameters that new people are drawn from, without recorded people or uncertainty."""
        survival = dataclasses.asdict(self.survival)
        return json.dumps(
            {
                "acceptance": _to_dict(self.acceptance),
                "timing": _to_dict(self.timing),
                "survival": survival,
                "confidences": [round(float(x), 5) for x in self.confidences],
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> Fit:
        """Raises ValueError for a text that ``to_json`` did not write."""
        try:
            fields = json.loads(text)
            survival = fields["survival"]
            return cls(
                Acceptance(*_from_dict(fields["acceptance"])),
                Timing(*_from_dict(fields["timing"])),
                Survival(
                    Share(**survival["first"]),
                    Share(**survival["changed"]),
                    tuple(survival["stays"]),
                ),
                np.array(fields["confidences"], float),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no fit: {type(error).__name__}: {error}") from error


@functools.cache
def embedded() -> Fit:
    """The fit on all decisions of copilot_sessions.jsonl, of which only coefficients are kept here:
    ``python -m experiments.people --fit=people/simulated/fitted.json``.
    """
    return Fit.from_json((Path(__file__).parent / "fitted.json").read_text())


def _to_dict(part: Acceptance | Timing) -> dict[str, Any]:
    columns = part.columns
    count = len(columns.people) if columns.parts.persons else 0
    mean = part.posterior.mean[: len(part.posterior.mean) - count]

    def rounded(array: np.ndarray) -> Any:
        return np.round(array, 5).tolist()

    return {
        "mean": rounded(columns.mean),
        "scale": rounded(columns.scale),
        "knots": rounded(columns.knots),
        "typical": round(columns.typical, 5),
        "time": columns.parts.time,
        "coefficients": rounded(mean),
        "scales": rounded(np.array(part.posterior.scales)),
        "noise": round(part.posterior.noise, 5),
    }


def _from_dict(fields: Mapping[str, Any]) -> tuple[Columns, Posterior]:
    mean = np.array(fields["coefficients"], float)
    columns = Columns(
        Parts(time=fields["time"]),
        (),
        np.array(fields["mean"], float),
        np.array(fields["scale"], float),
        np.array(fields["knots"], float),
        fields["typical"],
    )
    covariance = np.zeros((len(mean), len(mean)))
    return columns, Posterior(mean, covariance, tuple(fields["scales"]), fields["noise"])
