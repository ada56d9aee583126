"""The store of answers and events: durable, each counted once, and reproducible for training.

- What a call has written is on the disk when it returns, and after a kill there is all of a call or
  nothing.
- The same answer or event a second time changes nothing. An event may come before its answer: it is
  kept, and joins it whenever the two are there. It never joins an answer that was given to somebody
  else.
- A cycle trains on answers and on the events that were received up to a *watermark*. No event with
  an earlier time of receipt can appear later: the times are taken from one clock while a lock is
  held that a selection waits for.
- An answer is in the training set of at most one cycle; the database refuses a second.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, delete, func, insert, select

from people.feedback import database
from people.feedback.checks import Claims, check_answer, check_event
from people.feedback.identity import AnswerIds
from people.feedback.outcomes import Deleted, Result, Selection, SelectionChanged, TrainingSet
from people.feedback.records import AnswerRecord, Event
from people.feedback.rows import (
    Joined,
    digest_of,
    earlier_of,
    join,
    known_of,
    remove_answers,
    rows_of,
    training_set_of,
)
from people.feedback.tables import ANSWERS, EVENTS, REFUSALS, SUSPECTS, TRAINING_SETS, USES
from people.feedback.together import Together
from people.feedback.waiting import NO_WAIT, Wait
from people.feedback.writes import Report, Write, Writes

_DAY_S = 86_400.0


class FeedbackStore:
    """All processes of a system may have one on the same database; its methods may be called from
    any thread.
    """

    def __init__(
        self,
        url: str | Engine,
        *,
        ids: AnswerIds | None = None,
        claims: Claims | None = None,
        clock: Callable[[], float] | None = None,
        forget_sessions: Callable[[Connection, Collection[str]], None] = lambda *_: None,
    ):
        """url: of the database (``database.connect``), or an engine that others use too
        (``database.make_engine``). ids: tells at once whether an answer that is not recorded yet
        was given to the user who sends an event. claims: which claims of retention are recorded;
        None for all. clock: Unix seconds, for tests and simulations; None for the database's own
        clock. forget_sessions: removes the names of sessions whose answers go from tables of
        others, in the transaction that it is given.
        """
        if isinstance(url, Engine):
            self.engine = url
            database.migrate(url)
        else:
            self.engine = database.connect(url)
        self._clock = clock
        self._forget_sessions = forget_sessions
        self._is_file = self.engine.dialect.name == "sqlite"
        # SQLite lets one write at a time. Threads of a process wait here in turn instead of asking
        # the file again and again. In PostgreSQL it is for answers and events alone.
        self._turn = threading.Lock()
        self._writes = Writes(ids, claims)
        self._together = Together(self._turn, self._write_all)

    def __enter__(self) -> FeedbackStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Returns when all that was handed in is written, and closes idle connections."""
        self._together.close()
        self.engine.dispose()

    # Writing down

    def record_answer(self, answer: AnswerRecord) -> bool:
        """Writes an answer down; whether it is new. Raises ValueError for one that is malformed."""
        return self.submit_answer(answer).result()

    def submit_answer(self, answer: AnswerRecord) -> Future[bool]:
        """As ``record_answer``, without waiting for the disk: done once the answer is written.

        Callbacks of the future are called in the thread that writes, and should be short.
        """
        check_answer(answer)
        return self._together.submit(answer)

    def record_events(self, events: Sequence[Event], user: str) -> list[Result]:
        """Writes down events that a user sent, and says what became of each, in their order.

        Raises ValueError for one that is malformed; then none is written.
        """
        return self.submit_events(events, user).result()

    def submit_events(self, events: Sequence[Event], user: str) -> Future[list[Result]]:
        """As ``record_events``, without waiting for the disk, as ``submit_answer``."""
        for event in events:
            check_event(event)
        return self._together.submit(Report(tuple(events), user))

    def _write_all(self, writes: Sequence[Write]) -> Sequence[bool | list[Result]]:
        """Commit writes in one transaction, and return the result of each."""
        with database.writing(self.engine) as connection:
            return self._writes(connection, writes, self._now(connection))

    # Reading for training

    def select(
        self,
        watermark: float,
        versions: Collection[int],
        most: int = 0,
        wait: Wait = NO_WAIT,
    ) -> Selection:
        """The answers that a cycle may train on: whole, of these versions, and in no cycle yet.

        watermark: Unix seconds, not in the future. most: the newest so many of them; 0 for all.
        wait: answers that still wait for what people do are left out and counted; another one
        without events has the reward of silence. Writes nothing: ``mark_used`` does.

        Raises ValueError for a watermark in the future, after which events would still be received.
        """
        # Alone for as long as it takes to look at the clock: what others had begun to write is then
        # there, and whatever they write from now on is received after the watermark.
        with self._writing(alone=True) as connection:
            if watermark > (now := self._now(connection)):
                raise ValueError(f"{watermark=} lies after the database's time, {now}")
        with database.reading(self.engine) as connection:
            free = ~select(USES.c.answer).where(USES.c.answer == ANSWERS.c.id).exists()
            old = free & (ANSWERS.c.recorded_at <= watermark - wait.silence_s)
            whole = ANSWERS.c.finish_reason != "aborted"
            inside = ANSWERS.c.version.in_(list(versions))
            count = select(func.count()).select_from(ANSWERS)
            outside = connection.scalar(count.where(old, whole, ~inside))
            aborted = connection.scalar(count.where(old, ~whole))
            # Events are looked at of these alone: of the others there may be very many.
            wanted = free & whole & inside
            recorded = connection.scalar(count.where(wanted, ANSWERS.c.recorded_at <= watermark))
            ready = wanted & wait.is_over(watermark)
            waiting = recorded - connection.scalar(count.where(ready))
            query = select(ANSWERS.c.id, ANSWERS.c.session).where(ready)
            query = query.order_by(ANSWERS.c.recorded_at.desc(), ANSWERS.c.id.desc())
            rows = connection.execute(query.limit(most) if most else query).all()[::-1]
            ids = tuple(row.id for row in rows)
            digest = digest_of(join(connection, ids, watermark))
        sessions = len({row.session for row in rows})
        return Selection(ids, digest, watermark, sessions, outside, aborted, waiting)

    def joined(self, ids: Sequence[str], watermark: float | None = None) -> Joined:
        """Answers, in the order of their ids, each with its events in the order of their times.

        Answers that are deleted are left out. watermark: later events are left out; None for all.
        """
        with database.reading(self.engine) as connection:
            return join(connection, ids, watermark)

    def earlier(self, answers: Sequence[AnswerRecord]) -> list[AnswerRecord]:
        """Other answers of the sessions that these go on in, which were asked for before the last
        of them: used, cut off or of any version, since the policy has read them. None of sessions
        whose answers stand alone.
        """
        with database.reading(self.engine) as connection:
            return earlier_of(connection, answers)

    def digest(self, ids: Sequence[str], watermark: float) -> str:
        """The digest that a selection of these answers has."""
        return digest_of(self.joined(ids, watermark))

    def routed(self, versions: Collection[int], since: float) -> tuple[str, ...]:
        """Ids of the answers of these versions that were asked for since a time, in that order,
        used or not, for a comparison of arms.

        Those of people who asked for a version by its name are left out: they have chosen their
        arm. Aborted ones are among them: a version so slow that its people leave has many.
        """
        query = select(ANSWERS.c.id).where(
            ANSWERS.c.version.in_(list(versions)),
            ANSWERS.c.asked_at >= since,
            ANSWERS.c.arm != "",
        )
        with database.reading(self.engine) as connection:
            ordered = query.order_by(ANSWERS.c.asked_at, ANSWERS.c.id)
            return tuple(connection.scalars(ordered))

    def of_sessions(self, names: Collection[str] | None, since: float) -> tuple[str, ...]:
        """Ids of the whole answers that were asked for since a time, in that order. names: of their
        sessions; None for all.
        """
        query = select(ANSWERS.c.id, ANSWERS.c.asked_at).where(
            ANSWERS.c.asked_at >= since, ANSWERS.c.finish_reason != "aborted"
        )
        with database.reading(self.engine) as connection:
            if names is None:
                rows = connection.execute(query).all()
            else:
                rows = rows_of(connection, query, ANSWERS.c.session, names)
        return tuple(row.id for row in sorted(rows, key=lambda row: (row.asked_at, row.id)))

    # Cycles

    def mark_used(self, cycle: int, selection: Selection) -> None:
        """Makes a selection the training set of a cycle, all of it or nothing.

        The same again changes nothing. Raises SelectionChanged if an answer was deleted or is
        another cycle's, ValueError if the cycle has another training set.
        """
        with self._writing(alone=True) as connection:
            there = training_set_of(connection, cycle)
            if there is not None:
                if (there.digest, there.watermark) != (selection.digest, selection.watermark):
                    raise ValueError(f"cycle {cycle} has another training set: {there}")
                return
            known = known_of(connection, selection.ids)
            taken = rows_of(connection, select(USES.c.answer), USES.c.answer, selection.ids)
            if gone := sorted(set(selection.ids) - set(known)):
                raise SelectionChanged(
                    f"{len(gone)} selected answers were deleted, such as {gone[0]!r}"
                )
            if taken:
                raise SelectionChanged(
                    f"{len(taken)} selected answers are used, such as {taken[0][0]!r}"
                )
            row = {
                "cycle": cycle,
                "watermark": selection.watermark,
                "digest": selection.digest,
                "answers": len(selection.ids),
                "sessions": selection.sessions,
                "outside": selection.outside,
                "deleted": 0,
                "expired": 0,
            }
            connection.execute(insert(TRAINING_SETS).values(row))
            uses = [
                {"answer": id, "cycle": cycle, "place": place}
                for place, id in enumerate(selection.ids)
            ]
            if uses:
                connection.execute(insert(USES), uses)

    def used(self, cycle: int) -> Selection | None:
        """The training set of a cycle, without answers that were deleted since; None before it was
        marked. The digest is that of the whole one.
        """
        with database.reading(self.engine) as connection:
            row = training_set_of(connection, cycle)
            if row is None:
                return None
            query = select(USES.c.answer).where(USES.c.cycle == cycle).order_by(USES.c.place)
            ids = tuple(connection.scalars(query))
        return Selection(ids, row.digest, row.watermark, row.sessions, row.outside)

    def training_sets(self) -> list[TrainingSet]:
        """Training sets of all cycles, in order."""
        with database.reading(self.engine) as connection:
            rows = connection.execute(select(TRAINING_SETS).order_by(TRAINING_SETS.c.cycle))
            return [TrainingSet(**row._mapping) for row in rows]

    # Suspects and refusals

    def list_suspects(self, cycle: int, suspects: Sequence[Any]) -> None:
        """Replaces a cycle's list of suspects (``poisoning.Suspect``)."""
        rows = [{"cycle": cycle, **dataclasses.asdict(suspect)} for suspect in suspects]
        with self._writing() as connection:
            connection.execute(delete(SUSPECTS).where(SUSPECTS.c.cycle == cycle))
            if rows:
                connection.execute(insert(SUSPECTS), rows)

    def suspects(self, cycle: int) -> list[dict[str, Any]]:
        """A cycle's suspects: user, reason, weight and text, by weight."""
        columns = SUSPECTS.c.user, SUSPECTS.c.reason, SUSPECTS.c.weight, SUSPECTS.c.text
        query = select(*columns).where(SUSPECTS.c.cycle == cycle)
        query = query.order_by(SUSPECTS.c.weight, SUSPECTS.c.user, SUSPECTS.c.reason)
        with database.reading(self.engine) as connection:
            return [dict(row._mapping) for row in connection.execute(query)]

    def refusals(self) -> dict[str, int]:
        """User -> how many of the events that it sent were refused."""
        with database.reading(self.engine) as connection:
            return {row.user: row.events for row in connection.execute(select(REFUSALS))}

    def counts(self) -> dict[str, int]:
        """Numbers of answers, of aborted answers and of answers without events; of events, and of
        events that wait for an answer.
        """
        own = (EVENTS.c.answer == ANSWERS.c.id) & (EVENTS.c.user == ANSWERS.c.user)
        answers = select(func.count()).select_from(ANSWERS)
        events = select(func.count()).select_from(EVENTS)
        queries = {
            "answers": answers,
            "aborted": answers.where(ANSWERS.c.finish_reason == "aborted"),
            "silent": answers.where(~select(EVENTS.c.key).where(own).exists()),
            "events": events,
            "waiting": events.where(~select(ANSWERS.c.id).where(own).exists()),
        }
        with database.reading(self.engine) as connection:
            return {name: connection.scalar(query) for name, query in queries.items()}

    # Forgetting

    def delete_user(self, user: str) -> Deleted:
        """Removes a user's answers and events and what was derived of them, and marks the cycles
        whose training set held such answers.
        """
        with self._writing(alone=True) as connection:
            answers = self._ids_of(connection, ANSWERS.c.user == user)
            cycles = remove_answers(connection, answers, "deleted")
            events = connection.execute(delete(EVENTS).where(EVENTS.c.user == user)).rowcount
            for table in (REFUSALS, SUSPECTS):
                connection.execute(delete(table).where(table.c.user == user))
        self._overwrite()
        return Deleted(len(answers), events, cycles)

    def expire(self, now: float, keep_days: float, *, open_cycle: int | None = None) -> Deleted:
        """Removes answers recorded, and events received, more than so many days before a time.

        An event goes with its answer, too, and the suspects of a cycle with its watermark. Training
        sets count answers that went, apart from those that a person had deleted. open_cycle: one
        that has not been trained yet; its training set stays whole, with its events.
        """
        before = now - keep_days * _DAY_S
        with self._writing(alone=True) as connection:
            marked = select(USES.c.answer).where(USES.c.cycle == open_cycle)
            old = (ANSWERS.c.recorded_at < before) & ANSWERS.c.id.not_in(marked)
            late = (EVENTS.c.received_at < before) & EVENTS.c.answer.not_in(marked)
            theirs = EVENTS.c.answer.in_(select(ANSWERS.c.id).where(old))
            events = connection.execute(delete(EVENTS).where(late | theirs)).rowcount
            answers = self._ids_of(connection, old)
            cycles = remove_answers(connection, answers, "expired")
            connection.execute(delete(REFUSALS).where(REFUSALS.c.last_at < before))
            past = select(TRAINING_SETS.c.cycle).where(TRAINING_SETS.c.watermark < before)
            connection.execute(delete(SUSPECTS).where(SUSPECTS.c.cycle.in_(past)))
        self._overwrite()
        return Deleted(len(answers), events, cycles)

    def _ids_of(self, connection: Connection, which: ColumnElement[bool]) -> list[str]:
        """The answers that are about to go, whose sessions are named nowhere any more then."""
        rows = connection.execute(select(ANSWERS.c.id, ANSWERS.c.session).where(which)).all()
        self._forget_sessions(connection, {row.session for row in rows})
        return [row.id for row in rows]

    def _overwrite(self) -> None:
        """SQLite's log still holds the pages from before; it is copied into the file and emptied,
        unless another process reads just now. Then a later checkpoint does it.
        """
        if not self._is_file:
            return
        with self._turn:
            connection = self.engine.raw_connection()
            try:
                connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                connection.close()

    # Inside

    @contextmanager
    def _writing(self, *, alone: bool = False) -> Iterator[Connection]:
        if self._is_file:
            with self._turn, database.writing(self.engine) as connection:
                yield connection
        else:
            with database.writing(self.engine, alone=alone) as connection:
                yield connection

    def _now(self, connection: Connection) -> float:
        return database.now(connection) if self._clock is None else self._clock()
