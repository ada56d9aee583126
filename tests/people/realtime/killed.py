"""Runs a rehearsal of the cycle in children that are killed by SIGKILL, again and again.

    python -m tests.people.realtime.killed <folder> <kills> <cycles>

Every second child is killed by its own hand at a random count of what it does to the database and
to files, before and after: moments that time alone would rarely hit, whatever the machine's speed.
The others are killed from outside at a random time. Children are forks, so that the imports are
paid once. Prints a line of JSON: how many were killed, how many edges had been taken by then, and
how many ended whole.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import sqlalchemy
from sqlalchemy import event

from people.realtime import rehearsal, tables
from people.realtime.cycle import Cycle, CycleConfig
from people.realtime.gate import GateConfig
from people.realtime.ledger import Ledger
from people.realtime.monitors import MonitorsConfig
from people.realtime.watching import Guardrail, WatchConfig
from tests.rl_code.store.processes import end, spawn

REHEARSAL = rehearsal.Rehearsal(users=200, sessions=150, bad=(2, 5), broken=(3,), tasks=30)
CONFIG = CycleConfig(
    gate=GateConfig(),
    watch=WatchConfig(
        share=0.4, margin=0.1, guardrails=(Guardrail("invalid_calls", "up", scale=0.05),)
    ),
    monitors=MonitorsConfig(reward=None),
    cadence_s=0.0,
    least_sessions=100,
    poll_s=0.01,
)
# Moments of a child's life at which it may kill itself: at most this many are counted.
MOMENTS = 120


def main(folder: Path, kills: int, cycles: int) -> dict:
    rng = random.Random(0)
    ends = {"killed": 0, "whole": 0}
    for number in range(kills):
        at = rng.randrange(1, MOMENTS) if number % 2 else None
        child = spawn(live, folder, None, at)
        if at is None:
            time.sleep(rng.uniform(0.0, 0.3))
            os.kill(child, signal.SIGKILL)
        if (code := end(child)) != -signal.SIGKILL:
            raise RuntimeError(f"child {number} was to be killed and ended with {code=}")
        ends["killed"] += 1
    # how far it came while it was killed again and again; the connection is not for the child
    engine = tables.connect(f"sqlite:///{folder}/people.db")
    ends["edges"] = len(Ledger(engine).rows(tables.EDGES))
    engine.dispose()
    if code := end(spawn(live, folder, cycles, None)):
        raise RuntimeError(f"the last child ended with {code=}")
    return ends | {"whole": 1}


def live(folder: Path, cycles: int | None, die_at: int | None) -> None:
    """The life of a child: the cycle until it is killed, or until so many cycles have ended."""
    engine = tables.connect(f"sqlite:///{folder}/people.db")
    count_down(engine, die_at)
    cycle_of(folder, engine).run(cycles)


def cycle_of(folder: Path, engine: sqlalchemy.Engine) -> Cycle:
    ledger = Ledger(engine)
    ledger.start(0, time.time())
    parts = REHEARSAL.make(engine, folder, CONFIG, time.time)
    fleet = parts.fleet
    apply = fleet.apply

    def noted(routing) -> None:
        apply(routing)
        with open(folder / "served.log", "a") as log:
            log.write(f"{json.dumps([routing.turn, routing.deployed, routing.candidate])}\n")

    fleet.apply = noted
    return Cycle(ledger, parts, CONFIG, time.time)


def count_down(engine: sqlalchemy.Engine, die_at: int | None) -> None:
    """Kills this process at a count of moments."""
    left = die_at

    def moment(*_) -> None:
        nonlocal left
        if left is not None:
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    for name in ("before_cursor_execute", "after_cursor_execute", "commit"):
        event.listen(engine, name, moment)
    rename = os.replace

    def replace(*arguments) -> None:
        moment()
        rename(*arguments)
        moment()

    os.replace = replace

    # Nobody cuts the power here, and a kill loses nothing that a process has written.
    @event.listens_for(engine, "connect")
    def _(connection, record) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    os.fsync = lambda descriptor: None


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
