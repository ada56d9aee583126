"""Queries that several methods of the store share, on a connection that is in a transaction."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, select, update

from people.feedback.outcomes import Result
from people.feedback.records import AnswerRecord, Event
from people.feedback.tables import ANSWERS, EVENTS, TRAINING_SETS, USES

# How many values a statement names at once; databases limit that.
CHUNK = 1_000

type Joined = list[tuple[AnswerRecord, list[Event]]]


def rows_of(connection: Connection, query: Any, column: Any, values: Collection[str]) -> list[Row]:
    """The rows of a query in which a column has one of some values, however many these are."""
    rows: list[Row] = []
    for chunk in itertools.batched(sorted(values), CHUNK):
        rows += connection.execute(query.where(column.in_(chunk))).all()
    return rows


def known_of(connection: Connection, ids: Collection[str]) -> dict[str, Row]:
    """Answer -> its user and ``answered_at``, of those that are recorded."""
    query = select(ANSWERS.c.id, ANSWERS.c.user, ANSWERS.c.answered_at)
    return {row.id: row for row in rows_of(connection, query, ANSWERS.c.id, ids)}


def event_of(row: Row) -> Event:
    """A row of ``EVENTS`` as it was sent."""
    return Event(**{field.name: getattr(row, field.name) for field in dataclasses.fields(Event)})


def answer_of(row: Row) -> AnswerRecord:
    """A row of ``ANSWERS`` as it was recorded."""
    fields = dataclasses.fields(AnswerRecord)
    return AnswerRecord(**{field.name: getattr(row, field.name) for field in fields})


def join(
    connection: Connection, ids: Sequence[str], watermark: float | ColumnElement[float] | None
) -> Joined:
    """Answers, in the order of their ids, each with its events in the order of their times.

    Answers that are not there are left out, and so are events received after the watermark: Unix
    seconds, or an expression for a row of ``EVENTS`` (``age``).
    """
    answers = {
        row.id: answer_of(row) for row in rows_of(connection, select(ANSWERS), ANSWERS.c.id, ids)
    }
    query = (
        select(EVENTS)
        if watermark is None
        else select(EVENTS).where(EVENTS.c.received_at <= watermark)
    )
    events: dict[str, list[Event]] = {id: [] for id in answers}
    for row in rows_of(connection, query, EVENTS.c.answer, answers):
        if row.user == answers[row.answer].user:  # it came before the answer, from somebody else
            events[row.answer].append(event_of(row))
    for one in events.values():
        one.sort(key=lambda event: (event.at, event.key))
    return [(answers[id], events[id]) for id in ids if id in answers]


def age(seconds: float) -> ColumnElement[float]:
    """The watermark of each event: the time when its answer was so old."""
    recorded = select(ANSWERS.c.recorded_at).where(ANSWERS.c.id == EVENTS.c.answer)
    return recorded.scalar_subquery() + seconds


def earlier_of(connection: Connection, answers: Sequence[AnswerRecord]) -> list[AnswerRecord]:
    """As ``FeedbackStore.earlier``."""
    ids = {answer.id for answer in answers}
    # (user, session) -> when the last of these answers that goes on from others was asked for
    last: dict[tuple[str, str], float] = {}
    for answer in answers:
        if answer.kept:
            session = answer.user, answer.session
            last[session] = max(last.get(session, answer.asked_at), answer.asked_at)
    found = []
    for chunk in itertools.batched(sorted(last), CHUNK):
        # users have an index, and sessions none
        theirs = ANSWERS.c.user.in_({user for user, _ in chunk})
        query = select(ANSWERS).where(theirs, ANSWERS.c.session.in_([name for _, name in chunk]))
        found += [answer_of(row) for row in connection.execute(query)]
    return [
        one
        for one in found
        if one.id not in ids and one.asked_at <= last.get((one.user, one.session), -math.inf)
    ]


def digest_of(joined: Joined) -> str:
    """SHA-256, in hex digits, of answers' ids and of their events."""
    found = hashlib.sha256()
    for answer, events in joined:
        said = [dataclasses.astuple(event) for event in events]
        found.update(json.dumps([answer.id, said], sort_keys=True).encode() + b"\n")
    return found.hexdigest()


def training_set_of(connection: Connection, cycle: int) -> Row | None:
    """The row of a cycle; None before it was marked."""
    return connection.execute(
        select(TRAINING_SETS).where(TRAINING_SETS.c.cycle == cycle)
    ).one_or_none()


def remove_answers(connection: Connection, ids: Sequence[str], mark: str) -> tuple[int, ...]:
    """Removes answers and their uses. Adds their number to the column ``mark`` of the training sets
    that held them; the cycles of these.
    """
    numbers: dict[int, int] = {}
    for row in rows_of(connection, select(USES.c.cycle, USES.c.answer), USES.c.answer, ids):
        numbers[row.cycle] = numbers.get(row.cycle, 0) + 1
    for cycle, number in sorted(numbers.items()):
        column = TRAINING_SETS.c[mark]
        statement = update(TRAINING_SETS).where(TRAINING_SETS.c.cycle == cycle)
        connection.execute(statement.values({mark: column + number}))
    for chunk in itertools.batched(ids, CHUNK):
        connection.execute(delete(USES).where(USES.c.answer.in_(chunk)))
        connection.execute(delete(ANSWERS).where(ANSWERS.c.id.in_(chunk)))
    return tuple(sorted(numbers))


def results_of(
    events: Sequence[Event],
    refused: Mapping[str, str],
    full: Collection[str],
    new: set[str],
    known: Collection[str],
    kept: Mapping[str, Event],
) -> list[Result]:
    """Outcome of each event that a user sent.

    refused: key -> why. full: keys of those whose answer has too many events. new: keys of those
    that were written now; changed here. known: answers that are recorded. kept: the event that has
    a key.
    """
    results = []
    for event in events:
        if event.key in refused:
            results.append(Result(event.key, "refused", refused[event.key]))
        elif event.key in full:
            why = f"the answer {event.answer!r} has as many events as are kept of one"
            results.append(Result(event.key, "refused", why))
        elif event.key in new:
            new.remove(event.key)  # the same key again in this list is a repetition
            status = "recorded" if event.answer in known else "waiting"
            results.append(Result(event.key, status))
        else:
            same = event == kept[event.key]
            why = "" if same else "the key was used for another event, which stays as it is"
            results.append(Result(event.key, "repeated", why))
    return results
