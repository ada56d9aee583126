"""Differences of rewards that may come from rounding alone."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

# Differences of rewards up to it, relative to the largest of them or to 1, are rounding. It is two
# units in the last place of float32, the narrowest type that rewards are computed in.
ROUNDING = 2.0**-22


def differ(rewards: Float[np.ndarray, " n"]) -> bool:
    """True if rewards differ by more than rounding."""
    return len(rewards) > 0 and bool(np.ptp(rewards) > rounding_of(rewards))


def rounding_of(rewards: Float[np.ndarray, " n"]) -> float:
    """The greatest difference of rewards that may come from rounding alone."""
    return ROUNDING * float(np.max(np.abs(rewards), initial=1.0))
