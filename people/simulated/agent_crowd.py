"""Simulated people who work with a served agent, in processes of their own.

    with Crowd(AgentCrowdConfig(tasks=..., tools=...), "http://127.0.0.1:8000/v1"): ...

Each person has an API key of their own, a kind of habits, and one want after the other. One who has
left does not come back: another one with another key takes the place. How content they truly are is
written to a file on their own side (``truth``), which the server does not know of.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from people.feedback.records import Event
from people.simulated.agent_habits import KINDS
from people.simulated.agent_person import AgentPerson, Happened, is_late, unhurried
from people.simulated.agent_session import Desk, Session, Tried
from people.simulated.client import Client
from people.simulated.crowd import Turns, run_until_left
from people.simulated.fit import embedded
from people.simulated.own_tools import OwnTools
from people.simulated.post import Post
from rl_code.config import read_config
from rl_code.config.named import Named
from rl_code.config.read_config import at_least
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.tasks.api import find_source
from rl_code.types import Limits


@dataclasses.dataclass(frozen=True)
class AgentCrowdConfig:
    """Simulated people who bring tasks to an agent."""

    program: ClassVar[str] = "people.simulated.agent_crowd"

    # Source of what they want (a key of ``tasks.api.SOURCES`` or ``package.module:object``), whose
    # tasks have hidden tests and a reference; and the tools that they carry out for the agent.
    tasks: Named
    tools: tuple[Named, ...]
    # Number of places for persons, of the kinds in turn (``agent_habits.KINDS``).
    people: int = 64
    kinds: tuple[str, ...] = ("steady", "careful", "hurried", "terse")
    processes: int = 1
    # Persons of a process who are at work at once.
    at_once: int = 8
    # Messages of the agent in answer to one of the person's, and tokens of each.
    turns: int = 2
    turn_tokens: int = 64
    # Average seconds by which late and rare events come after the others.
    late_s: float = 2.0
    # True for people who look only every few hours: they run their tests on all that they find, and
    # tell what became of it, and nothing earlier (``agent_person.is_late``).
    seldom: bool = False
    # Another seed gives other persons.
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, people=1, processes=1, at_once=1, turns=1, turn_tokens=1, late_s=0)
        unknown = sorted(set(self.kinds) - KINDS.keys())
        if unknown or not self.kinds:
            raise ValueError(f"kinds={self.kinds} must be some of {', '.join(KINDS)}")
        if self.processes > self.people:
            raise ValueError(f"{self.processes=} must be at most {self.people=}")


class AgentPersons:
    """The persons of one process, who take turns."""

    def __init__(
        self,
        config: AgentCrowdConfig,
        url: str,
        number: int,
        truth: Path | None = None,
        *,
        client: Callable[..., Client] = Client,
    ):
        """truth: a file for how content they truly are; None for none. client: makes the connection
        of a session.
        """
        self._config, self._url, self._truth = config, url, truth
        self._client = client
        # Place -> how many have left it, and disappointments in a row of whoever has it.
        self._left: dict[int, int] = {}
        self._row: dict[int, int] = {}
        self._turns = Turns(range(number, config.people, config.processes))
        self._lock = threading.Lock()
        self._fit = embedded()
        limits = Limits(
            turns=config.turns,
            tokens=1 << 20,
            turn_tokens=config.turn_tokens,
            test_runs=config.turns,
            command_s=5.0,
        )
        pool = SandboxPool(SandboxConfig(workers=1))
        self._desk = Desk(OwnTools(find_tools(config.tools, "config.tools")), pool, limits)
        self._tasks = find_source(config.tasks, "config.tasks").load(pool, None)
        self.post = Post(config.late_s)

    def session(self) -> None:
        """The next person who is free has one session. Raises ServerRefused."""
        self.have(self._turns.take(), uuid.uuid4().hex)

    def have(self, place: int, session: str) -> list[Tried]:
        """One session of whoever has a place, by a name of its own."""
        config = self._config
        name = f"{config.seed}-{place}-{self._left.get(place, 0)}"
        kind = config.kinds[place % len(config.kinds)]
        habits = unhurried(KINDS[kind]) if config.seldom else KINDS[kind]
        person = AgentPerson(self._fit, habits, name, session)
        client = self._client(self._url, f"agent-person-{name}", session=session)
        # deliveries come from another thread, and later
        courier = self._client(self._url, f"agent-person-{name}", session=session)
        rng = random.Random(f"session/{name}/{session}")
        task = self._tasks[rng.randrange(len(self._tasks))]
        mail = _Mail(session)
        lock = threading.Lock()

        def send(events: Sequence[Event]) -> None:
            with lock:
                courier.report(events)

        def report(one: Happened) -> None:
            if config.seldom and not is_late(one):
                return
            self.post.take(mail.events(one), person.habits, rng, send)

        try:
            tried = Session(person, client, self._desk, task, report).work(self._row.get(place, 0))
        finally:
            client.close()
        self._note_mood(place, tried, report, person)
        self._write_truth(kind, name, session, tried)
        return tried

    def _note_mood(self, place: int, tried: list[Tried], report: Any, person: AgentPerson) -> None:
        """Counts disappointments in a row; whoever has had enough of them leaves."""
        row = self._row.get(place, 0)
        for one in tried:
            row = row + 1 if one.decision.disappointed else 0
        self._row[place] = row
        if row >= person.habits.leaves:
            last = tried[-1].turn
            report(Happened(last.answers or last.questions, "left", 60.0, 1.0))
            self._left[place] = self._left.get(place, 0) + 1
            self._row[place] = 0

    def _write_truth(self, kind: str, name: str, session: str, tried: list[Tried]) -> None:
        """Appends a line for each turn: what only this side knows."""
        if self._truth is None:
            return
        lines = [
            json.dumps(
                {
                    "at": time.time(),
                    "session": session,
                    "person": name,
                    "kind": kind,
                    "model": one.model,
                    "answers": [*one.turn.answers, *one.turn.questions],
                    "right": one.turn.right,
                    "ambiguous": one.turn.ambiguous,
                    "questions": len(one.turn.questions),
                    "satisfaction": one.decision.satisfaction,
                }
            )
            for one in tried
        ]
        with self._lock, open(self._truth, "a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))


class _Mail:
    """Makes events with keys that no other session has."""

    def __init__(self, session: str):
        self._session, self._number = session, 0

    def events(self, one: Happened) -> list[Event]:
        """The event of each answer to which something happened."""
        found = []
        for answer in one.answers:
            self._number += 1
            key = hashlib.sha256(f"{self._session}/{self._number}".encode()).hexdigest()[:32]
            at = time.time() + one.after_s
            found.append(
                Event(key, answer, one.kind, at, one.value, one.horizon_s, dict(one.extra))
            )
        return found


def main() -> None:
    """Run one process of the crowd. Its task is a line on standard input, whose end stops it."""
    task = json.loads(sys.stdin.readline())
    config = read_config.build(AgentCrowdConfig, task["config"])
    truth = Path(task["truth"]) if task.get("truth") else None
    persons = AgentPersons(config, task["url"], task["number"], truth)
    threading.Thread(target=persons.post.run, daemon=True).start()
    run_until_left(persons.session, config.at_once)


if __name__ == "__main__":
    main()
