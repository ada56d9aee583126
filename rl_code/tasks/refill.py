"""Refill of a step: further tasks are drawn until enough of its groups have something to teach.

A group whose advantages are all 0, since all of its episodes were solved or none was, leaves its
place in the batch empty. With this section the schedule draws another task in its place, as the
dynamic sampling of DAPO does (2503.14476, section 3.2). Departures: as many tasks are drawn as
groups are missing, so no mixed group is thrown away; and a step draws no more than ``most``, so
that a policy which solves everything, or nothing, ends no run.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RefillConfig:
    """Bounds of the tasks that are drawn for a step."""

    # The most groups that are sampled for a step, in multiples of ``tasks_per_step``. A step that
    # has too few mixed ones by then trains on those that it has.
    most: int = 4

    def __post_init__(self):
        if self.most < 2:
            raise ValueError(
                f"most={self.most} must be at least 2: with 1 no further task could be drawn"
            )
