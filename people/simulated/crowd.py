"""Simulated programmers in processes of their own, who use a server over HTTP as anybody would.

    with Crowd(CrowdConfig(people=64), "http://127.0.0.1:8000/v1"): ...

A process has several persons at work at once, each with an API key of their own. A session is a few
holes of files (``tasks.infill``), one after the other. What the server does with what they report,
and that it may have other clients, they do not know.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol

from people.simulated.at_work import Hole, work
from people.simulated.client import Client, ServerRefused
from people.simulated.fit import embedded
from people.simulated.programmer import NAMED, Programmer
from rl_code.config import read_config
from rl_code.config.read_config import at_least
from rl_code.environment.tools.suggest import around
from rl_code.tasks import infill

_ROOT = Path(__file__).parents[2]
# Seconds that a process has to end when it is told to.
_END_S = 10.0
# Seconds after which a person whose server refuses comes back.
_BACK_S = 1.0


class Crowded(Protocol):
    """Settings of people that processes of a program of their own are."""

    # Module that is run; it reads its task from the standard input, whose end stops it.
    program: ClassVar[str]
    processes: int


@dataclasses.dataclass(frozen=True)
class CrowdConfig:
    """Simulated people, and the files that they work on."""

    program: ClassVar[str] = "people.simulated.crowd"

    # Number of persons; they take turns.
    people: int = 64
    # Name of the simulator: a key of ``simulated.programmer.NAMED``.
    habits: str = "recorded"
    processes: int = 1
    # Persons of a process who are at work at once.
    at_once: int = 8
    # Holes of a session.
    holes: int = 4
    # Split that the files come from (``infill.generate``).
    split: str = "train"
    levels: tuple[int, ...] = (1, 2, 3)
    max_tokens: int = 24
    # True for people who look only hours later: they report what they kept, and nothing earlier.
    seldom: bool = False
    # Another seed gives other persons.
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, people=1, processes=1, at_once=1, holes=1, max_tokens=1)
        if self.habits not in NAMED:
            raise ValueError(f"habits={self.habits!r} must be one of {', '.join(NAMED)}")
        if self.processes > self.people:
            raise ValueError(f"{self.processes=} must be at most {self.people=}")


class Crowd:
    """The processes. A context manager, which ends them."""

    def __init__(self, config: Crowded, url: str, log: Path | None = None, **more: Any):
        """url: of the API, such as http://127.0.0.1:8000/v1. log: a file for what they complain
        about; None for the standard error. more: what else their program is told, plain JSON
        values.
        """
        self._log = open(log, "ab") if log else None
        settings = json.loads(read_config.to_json(config))
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", config.program],
                stdin=subprocess.PIPE,
                stderr=self._log,
                cwd=_ROOT,
                # they compute nothing with JAX, and must not take the devices
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
            for _ in range(config.processes)
        ]
        for number, process in enumerate(self._processes):
            task = {"url": url, "number": number, "config": settings, **more}
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.flush()  # and stays open: they end when it closes

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Raises RuntimeError if a process has ended by itself."""
        ended = [one.returncode for one in self._processes if one.poll() is not None]
        if ended:
            where = f"; see {self._log.name}" if self._log else ""
            raise RuntimeError(f"simulated programmers have ended with code {ended[0]}{where}")

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._log:
            self._log.close()


def holes_of(config: CrowdConfig, session: str) -> Iterator[Hole]:
    """The holes of a session; the same for the same name."""
    rng = random.Random(f"holes/{session}")
    for _ in range(config.holes):
        task = infill.generate(config.split, config.seed, rng.randrange(2**31), config.levels)
        yield Hole(*around(task), task.meta["wanted"])


def api_key(seed: int, person: int) -> str:
    """The key of a person; the same at every start, as people are. seed: of the crowd."""
    return f"person-{seed}-{person}"


class Turns:
    """Persons who take turns: each is drawn once before any comes again. For several threads."""

    def __init__(self, persons: Iterable[int]):
        """persons: their numbers."""
        self._all = list(persons)
        self._free: list[int] = []
        self._lock = threading.Lock()

    def take(self) -> int:
        """The number of the next person who is free."""
        with self._lock:
            if not self._free:
                self._free = self._all.copy()
            return self._free.pop(0)


class Persons:
    """The persons of one process, who take turns."""

    def __init__(self, config: CrowdConfig, url: str, number: int):
        self._config, self._url = config, url
        self._turns = Turns(range(number, config.people, config.processes))
        self._fit = embedded()

    def session(self) -> None:
        """The next person who is free has one session. Raises ServerRefused."""
        config = self._config
        person = self._turns.take()
        session = uuid.uuid4().hex
        programmer = Programmer(self._fit, NAMED[config.habits], f"{config.seed}/{person}", session)
        client = Client(self._url, api_key(config.seed, person), session=session)
        try:
            ways = dict(max_tokens=config.max_tokens, seldom=config.seldom)
            work(client, programmer, holes_of(config, session), **ways)
        finally:
            client.close()


def main() -> None:
    """Run one process of the crowd. Its task is a line on standard input, whose end stops it."""
    task = json.loads(sys.stdin.readline())
    config = read_config.build(CrowdConfig, task["config"])
    persons = Persons(config, task["url"], task["number"])
    run_until_left(persons.session, config.at_once)


def run_until_left(session: Callable[[], None], at_once: int) -> NoReturn:
    """Has sessions in so many threads until whoever started the process lets go of it."""
    stop = threading.Event()
    for _ in range(at_once):
        threading.Thread(target=_sessions, args=(session, stop), daemon=True).start()
    sys.stdin.read()  # returns when who started this ends or lets go
    stop.set()
    os._exit(0)  # requests that are on their way need not end


def _sessions(session: Callable[[], None], stop: threading.Event) -> None:
    """Session after session, until it is told to stop."""
    while not stop.is_set():
        try:
            session()
        except ServerRefused as error:
            print(error, file=sys.stderr, flush=True)
            stop.wait(_BACK_S)


if __name__ == "__main__":
    main()
