"""Reward, never positive, for episodes that come near the limit of their tokens.

Implements the soft overlong punishment of DAPO (2503.14476, eq. 13). With L_max the limit, L_c the
last part of it and L the length of an episode:

    0                          for L <= L_max - L_c,
    (L_max - L_c - L) / L_c    up to L_max,
    -1                         beyond.

Departures: L_c is a share of the limit (there 4096 of 20480 tokens). An episode that the limit
ended gets -1, although the observation that did not fit is no part of it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from rl_code.config.read_config import ConfigError
from rl_code.environment.finished import FinishedEpisode


@dataclasses.dataclass(frozen=True)
class Overlong:
    """-1 for an episode as long as its limits allow, to 0 for one that keeps away from them."""

    # Share of the limit within which the penalty grows, L_c / L_max.
    within: float = 0.2
    # The length that counts: "total" tokens of the trajectory, prompt and observations included,
    # against ``limits.tokens``; or those that were "sampled", against the most that limits allow.
    of: Literal["total", "sampled"] = "total"

    def __post_init__(self) -> None:
        if not 0.0 < self.within <= 1.0:
            raise ValueError(f"within={self.within} must be above 0 and at most 1")
        if self.of not in ("total", "sampled"):
            raise ValueError(f"of={self.of!r} must be 'total' or 'sampled'")

    def __call__(self, episode: FinishedEpisode) -> float:
        """Raises ConfigError for an episode without limits."""
        limits = episode.limits
        if limits is None:
            raise ConfigError(f"overlong: the limits of task {episode.task.id} are not known")
        trajectory = episode.trajectory
        if trajectory.status == "token_limit":
            return -1.0
        if self.of == "total":
            most = limits.tokens
            length = len(trajectory.tokens)  # as the limit counts, padding of documents included
        else:
            most = limits.most_sampled
            length = episode.usage.tokens_sampled
        return penalty(length, most, self.within * most)


def penalty(length: float, most: float, within: float) -> float:
    """The penalty of a length. most: L_max. within: L_c, above 0."""
    over = (length - (most - within)) / within
    return 0.0 - min(max(over, 0.0), 1.0)  # which is no -0.0
