"""The four parts without a model, a server or a person: numbers for weights, random people.

A rehearsal runs the real cycle, with its database, gate, test and monitors, in seconds. It shows
what a config of the cycle does before people meet it: how long a test takes, what a bad version
costs. A version is a file with its quality. People are random numbers around the quality of the
version that the fleet's routing gives them. Everything it writes is durable, so it can be killed
like the rest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy
from sqlalchemy import JSON, Column, Float, Index, Integer, MetaData, String, Table, func, select

from people.feedback.outcomes import Selection
from people.realtime.parts import Overtaken, Parts, Played, Routing, Sessions, never
from rl_code.config.read_config import at_least
from rl_code.host.files import write_atomically

METADATA = MetaData()

# A session of one answer each.
SESSIONS = Table(
    "rehearsal_sessions",
    METADATA,
    Column("number", Integer, primary_key=True),
    Column("user", String(32), nullable=False),
    Column("version", Integer, nullable=False),
    Column("at", Float, nullable=False),
    # Metric -> value.
    Column("values", JSON, nullable=False),
    # The cycle that trains on it; null while none does.
    Column("cycle", Integer),
)
# What was selected for a cycle, beside the sessions that are marked.
SELECTIONS = Table(
    "rehearsal_selections",
    METADATA,
    Column("cycle", Integer, primary_key=True, autoincrement=False),
    Column("watermark", Float, nullable=False),
    Column("outside", Integer, nullable=False),
)
Index("rehearsal_by_version", SESSIONS.c.version, SESSIONS.c.at)


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """Settings of the imagined people and the imagined training."""

    # People, and sessions that they have in one wait of the cycle.
    users: int = 600
    sessions: int = 200
    # The chance of accepting at first, and what a cycle of training adds to it.
    quality: float = 0.35
    gain: float = 0.04
    # Cycles whose versions are bad with people, by this much, while suites see nothing of it.
    bad: tuple[int, ...] = ()
    harm: float = 0.2
    # Cycles whose versions are worse on suites.
    broken: tuple[int, ...] = ()
    tasks: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, users=1, sessions=1, tasks=2)
        if not 0 < self.quality < 1:
            raise ValueError(f"{self.quality=} is a chance, above 0 and below 1")

    def make(self, engine: sqlalchemy.Engine, folder: Path, config: Any, clock: Any) -> Parts:
        """The parts, in a database and a folder; both may hold an earlier rehearsal.

        config: of the cycle, which a rehearsal does not need. clock: gives Unix seconds.
        """
        weights = Weights(folder / "versions")
        weights.write(0, {"quality": self.quality, "score": self.quality, "trained": []})
        fleet = FileFleet(folder / "fleet.json")
        store = RehearsalStore(engine)
        people = People(self, store, fleet, weights)
        return Parts(
            store,
            RehearsalTrainer(self, weights),
            fleet,
            RehearsalSuites(self, weights),
            lambda seconds, stop=never: people.come(self.sessions, clock()),
            metrics=METRICS,
            rates=RATES,
        )


class Weights:
    """Versions as JSON files."""

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, version: int) -> dict[str, Any]:
        return json.loads((self._folder / f"{version}.json").read_text())

    def has(self, version: int) -> bool:
        return (self._folder / f"{version}.json").exists()

    def write(self, version: int, content: Mapping[str, Any]) -> None:
        """Writes a version; one that is there already stays unless it is of another selection."""
        if not self.has(version) or self.read(version).get("digest") != content.get("digest"):
            data = json.dumps(content).encode()
            write_atomically(self._folder / f"{version}.json", data)


class FileFleet:
    """A fleet of one file."""

    def __init__(self, path: Path):
        self._path = path

    def apply(self, routing: Routing) -> None:
        now = self.routing()
        if now is not None and routing.turn < now.turn:
            raise Overtaken(f"{routing} is older than what is in force, {now}")
        if routing != now:
            write_atomically(self._path, json.dumps(dataclasses.asdict(routing)).encode())

    def routing(self) -> Routing | None:
        if not self._path.exists():
            return None
        fields = json.loads(self._path.read_text())
        return Routing(**fields | {"turn": tuple(fields["turn"])})


class RehearsalTrainer:
    """Adds to the quality of the base, and notes which answers it was of."""

    def __init__(self, config: Rehearsal, weights: Weights):
        self._config = config
        self._weights = weights

    def train(
        self,
        cycle: int,
        base: int,
        version: int,
        selection: Selection,
        behind: Mapping[int, int],
    ) -> int:
        config = self._config
        before = self._weights.read(base)
        score = before["score"] + (-0.2 if cycle in config.broken else config.gain)
        quality = before["quality"] + (-config.harm if cycle in config.bad else config.gain)
        content = {
            "quality": min(max(quality, 0.02), 0.98),
            "score": min(max(score, 0.02), 0.98),
            "digest": selection.digest,
            # every answer that is in these weights, those of the base too
            "trained": [*before["trained"], *selection.ids],
        }
        self._weights.write(version, content)
        return 1


# What suites say that every version did.
RATES = {"edits": 0.9, "invalid_calls": 0.01, "questions": 0.05, "tokens": 200.0}


class RehearsalSuites:
    """Tasks that differ in difficulty, so that a better version solves more of the same tasks."""

    def __init__(self, config: Rehearsal, weights: Weights):
        self._config = config
        self._weights = weights

    def play(self, version: int) -> Mapping[str, Played]:
        difficulties = np.linspace(-0.3, 0.3, self._config.tasks)
        score = self._weights.read(version)["score"]
        scores = {
            f"task-{i}": float(np.clip(score - one, 0, 1)) for i, one in enumerate(difficulties)
        }
        return {"rehearsal": Played(scores, RATES)}


class RehearsalStore:
    """Sessions in the database."""

    def __init__(self, engine: sqlalchemy.Engine):
        self.engine = engine
        METADATA.create_all(engine)

    def select(self, watermark: float, versions: Collection[int], most: int) -> Selection:
        columns = (SESSIONS.c.number, SESSIONS.c.version)
        unused = SESSIONS.c.cycle.is_(None) & (SESSIONS.c.at <= watermark)
        with self.engine.connect() as connection:
            rows = connection.execute(
                select(*columns).where(unused).order_by(SESSIONS.c.number)
            ).all()
        ids = [row.number for row in rows if row.version in versions]
        return _selection(ids[-most:] if most else ids, watermark, len(rows) - len(ids))

    def used(self, cycle: int) -> Selection | None:
        kept = select(SELECTIONS).where(SELECTIONS.c.cycle == cycle)
        marked = select(SESSIONS.c.number).where(SESSIONS.c.cycle == cycle)
        with self.engine.connect() as connection:
            row = connection.execute(kept).first()
            ids = list(connection.execute(marked.order_by(SESSIONS.c.number)).scalars())
        return _selection(ids, row.watermark, row.outside) if row and ids else None

    def mark_used(self, cycle: int, selection: Selection) -> None:
        ids = [int(one) for one in selection.ids]
        free = SESSIONS.c.cycle.is_(None) | (SESSIONS.c.cycle == cycle)
        # as rows rather than a list in the statement, which databases limit
        one = (SESSIONS.c.number == sqlalchemy.bindparam("id")) & free
        statement = sqlalchemy.update(SESSIONS).where(one).values(cycle=cycle)
        with self.engine.begin() as connection:
            connection.execute(statement, [{"id": id} for id in ids])
            # read within the transaction: all, or the exception undoes it
            mine = select(func.count()).where(SESSIONS.c.cycle == cycle)
            count = connection.execute(mine).scalar_one()
            if count != len(ids):
                raise ValueError(f"cycle {cycle}: {count} of {len(ids)} answers are its own")
            kept = select(SELECTIONS.c.cycle).where(SELECTIONS.c.cycle == cycle)
            if connection.execute(kept).first() is None:
                row = {"cycle": cycle, "watermark": selection.watermark}
                connection.execute(
                    sqlalchemy.insert(SELECTIONS).values(**row, outside=selection.outside)
                )

    def sessions(self, versions: Collection[int], since: float) -> Sessions:
        wanted = SESSIONS.c.version.in_(list(versions)) & (SESSIONS.c.at >= since)
        with self.engine.connect() as connection:
            rows = connection.execute(select(SESSIONS).where(wanted).order_by(SESSIONS.c.at)).all()
        names = rows[0].values.keys() if rows else METRICS
        return Sessions(
            np.array([f"session-{row.number}" for row in rows], dtype=object),
            np.array([row.user for row in rows], dtype=object),
            np.array([row.version for row in rows], np.int64),
            np.array([row.at for row in rows], np.float64),
            {name: np.array([row.values[name] for row in rows], np.float64) for name in names},
        )

    def expire(self, cycle: int, now: float) -> None:
        """Nothing here is about anybody."""

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        with self.engine.begin() as connection:
            connection.execute(sqlalchemy.insert(SESSIONS), list(rows))

    def count(self) -> int:
        with self.engine.connect() as connection:
            return connection.execute(select(func.count()).select_from(SESSIONS)).scalar_one()


METRICS = (
    "accepted",
    "retained",
    "edits",
    "reward",
    "questions",
    "invalid_calls",
    "length",
    "latency",
)


class People:
    """Come, get the version of their arm, and do what its quality makes likely."""

    def __init__(
        self, config: Rehearsal, store: RehearsalStore, fleet: FileFleet, weights: Weights
    ):
        self._config = config
        self._store = store
        self._fleet = fleet
        self._weights = weights
        # what people bring with them, whatever they are served
        self._habits = np.random.default_rng([config.seed, 0]).normal(0, 0.1, config.users)

    def come(self, sessions: int, at: float) -> None:
        """A number of sessions, all of which end at a time (Unix seconds)."""
        routing = self._fleet.routing()
        if routing is None:
            return  # nobody is served yet
        rng = np.random.default_rng([self._config.seed, 1 + self._store.count()])
        qualities = {one: self._weights.read(one)["quality"] for one in routing.versions}
        rows = []
        for user in rng.integers(0, self._config.users, sessions):
            version = arm_of(f"user-{user}", routing)
            chance = float(np.clip(qualities[version] + self._habits[user], 0.02, 0.98))
            rows.append(
                {
                    "user": f"user-{user}",
                    "version": version,
                    "at": at,
                    "values": _behaviour(rng, chance),
                }
            )
        self._store.add(rows)


def arm_of(user: str, routing: Routing) -> int:
    """The version that a user gets: sticky within an experiment, and needs no table."""
    if routing.control is not None and _place("control", user) < routing.control_share:
        return routing.control
    if routing.candidate is None:
        return routing.deployed
    chosen = _place(routing.experiment, user) < routing.share
    return routing.candidate if chosen else routing.deployed


def _place(experiment: str, user: str) -> float:
    """Place of a user among all, 0 to 1; another one in each experiment."""
    hashed = hashlib.sha256(f"{experiment}/{user}".encode()).digest()
    return int.from_bytes(hashed[:8]) / 2**64


def _behaviour(rng: np.random.Generator, chance: float) -> dict[str, float]:
    """Metrics of one session of a person who accepts with this chance."""
    accepted = float(rng.random() < chance)
    return {
        "accepted": accepted,
        "retained": float(rng.beta(8 * chance, 8 * (1 - chance))),
        "edits": float(rng.random() < 0.9),
        "reward": 0.75 if accepted else -0.25,
        "questions": float(rng.random() < 0.05),
        "invalid_calls": float(rng.random() < 0.05 * (1 - chance)),
        "length": float(rng.lognormal(5, 0.4)),
        "latency": float(rng.lognormal(-1, 0.3)),
    }


def _selection(ids: list[int], watermark: float, outside: int) -> Selection:
    names = tuple(map(str, ids))
    digest = hashlib.sha256(",".join(names).encode()).hexdigest()
    return Selection(names, digest, watermark, len(names), outside)
