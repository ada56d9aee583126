"""Rewards of one arm since they last changed: a generalised likelihood ratio test.

Rewards are normal with one unknown variance, and a mean that may change at an unknown time. As
Besson, Kaufmann, Maillard and Seznec 2022 ("Efficient Change-Point Detection for Tackling
Piecewise-Stationary Bandits", JMLR 23) do, every arm has a test of its own, and a change of one
leaves what is known of the others (their local restarts). It departs from them in two places:

- Their rewards lie between 0 and 1, and their likelihood is Bernoulli's. Here it is the normal one
  with its variance unknown: half of n ln(S / S_s), where S is the sum of squares around the mean of
  all n rewards, and S_s that around the two means before and after a split s.
- They forget all rewards of the arm. Here those after the likeliest split are kept.

The threshold is theirs in practice, ln(n^(3/2) / delta).
"""

from __future__ import annotations

import collections
import math

import numpy as np
from jaxtyping import Float

# A test is made each time that an arm has so many more rewards, as splitting them takes time.
EVERY = 10
# The fewest rewards before and after a change. The likelihood is the normal one, and means of less
# are not normal where a rare reward is paid.
LEAST = 50
# The newest rewards among which a change is looked for.
MOST = 10_000


class SinceChange:
    """Count, mean and sum of squares around the mean of the rewards of an arm since a change.

    false_alarm: the delta of the threshold, about the chance that rewards which never change seem
    to; None for no test. scale: a standard deviation that is believed in as much as in one reward,
    so that rewards which are all alike have some variance.
    """

    def __init__(self, false_alarm: float | None, scale: float):
        self._false_alarm, self._scale = false_alarm, scale
        self._newest: collections.deque[float] = collections.deque(maxlen=MOST)
        self._untested = 0
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def add(self, value: float) -> bool:
        """Counts a reward; True if the rewards have changed, so that earlier ones are forgotten."""
        self._count(value)
        if self._false_alarm is None:
            return False
        self._newest.append(value)
        self._untested += 1
        if self._untested < EVERY:
            return False
        self._untested = 0
        split = changed_at(np.array(self._newest), self._false_alarm, self._scale)
        if split is None:
            return False
        kept = list(self._newest)[split:]
        self._newest.clear()
        self._newest.extend(kept)
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        for one in kept:
            self._count(one)
        return True

    def _count(self, value: float) -> None:
        """A step of Welford 1962."""
        self.count += 1
        change = value - self.mean
        self.mean += change / self.count
        self.squares += change * (value - self.mean)


def changed_at(rewards: Float[np.ndarray, " n"], false_alarm: float, scale: float) -> int | None:
    """Number of rewards before the likeliest change of their mean; None where the likelihood ratio
    of a change stays below the threshold. false_alarm, scale: as of ``SinceChange``.
    """
    n = len(rewards)
    if n < 2 * LEAST:
        return None
    before = np.arange(LEAST, n - LEAST + 1)
    after = n - before
    sums = np.cumsum(rewards)
    first = sums[before - 1]
    apart = first / before - (sums[-1] - first) / after
    # what a split takes from the sum of squares
    between = apart**2 * before * after / n
    whole = scale**2 + float(((rewards - rewards.mean()) ** 2).sum())
    ratios = n / 2 * np.log(whole / (whole - between))
    split = int(ratios.argmax())
    if ratios[split] <= math.log(n**1.5 / false_alarm):
        return None
    return int(before[split])
