"""Held-out log-likelihood of what programmers did, by person and by time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from experiments.report import Estimate, resampled
from people.simulated.fit import Acceptance, Parts, Survival, Timing
from people.simulated.telemetry import Decision, by_person

# Share of each person's decisions, the first ones, that the split by time trains on.
EARLIER = 0.7

# From a fit on training decisions to the log-likelihoods of held-out ones.
type Scorer = Callable[[Sequence[Decision], Sequence[Decision]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Line:
    """One model on one split."""

    what: str
    model: str
    split: str
    # Held-out log-likelihood of each decision in nats, and whose decision it was.
    scores: np.ndarray
    people: np.ndarray

    @property
    def mean(self) -> float:
        """Nats per decision."""
        return float(self.scores.mean())

    def above(self, other: Line) -> Estimate:
        """The mean difference to another model on the same decisions, with its 95 % interval: a
        bootstrap that draws persons, since the decisions of one person are alike.
        """
        gains = self.scores - other.scores
        people = np.unique(self.people)
        sums = np.array([gains[self.people == one].sum() for one in people])
        counts = np.array([(self.people == one).sum() for one in people])
        return resampled(lambda drawn: sums[drawn].sum() / counts[drawn].sum(), len(people))


def acceptance(parts: Parts | None) -> Scorer:
    """Decisions. None: the share of the training decisions that were accepted."""

    def score(train: Sequence[Decision], held: Sequence[Decision]) -> np.ndarray:
        if parts is None:
            share = np.mean([one.accepted for one in train])
            return np.log([share if one.accepted else 1 - share for one in held])
        return Acceptance.fit(train, parts).log_likelihoods(held)

    return score


def timing(parts: Parts) -> Scorer:
    """Times until the decision."""

    def score(train: Sequence[Decision], held: Sequence[Decision]) -> np.ndarray:
        return Timing.fit(train, parts).log_likelihoods(held)

    return score


def survival(plain: bool) -> Scorer:
    """Shares alive at all moments, of acceptances alone. plain: a baseline with the same masses but
    an even density, and the same chance of a change at each moment.
    """

    def score(train: Sequence[Decision], held: Sequence[Decision]) -> np.ndarray:
        fit = Survival.fit(train)
        if plain:
            fit = Survival(
                dataclasses.replace(fit.first, a=1.0, b=1.0),
                dataclasses.replace(fit.changed, a=1.0, b=1.0),
                (float(np.mean(fit.stays)),) * len(fit.stays),
            )
        return np.array([fit.log_likelihood(one.alive) for one in held])

    return score


NONE = Parts(plain=False, bends=False, persons=False)
PLAIN = Parts(bends=False, persons=False)
MODELS: dict[str, dict[str, Scorer]] = {
    "accepted": {
        "constant": acceptance(None),
        "logistic on confidence, length, place, time": acceptance(PLAIN),
        "and bends": acceptance(Parts(persons=False)),
        "and persons (hierarchical)": acceptance(Parts(bends=False)),
        "and both": acceptance(Parts()),
    },
    "seconds": {
        "constant": timing(NONE),
        "log-normal on confidence, length, place": timing(PLAIN),
        "and persons": timing(Parts(bends=False)),
        "and both": timing(Parts()),
    },
    "alive": {
        "masses, even density, constant chance of change": survival(plain=True),
        "masses, beta density, chance by moment": survival(plain=False),
    },
}


def splits(
    decisions: Sequence[Decision], split: str
) -> list[tuple[list[Decision], list[Decision]]]:
    """Pairs of training and held-out decisions; the held-out ones are distinct.

    split: "person" leaves out one person after the other, "time" the last decisions of each.
    """
    people = by_person(decisions)
    if split == "person":
        return [
            ([one for one in decisions if one.person != person], held)
            for person, held in people.items()
        ]
    early, late = [], []
    for of_one in people.values():
        cut = round(EARLIER * len(of_one))
        early += of_one[:cut]
        late += of_one[cut:]
    return [(early, late)]


def run(decisions: Sequence[Decision]) -> list[Line]:
    """All models on both splits."""
    lines = []
    for split in ("person", "time"):
        for what, models in MODELS.items():
            kept = [one for one in decisions if one.accepted or what != "alive"]
            pairs = splits(kept, split)
            people = np.array([one.person for _, held in pairs for one in held])
            for model, scorer in models.items():
                scores = np.concatenate([scorer(train, held) for train, held in pairs])
                lines.append(Line(what, model, split, scores, people))
    return lines


def held_out_chances(decisions: Sequence[Decision], split: str) -> tuple[np.ndarray, np.ndarray]:
    """Chances of the whole model for held-out decisions, and whether they were accepted."""
    pairs = splits(decisions, split)
    chances = [Acceptance.fit(train).chances(held) for train, held in pairs]
    accepted = [one.accepted for _, held in pairs for one in held]
    return np.concatenate(chances), np.array(accepted)
