"""Measures of scores against outcomes: AUC, expected calibration error, and the bins of a
reliability plot.

Numbers in float64, and exact where they can be: no sampling, no threshold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float64

BINS = 10


@dataclasses.dataclass(frozen=True)
class Bin:
    """Probabilities within an interval."""

    # The interval [low, high), of the last one [low, high].
    low: float
    high: float
    # Their number, their mean, and the share of good outcomes.
    count: int
    probability: float
    share: float


@dataclasses.dataclass(frozen=True)
class Quality:
    """Judgement of scores by outcomes that they were not trained on."""

    # Outcomes, and the good ones among them.
    count: int
    good: int
    # Chance that a good outcome has a higher score than a bad one; None without both.
    auc: float | None
    # The same within tasks that have both, where a group's advantage is decided.
    auc_within: float | None
    # Expected calibration error (1706.04599, equation 3), and the mean squared error (Brier).
    ece: float
    brier: float
    bins: tuple[Bin, ...]


def auc(scores: Sequence[float], good: Sequence[bool]) -> float | None:
    """Chance that a good one has a higher score than a bad one, ties counted half (Mann and
    Whitney); None where one of the two kinds is missing.
    """
    above, pairs = _pairs(np.asarray(scores, np.float64), np.asarray(good, bool))
    return above / pairs if pairs else None


def auc_within(
    scores: Sequence[float], good: Sequence[bool], groups: Sequence[str]
) -> float | None:
    """``auc`` over the pairs of outcomes of one group alone."""
    values, kinds = np.asarray(scores, np.float64), np.asarray(good, bool)
    names = np.asarray(groups)
    found = [_pairs(values[names == name], kinds[names == name]) for name in np.unique(names)]
    pairs = sum(count for _, count in found)
    return sum(above for above, _ in found) / pairs if pairs else None


def _pairs(scores: Float64[np.ndarray, " n"], good: Bool[np.ndarray, " n"]) -> tuple[float, int]:
    """(Pairs of a good and a bad one in which the good one is above, all such pairs)."""
    low = np.sort(scores[~good])
    below = np.searchsorted(low, scores[good], "left").sum()
    ties = np.searchsorted(low, scores[good], "right").sum() - below
    return float(below + 0.5 * ties), int(good.sum() * (~good).sum())


def reliability(
    probabilities: Sequence[float], good: Sequence[bool], bins: int = BINS
) -> tuple[Bin, ...]:
    """The filled ones of ``bins`` intervals of equal width."""
    p, outcomes = np.asarray(probabilities, np.float64), np.asarray(good, bool)
    at = np.minimum((p * bins).astype(int), bins - 1)
    return tuple(
        Bin(
            number / bins,
            (number + 1) / bins,
            int(own.sum()),
            float(p[own].mean()),
            float(outcomes[own].mean()),
        )
        for number in range(bins)
        if (own := at == number).any()
    )


def ece(bins: Sequence[Bin]) -> float:
    """Mean distance of a bin's probability from its share of good outcomes, weighted by count."""
    total = sum(one.count for one in bins)
    return sum(one.count * abs(one.probability - one.share) for one in bins) / total


def judge(probabilities: Sequence[float], good: Sequence[bool], groups: Sequence[str]) -> Quality:
    """All measures. groups: the task of each. Raises ValueError where there is nothing to judge by,
    and for what is no probability.
    """
    p, outcomes = np.asarray(probabilities, np.float64), np.asarray(good, bool)
    if not len(p) == len(outcomes) == len(groups) or not len(p):
        raise ValueError(f"{len(p)} probabilities, {len(outcomes)} outcomes, {len(groups)} groups")
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"probabilities reach from {p.min()} to {p.max()}")
    bins = reliability(probabilities, good)
    return Quality(
        count=len(p),
        good=int(outcomes.sum()),
        auc=auc(probabilities, good),
        auc_within=auc_within(probabilities, good, groups),
        ece=ece(bins),
        brier=float(np.mean(np.square(p - outcomes))),
        bins=bins,
    )


def sigmoid(scores: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """1 / (1 + exp(-x)) without overflow."""
    small = np.exp(-np.abs(scores))
    return np.where(scores >= 0, 1.0, small) / (1.0 + small)


def platt(scores: Sequence[float], good: Sequence[bool]) -> tuple[float, float]:
    """Slope and offset by which sigmoid(slope * score + offset) fits outcomes best (Platt 1999),
    with his smoothed targets, (n + 1) / (n + 2) for good ones and 1 / (m + 2) for bad ones.

    Scores of pairs have no zero of their own; this gives them one. The slope is at least 0.
    """
    x, y = np.asarray(scores, np.float64), np.asarray(good, bool)
    scale = max(float(np.std(x)), 1e-12)
    design = np.stack([x / scale, np.ones_like(x)], axis=1)
    targets = np.where(y, (y.sum() + 1) / (y.sum() + 2), 1 / ((~y).sum() + 2))
    fit = np.zeros(2)
    # Newton's method on a convex loss with a small ridge on the slope, so that it always ends
    for _ in range(100):
        p = sigmoid(design @ fit)
        slope = design.T @ (p - targets) + np.array([1e-6 * fit[0], 0.0])
        curve = design.T @ (design * (p * (1 - p))[:, None]) + np.diag([1e-6, 1e-9])
        step = np.linalg.solve(curve, slope)
        fit = fit - step * min(1.0, 5.0 / max(float(np.abs(step).max()), 1e-12))
        if float(np.abs(step).max()) < 1e-10:
            break
    if fit[0] < 0:  # scores that point the wrong way say nothing
        mean = float(targets.mean())
        return 0.0, float(np.log(mean / (1 - mean)))
    return float(fit[0] / scale), float(fit[1])
