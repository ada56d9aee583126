"""Answers and events as they are written down, many of them in one transaction."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, func, select
from sqlalchemy.dialects import postgresql, sqlite

from people.feedback.checks import Claims
from people.feedback.identity import AnswerIds
from people.feedback.outcomes import Result
from people.feedback.records import AnswerRecord, Event
from people.feedback.rows import event_of, known_of, results_of, rows_of
from people.feedback.tables import ANSWERS, EVENTS, REFUSALS

# Events of one answer, above which further ones are refused. People and editors say ten to thirty;
# without a limit one answer is enough to fill the disk.
MOST_OF_ANSWER = 100
_INSERTS = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


@dataclasses.dataclass(frozen=True)
class Report:
    """Events that a user sent at once."""

    events: tuple[Event, ...]
    user: str


type Write = AnswerRecord | Report


class Writes:
    """Carries out what was handed in, a statement of each kind for all of it.

    Rows are written in the order of their keys, so that two transactions never wait for each other.
    ids, claims: as of ``store.FeedbackStore``.
    """

    def __init__(self, ids: AnswerIds | None, claims: Claims | None):
        self._ids = ids
        self._claims = claims

    def __call__(
        self, connection: Connection, writes: Sequence[Write], at: float
    ) -> list[bool | list[Result]]:
        """Carry out writes. Result of each: True for an answer that is new; the outcomes of events.

        at: when all this is recorded and received, in Unix seconds.
        """
        # Answers first: what was said of them in the same transaction finds them there.
        answers = [one for one in writes if isinstance(one, AnswerRecord)]
        reports = [one for one in writes if isinstance(one, Report)]
        new = iter(_insert_answers(connection, answers, at) if answers else ())
        results = iter(self._insert_reports(connection, reports, at) if reports else ())
        return [next(new if isinstance(one, AnswerRecord) else results) for one in writes]

    def _insert_reports(
        self, connection: Connection, reports: Sequence[Report], at: float
    ) -> list[list[Result]]:
        """Insert the events of reports, and return their outcomes, report by report."""
        known = known_of(connection, {one.answer for report in reports for one in report.events})
        refused = [self._refused(report, known, at) for report in reports]
        # user -> key -> the event that has it
        kept: dict[str, dict[str, Event]] = {report.user: {} for report in reports}
        counts: collections.Counter[str] = collections.Counter()
        for report, keys in zip(reports, refused, strict=True):
            counts[report.user] += len(keys)
            for event in report.events:
                if event.key not in keys:
                    kept[report.user].setdefault(event.key, event)
        full = _without_room(connection, kept)
        for user, keys in full.items():
            kept[user] = {key: event for key, event in kept[user].items() if key not in keys}
        new = _insert_events(connection, kept, at)
        for user, own in kept.items():
            query = select(EVENTS).where(EVENTS.c.user == user)
            there = rows_of(connection, query, EVENTS.c.key, own.keys() - new[user])
            own |= {row.key: event_of(row) for row in there}
        for user, number in sorted((+counts).items()):
            _count_refusals(connection, user, number, at)
        return [
            results_of(
                report.events,
                keys,
                full.get(report.user, set()),
                new[report.user],
                known,
                kept[report.user],
            )
            for report, keys in zip(reports, refused, strict=True)
        ]

    def _refused(self, report: Report, known: Mapping[str, Row], at: float) -> dict[str, str]:
        """Key -> why, of events about answers that were not given to their user, and of claims that
        cannot be true.
        """

        def why_not(event: Event) -> str:
            answer = known.get(event.answer)
            if answer is not None:
                own = answer.user == report.user
            else:
                own = self._ids is None or self._ids.issued_to(event.answer, report.user)
            if not own:
                return f"the answer {event.answer!r} was not given to this key"
            if self._claims is None:
                return ""
            return self._claims.why_not(event, None if answer is None else answer.answered_at, at)

        # one bad event refuses its key, also where another one has the same
        return {event.key: why for event in report.events if (why := why_not(event))}


def _insert(connection: Connection, table: Any) -> Any:
    """An INSERT that can say what happens to rows that are there already."""
    return _INSERTS[connection.dialect.name](table)


def _insert_answers(
    connection: Connection, answers: Sequence[AnswerRecord], at: float
) -> list[bool]:
    """Insert answers. True for each that is new; a second copy of an answer is not."""
    rows = [
        vars(answer) | {"extra": dict(answer.extra), "recorded_at": at}
        for answer in sorted(answers, key=lambda answer: answer.id)
    ]
    statement = _insert(connection, ANSWERS).on_conflict_do_nothing()
    new = set(connection.scalars(statement.returning(ANSWERS.c.id), rows))
    found = []
    for answer in answers:
        found.append(answer.id in new)
        new.discard(answer.id)
    return found


def _without_room(
    connection: Connection, events: Mapping[str, Mapping[str, Event]]
) -> dict[str, set[str]]:
    """User -> keys of the events whose answer has ``MOST_OF_ANSWER`` events of the user already.

    events: user -> key -> event. Processes that write at once may let in a few more.
    """
    asked = collections.Counter(
        (user, event.answer) for user, own in events.items() for event in own.values()
    )
    columns = EVENTS.c.user, EVENTS.c.answer
    query = select(*columns, func.count().label("number")).group_by(*columns)
    rows = rows_of(connection, query, EVENTS.c.answer, {answer for _, answer in asked})
    there = {(row.user, row.answer): row.number for row in rows}
    tight = {one for one in asked if there.get(one, 0) + asked[one] > MOST_OF_ANSWER}
    full: dict[str, set[str]] = {}
    for user in sorted({user for user, _ in tight}):
        own = {key: one for key, one in events[user].items() if (user, one.answer) in tight}
        # what is said again needs no room
        query = select(EVENTS.c.key).where(EVENTS.c.user == user)
        known = {row.key for row in rows_of(connection, query, EVENTS.c.key, own)}
        for key, event in own.items():
            if key not in known:
                place = user, event.answer
                there[place] = there.get(place, 0) + 1
                if there[place] > MOST_OF_ANSWER:
                    full.setdefault(user, set()).add(key)
    return full


def _insert_events(
    connection: Connection, events: Mapping[str, Mapping[str, Event]], at: float
) -> dict[str, set[str]]:
    """Writes events down unless their user has used their key; the keys of those that are new.

    events: user -> key -> event; so is the result.
    """
    rows = [
        vars(event) | {"extra": dict(event.extra), "user": user, "received_at": at}
        for user, own in sorted(events.items())
        for _, event in sorted(own.items())
    ]
    new: dict[str, set[str]] = {user: set() for user in events}
    if rows:
        statement = _insert(connection, EVENTS).on_conflict_do_nothing()
        returning = statement.returning(EVENTS.c.user, EVENTS.c.key)
        for user, key in connection.execute(returning, rows):
            new[user].add(key)
    return new


def _count_refusals(connection: Connection, user: str, number: int, at: float) -> None:
    statement = _insert(connection, REFUSALS).values(user=user, events=number, last_at=at)
    total = REFUSALS.c.events + number
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["user"], set_={"events": total, "last_at": at}
        )
    )
