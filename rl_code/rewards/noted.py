"""A reward signal's value with notes, which go on record with the episode (``Reward.notes``).

A signal that returns a plain number writes none. Notes are plain values, and small: they are part
of every group's record. The key MEASURES holds numbers by name, whose means are metrics of the
step, ``reward/<component>/<name>``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# The key of notes under which numbers stand that become metrics.
MEASURES = "measures"


@dataclasses.dataclass(frozen=True)
class Noted:
    """Value of a signal, and what it writes down."""

    value: float
    notes: Mapping[str, Any]

    def __float__(self) -> float:
        return float(self.value)
