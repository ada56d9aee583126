"""A rehearsed cycle in a folder, with a clock that is told the time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sqlalchemy import event

from people.realtime import tables
from people.realtime.cycle import Cycle, CycleConfig
from people.realtime.ledger import Ledger
from people.realtime.monitors import MonitorsConfig
from people.realtime.rehearsal import Rehearsal
from people.realtime.watching import Guardrail, WatchConfig

CONFIG = CycleConfig(
    watch=WatchConfig(
        share=0.4,
        scale=0.1,
        margin=0.1,
        guardrails=(Guardrail("accepted", "down", scale=0.1),),
    ),
    monitors=MonitorsConfig(reward=None),
    cadence_s=0.0,
    least_sessions=100,
)


class Rehearsed:
    """The cycle, its ledger and its parts; ``now`` is the time."""

    def __init__(self, folder: Path, config: CycleConfig = CONFIG, **rehearsal: Any):
        self.now = 1000.0
        self.engine = tables.connect(f"sqlite:///{folder}/people.db")

        @event.listens_for(self.engine, "connect")
        def _(connection, record) -> None:
            connection.execute("PRAGMA synchronous=OFF")  # nobody cuts the power

        settings = dict(users=200, sessions=150, tasks=30) | rehearsal
        self.config = config
        self.parts = Rehearsal(**settings).make(self.engine, folder, config, self.clock)
        self.ledger = Ledger(self.engine)
        self.ledger.start(0, self.now)
        self.cycle = self.another(self.parts)

    def clock(self) -> float:
        return self.now

    def another(self, parts: Any = None, **changes: Any) -> Cycle:
        """Another process on the same cycle, or one with other parts or another config."""
        config = dataclasses.replace(self.config, **changes)
        return Cycle(self.ledger, parts or self.parts, config, self.clock)

    def until(self, state: str, number: int | None = None, cycle: Cycle | None = None) -> None:
        """Goes on until a state is reached, of a cycle if its number is given."""
        for _ in range(400):
            row = self.ledger.current()
            if row.state == state and number in (None, row.number):
                return
            self.now += 1
            (cycle or self.cycle).step() or self.parts.wait(1.0)
        raise AssertionError(f"{state=} was not reached, it is {self.ledger.current()}")
