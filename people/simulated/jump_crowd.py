"""Simulated programmers who edit several files and are shown where to go next, in processes of
their own.

    with Crowd(JumpCrowdConfig(people=64), "http://127.0.0.1:8000/v1"): ...

A session is one change that a person carries on (``tasks.jumps``). After each edit they ask the
server for the next place, with the page that an editor would send. They go there or not, edit at
the next place that their change needs, ask again, and once more when nothing is left. What became
of each jump is posted: most of it at once, some late, twice or never.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import ClassVar

from people.feedback.records import Event
from people.simulated.client import Client, Suggestion
from people.simulated.crowd import Turns, api_key, run_until_left
from people.simulated.fit import embedded
from people.simulated.jumper import JUMP_HABITS, Jumper
from people.simulated.post import Post
from rl_code.config import read_config
from rl_code.config.read_config import at_least
from rl_code.tasks import jump_page, jumps
from rl_code.tasks.jump_page import Place
from rl_code.tasks.jumps import Moment
from rl_code.tasks.stream import check_split

# Hands events on: to the post, as a rule.
type Tell = Callable[[Sequence[Event]], object]


@dataclasses.dataclass(frozen=True)
class JumpCrowdConfig:
    """Simulated people who edit several files, and the changes that they make."""

    program: ClassVar[str] = "people.simulated.jump_crowd"

    # Number of persons; they take turns.
    people: int = 64
    # Kind of programmer: a key of ``simulated.jumper.JUMP_HABITS``.
    habits: str = "usual"
    processes: int = 1
    # Persons of a process who are at work at once.
    at_once: int = 8
    # Times that a person asks in a session, at most; then a change that needs more is left alone.
    asks: int = 4
    # Split that the changes come from (``tasks.jumps.generate``), and the tokens of an answer.
    split: str = "train"
    max_tokens: int = 10
    # Average seconds by which late events come after the others.
    late_s: float = 2.0
    # Another seed gives other persons and other changes.
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, people=1, processes=1, at_once=1, asks=1, max_tokens=1, late_s=0)
        check_split(self.split)
        if self.habits not in JUMP_HABITS:
            raise ValueError(f"habits={self.habits!r} must be one of {', '.join(JUMP_HABITS)}")
        if self.processes > self.people:
            raise ValueError(f"{self.processes=} must be at most {self.people=}")


@dataclasses.dataclass
class Carried:
    """Counts of a session."""

    asked: int = 0
    shown: int = 0
    taken: int = 0
    # True if the change is whole.
    done: bool = False


def carry_on(
    client: Client,
    person: Jumper,
    moment: Moment,
    tell: Tell,
    *,
    asks: int,
    max_tokens: int,
    model: str = "auto",
    now: Callable[[], float] = time.time,
) -> Carried:
    """Carries a change on from a moment, without waiting as long as a person would.

    An answer that names no line of an open file is not shown, and nothing is reported about it, as
    in an editor. Whoever takes a jump edits there; whoever does not, or finds nothing to do there,
    edits at their own next place. Raises ServerRefused.
    """
    found = Carried()
    for _ in range(asks):
        page = moment.page()
        answer = client.suggest(page, "", model, max_tokens=max_tokens)
        found.asked += 1
        place = jump_page.read(answer.text, moment.files)
        taken = False
        if place is not None:
            taken = person.takes(str(place), moment.left)
            tell(_events(answer, taken, person.seconds(page, str(place)), now()))
            found.shown += 1
            found.taken += taken
        if not moment.remaining:
            found.done = True
            break
        moment = moment.edited(_goes(moment, place if taken else None))
    return found


def _goes(moment: Moment, jump: Place | None) -> Place:
    """The place at which the person edits. jump: the one that was taken."""
    left = [place for place, _ in moment.remaining]
    return jump if jump is not None and jump in left else left[0]


def _events(answer: Suggestion, taken: bool, seconds: float, at: float) -> list[Event]:
    """The events of a jump that was shown at Unix second ``at``, as an editor reports them."""

    def event(kind: str, after_s: float, value: float, **extra: str) -> Event:
        return Event(uuid.uuid4().hex, answer.id, kind, at + after_s, value, None, extra)

    shown = event("shown", 0.0, answer.seconds)
    if taken:
        return [shown, event("accepted", seconds, seconds)]
    return [shown, event("rejected", seconds, seconds, why="edited_elsewhere")]


class JumpPersons:
    """The persons of one process, who take turns."""

    def __init__(
        self,
        config: JumpCrowdConfig,
        url: str,
        number: int,
        *,
        client: Callable[..., Client] = Client,
    ):
        """client: makes the connection of a session."""
        self._config, self._url, self._client = config, url, client
        self._turns = Turns(range(number, config.people, config.processes))
        self._fit = embedded()
        self.post = Post(config.late_s)

    def session(self) -> None:
        """The next person who is free has one session. Raises ServerRefused."""
        self.have(self._turns.take(), uuid.uuid4().hex)

    def have(self, person: int, session: str) -> Carried:
        """One session of a person, by a name of its own. Raises ServerRefused."""
        config = self._config
        name, key = f"{config.seed}/{person}", api_key(config.seed, person)
        jumper = Jumper(self._fit, JUMP_HABITS[config.habits], name, session)
        rng = random.Random(f"session/{name}/{session}")
        moment = jumps.moment(config.split, config.seed, rng.randrange(2**31))
        client = self._client(self._url, key, session=session)
        # deliveries come from another thread, and later
        courier = self._client(self._url, key, session=session)
        lock = threading.Lock()

        def send(events: Sequence[Event]) -> None:
            with lock:
                courier.report(events)

        def tell(events: Sequence[Event]) -> None:
            self.post.take(events, jumper.habits, rng, send)

        try:
            asks, tokens = config.asks, config.max_tokens
            return carry_on(client, jumper, moment, tell, asks=asks, max_tokens=tokens)
        finally:
            client.close()


def main() -> None:
    """Run one process of the crowd. Its task is a line on standard input, whose end stops it."""
    task = json.loads(sys.stdin.readline())
    config = read_config.build(JumpCrowdConfig, task["config"])
    persons = JumpPersons(config, task["url"], task["number"])
    threading.Thread(target=persons.post.run, daemon=True).start()
    run_until_left(persons.session, config.at_once)


if __name__ == "__main__":
    main()
