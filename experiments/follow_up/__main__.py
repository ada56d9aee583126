"""Judges the classifier of dissatisfied follow-up messages on families that it never saw.

python -m experiments.follow_up

Each line trains on all other families. The first is the classifier that rewards use. AUC is the
chance that a dissatisfied message gets more than another one; ECE the expected calibration error
over ten bins; Brier the mean squared error of the chance, 0.25 for one that always says a half.
"""

from __future__ import annotations

import numpy as np

from launch import command
from people.feedback.rewards.follow_up import standard, train
from people.feedback.rewards.follow_up_data import (
    DISSATISFIED,
    HELD_OUT,
    SATISFIED,
    VALIDATION,
    messages,
)

_MESSAGES = 2_000
_BINS = 10


def main(argv: list[str]) -> None:
    print(f"{'held out':52} {'AUC':>6} {'ECE':>6} {'Brier':>6} {'said':>6}")
    _print(HELD_OUT, standard().chances)
    found = []
    # each pair of a dissatisfied and another family, by their order
    for held_out in zip(DISSATISFIED, SATISFIED, strict=True):
        rest = [one for one in (*DISSATISFIED, *SATISFIED) if one not in held_out]
        calibration = tuple(one for one in VALIDATION if one in rest) or (rest[0], rest[-1])
        if len(calibration) < 2:
            # one of either kind, so that a temperature can be set
            other = SATISFIED if calibration[0] in DISSATISFIED else DISSATISFIED
            calibration += (next(one for one in other if one in rest),)
        learned = tuple(one for one in rest if one not in calibration)
        classifier = train(messages(learned, _MESSAGES, 0), messages(calibration, 500, 1))
        found.append(_print(held_out, classifier.chances))
    mean = np.mean(found, axis=0)
    print(f"{'mean of the pairs':52} " + " ".join(f"{value:6.3f}" for value in mean))


def _print(held_out: tuple[str, ...], chances) -> list[float]:
    made = messages(held_out, _MESSAGES, seed=7)
    said = chances([one.text for one in made])
    true = np.array([one.dissatisfied for one in made])
    ranks = said[true][:, None] - said[~true][None]
    auc = float(np.mean((ranks > 0) + 0.5 * (ranks == 0)))
    bins = np.minimum((said * _BINS).astype(int), _BINS - 1)
    gaps = [abs(np.sum(said[bins == b] - true[bins == b])) for b in range(_BINS)]
    values = [auc, sum(gaps) / len(said), float(np.mean((said - true) ** 2)), float(said.mean())]
    print(f"{', '.join(held_out):52} " + " ".join(f"{value:6.3f}" for value in values))
    return values


if __name__ == "__main__":
    command.run(main)
