"""The parts of a cycle by name.

A config names one, or ``package.module:object`` of its own: a frozen dataclass of settings with a
method ``make(engine, folder, config, clock) -> Parts``.
"""

from __future__ import annotations

from people.realtime.rehearsal import Rehearsal
from people.realtime.served import Served

PARTS = {"rehearsal": Rehearsal, "served": Served}
