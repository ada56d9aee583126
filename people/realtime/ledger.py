"""The cycle's rows in the database: what is so, and each edge as one transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, Row, insert, select, update
from sqlalchemy.exc import IntegrityError

from people.feedback import database
from people.realtime.parts import Overtaken
from people.realtime.tables import ALARMS, CYCLES, EDGES, VERSIONS

# Version -> the version that it was trained from, None for the first, and by how many updates, None
# where they were not counted.
type Tree = Mapping[int, tuple[int | None, int | None]]

# How a cycle can end.
ENDS = ("promoted", "rolled_back", "refused")


class Ledger:
    """Reads and writes of the cycle's tables."""

    def __init__(self, engine: sqlalchemy.Engine):
        self.engine = engine

    def start(self, version: int, at: float) -> None:
        """Makes the tables, the first version and the first cycle, where there are none."""
        database.migrate(self.engine)
        try:
            with self.engine.begin() as connection:
                if connection.execute(select(CYCLES.c.number)).first() is None:
                    first = {"version": version, "parent": None, "state": "deployed"}
                    connection.execute(insert(VERSIONS).values(first))
                    _begin(connection, 1, version, at)
        except IntegrityError:
            pass  # another process has just done it

    def exists(self) -> bool:
        """True if a cycle was ever started here. The tables alone may be another's."""
        if not sqlalchemy.inspect(self.engine).has_table(CYCLES.name):
            return False
        with database.reading(self.engine) as connection:
            return connection.execute(select(CYCLES.c.number).limit(1)).first() is not None

    def current(self) -> Row:
        """The open cycle."""
        with database.reading(self.engine) as connection:
            return connection.execute(select(CYCLES).where(CYCLES.c.ended_at.is_(None))).one()

    def deployed(self) -> tuple[str, int]:
        """The state of the open cycle, and how many versions are deployed at that moment."""
        count = select(sqlalchemy.func.count()).where(VERSIONS.c.state == "deployed")
        with database.reading(self.engine) as connection:
            state = connection.scalar(select(CYCLES.c.state).where(CYCLES.c.ended_at.is_(None)))
            return state, connection.scalar(count.select_from(VERSIONS))

    def edge(
        self,
        row: Row,
        after: str,
        at: float,
        reason: str,
        *,
        changes: Mapping[str, Any] | None = None,
        versions: Sequence[tuple[int, str]] = (),
        new_version: int | None = None,
        updates: int | None = None,
    ) -> None:
        """Takes an edge, all of it or nothing.

        row: the cycle as it was read. after: the state it goes to; one of ``ENDS`` ends it and
        begins the next. changes: further columns of the cycle. versions: versions and their new
        states, in this order. new_version: a candidate that is known from now on, of the base.
        updates: how many made the cycle's candidate, where that is known from now on.

        Raises Overtaken if the cycle is not as it was read any more.
        """
        ended = after in ENDS
        values = {"state": after, "edges": row.edges + 1, **(changes or {})}
        if ended:
            values["ended_at"] = at
        with self.engine.begin() as connection:
            same = (CYCLES.c.number == row.number) & (CYCLES.c.edges == row.edges)
            if connection.execute(update(CYCLES).where(same).values(values)).rowcount != 1:
                raise Overtaken(
                    f"cycle {row.number} has left {row.state!r} while this process was at it"
                )
            edge = {"cycle": row.number, "number": row.edges + 1, "at": at, "reason": reason}
            connection.execute(insert(EDGES).values(**edge, before=row.state, after=after))
            if new_version is not None:
                new = {"version": new_version, "parent": row.base, "state": "training"}
                connection.execute(insert(VERSIONS).values(new))
            for version, state in versions:
                one = VERSIONS.c.version == version
                connection.execute(update(VERSIONS).where(one).values(state=state))
            if updates is not None:
                one = VERSIONS.c.version == row.candidate
                connection.execute(update(VERSIONS).where(one).values(updates=updates))
            if ended:
                deployed = select(VERSIONS.c.version).where(VERSIONS.c.state == "deployed")
                _begin(connection, row.number + 1, connection.execute(deployed).scalar_one(), at)

    def note_look(self, row: Row, look: Mapping[str, Any]) -> None:
        """Keeps what the test says so far, if the cycle is still as it was read."""
        same = (CYCLES.c.number == row.number) & (CYCLES.c.edges == row.edges)
        with self.engine.begin() as connection:
            connection.execute(update(CYCLES).where(same).values(look=dict(look)))

    def raise_alarm(
        self, cycle: int, monitor: str, at: float, text: str, sessions: Sequence[str]
    ) -> bool:
        """Writes an alarm down; False if this monitor has raised one in this cycle already."""
        row = {"cycle": cycle, "monitor": monitor, "at": at, "text": text}
        try:
            with self.engine.begin() as connection:
                connection.execute(insert(ALARMS).values(**row, sessions=list(sessions)))
        except IntegrityError:
            return False
        return True

    def acknowledge(self, cycle: int, monitor: str, at: float) -> bool:
        """Lets the cycle go on in spite of an alarm; False if there is no such alarm."""
        one = (ALARMS.c.cycle == cycle) & (ALARMS.c.monitor == monitor)
        open_one = one & ALARMS.c.acknowledged_at.is_(None)
        with self.engine.begin() as connection:
            connection.execute(update(ALARMS).where(open_one).values(acknowledged_at=at))
            return connection.execute(select(ALARMS.c.cycle).where(one)).first() is not None

    def alarms(self, cycle: int) -> dict[str, bool]:
        """Monitor -> whether its alarm was acknowledged, of a cycle."""
        found = select(ALARMS.c.monitor, ALARMS.c.acknowledged_at).where(ALARMS.c.cycle == cycle)
        with database.reading(self.engine) as connection:
            return {name: at is not None for name, at in connection.execute(found)}

    def tree(self) -> Tree:
        """The versions that there are."""
        return {row.version: (row.parent, row.updates) for row in self.rows(VERSIONS)}

    def rows(self, table: sqlalchemy.Table, last: int | None = None) -> Sequence[Row]:
        """Rows of a table in the order of its key; the last ones if a number is given."""
        keys = list(table.primary_key.columns)
        order = keys if last is None else [key.desc() for key in keys]
        with database.reading(self.engine) as connection:
            found = connection.execute(select(table).order_by(*order).limit(last)).all()
        return found if last is None else found[::-1]


def _begin(connection: Connection, number: int, base: int, at: float) -> None:
    row = {"number": number, "state": "collect", "edges": 0, "base": base, "began_at": at}
    connection.execute(insert(CYCLES).values(row))


def forget_sessions(connection: Connection, sessions: Collection[str]) -> None:
    """Removes the names of sessions from alarms, as ``feedback.store.FeedbackStore`` asks for it
    when their answers go.
    """
    for row in connection.execute(select(ALARMS)).all():
        left = [name for name in row.sessions if name not in sessions]
        if len(left) < len(row.sessions):
            one = (ALARMS.c.cycle == row.cycle) & (ALARMS.c.monitor == row.monitor)
            connection.execute(update(ALARMS).where(one).values(sessions=left))


def distance(tree: Tree, one: int, other: int) -> int | None:
    """Updates between two versions, on the way from one to the other through the tree; None if they
    have no common ancestor, or where somebody on the way was not counted.
    """
    ways = [_way(tree, one), _way(tree, other)]
    common = next((version for version in ways[0] if version in ways[1]), None)
    if common is None:
        return None
    made = [ways[0][common], ways[1][common]]
    return None if None in made else sum(made)


def _way(tree: Tree, version: int) -> dict[int, int | None]:
    """Ancestor -> updates since, nearest first, the version itself among them."""
    found: dict[int, int | None] = {version: 0}
    at, since = version, 0
    while (here := tree.get(at)) is not None and here[0] is not None:
        parent, updates = here
        since = None if since is None or updates is None else since + updates
        found[parent] = since
        at = parent
    return found
