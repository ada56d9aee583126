"""Schedule of kills of each part, and their results."""

from __future__ import annotations

import collections
import random
import time
from collections.abc import Callable, Mapping

from sqlalchemy.exc import SQLAlchemyError

from experiments.load.postgres import Server
from experiments.load.program import Program
from people.realtime.ledger import Ledger

# What can be struck: the program while it trains, while it does anything else, the database, and
# the program at any moment of its life, even while it starts.
KINDS = ("trainer", "server", "database", "anytime")
# The share of the time in which kills are due; the rest shows that it goes on.
_UNTIL = 0.7
# Seconds between two looks.
_LOOK_S = 0.25


class Strikes:
    """Kills parts at random times, and starts them again.

    counts: kind -> how often. seconds: of the whole run. within_s: a kill at any moment comes at
    most so many seconds after the program's last start. database: None where none can be killed.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        seconds: float,
        within_s: float,
        rng: random.Random,
        program: Program,
        ledger: Ledger,
        database: Server | None,
        say: Callable[[str], None],
    ):
        self._program, self._ledger, self._database = program, ledger, database
        self._rng, self._within_s, self._say = rng, within_s, say
        timed = [kind for kind in KINDS[:3] for _ in range(counts[kind])]
        rng.shuffle(timed)
        span = seconds * _UNTIL
        # spread out, each within a part of its own
        self._due = [
            ((at + rng.random()) * span / len(timed), kind) for at, kind in enumerate(timed)
        ]
        self._anytime = counts["anytime"]
        self._next = self._delay()
        self.log: list[dict] = []
        # Looks at the state of the cycle that found so many versions deployed.
        self.looks: collections.Counter[int] = collections.Counter()

    @property
    def left(self) -> int:
        """Kills that are still to come."""
        return len(self._due) + self._anytime

    def run(self, over: Callable[[], bool]) -> None:
        """Strikes until it is over."""
        begin = time.monotonic()
        while not over():
            self._program.check()
            state = self.state()
            elapsed = time.monotonic() - begin
            for due in [one for one in self._due if one[0] <= elapsed]:
                if self._strikable(due[1], state):
                    self._due.remove(due)
                    self.strike(due[1], state)
                    break
            since_s = self._program.seconds - self._program.lives[-1].began_s
            if self._anytime and since_s >= self._next:
                self._anytime -= 1
                self._next = self._delay()
                self.strike("anytime", state)
            time.sleep(_LOOK_S)

    def state(self) -> str:
        """Stage of the cycle; "" while the database does not say. Counts the versions deployed."""
        try:
            state, deployed = self._ledger.deployed()
        except SQLAlchemyError:
            return ""
        self.looks[deployed] += 1
        return state

    def strike(self, kind: str, state: str) -> None:
        """Kills one part and starts it again."""
        program = self._program
        since_s = program.seconds - program.lives[-1].began_s
        done = {
            "what": kind,
            "at_s": round(program.seconds, 1),
            "state": state,
            "ready": program.ready,
            "after_start_s": round(since_s, 1),
        }
        if kind == "database":
            assert self._database is not None
            down = time.monotonic()
            self._database.kill()
            self._database.start()
            done["down_s"] = round(time.monotonic() - down, 2)
        else:
            program.kill()
            program.start()
        self.log.append(done)
        self._say(f"kill {len(self.log)}, {self.left} left: {done}")

    def _strikable(self, kind: str, state: str) -> bool:
        if kind == "database":
            return self._program.ready
        return self._program.ready and (state == "train") == (kind == "trainer") and state != ""

    def _delay(self) -> float:
        return self._rng.uniform(0.0, self._within_s)
