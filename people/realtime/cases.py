"""Recorded sessions as tasks: rows of a suite that the gate plays, and cases of the red team.

Both need what was known about the task. A server that gives out tasks itself writes it into
``AnswerRecord.extra`` of an agent's answers; else the agent's program, which alone knows it, says
it in ``Event.extra`` of an event of its own answers, such as "opened":

    "record"  the task as a row of ``tasks.records.COLUMNS``: messages, files, tests
    "files"   path -> text of what the session had changed by this answer; null for a deleted file

A session without them has no tests to be graded by. It is counted and left out. Suggestions in an
editor need none (``kept``).

The file of sessions has a line of JSON for each answer: ``{"answer": {...}, "events": [...]}`` with
the fields of ``AnswerRecord`` and ``Event`` (``launch.export_sessions``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from people.feedback.records import AnswerRecord, Event
from people.realtime.recorded import Joined
from rl_code.tasks.records import COLUMNS, REQUIRED, REQUIRED_OF_SUITES
from rl_code.tasks.row_files import RowError, TaskFileError, each_row

RECORD, FILES = "record", "files"


class SessionFileError(ValueError):
    """A file of sessions that is missing or malformed."""


@dataclasses.dataclass(frozen=True)
class RecordedSession:
    """The answers of one person on one task."""

    session: str
    user: str
    version: int
    # Unix seconds at which it ended.
    at: float
    # The task's row and what the session came to; None where the server did not know.
    record: Mapping[str, Any] | None
    files: Mapping[str, str | None] | None


@dataclasses.dataclass(frozen=True)
class SuiteRows:
    """Rows of a suite, and counts of the sessions that were left out."""

    rows: Sequence[Mapping[str, Any]]
    # For each record of a session that is malformed, the reason.
    malformed: Sequence[str]
    # Sessions, or suggestions, without a task that can be graded; with a task that is there
    # already; of a user who has as many as one may.
    ungraded: int
    repeated: int
    crowded: int


def read_sessions(path: Path) -> tuple[list[RecordedSession], list[str]]:
    """The sessions of a file, in the order in which they ended, and why a line holds no answer, for
    each that holds none. Raises SessionFileError for a file without answers.
    """
    joined, wrong = read_answers(path)
    return sessions(joined), wrong


def read_answers(path: Path) -> tuple[Joined, list[str]]:
    """The answers of a file with their events, and the rest as ``read_sessions``, which raises the
    same.
    """
    joined, wrong = _joined(path)
    if not joined:
        raise SessionFileError(wrong[0])
    return joined, wrong


def sessions(joined: Joined) -> list[RecordedSession]:
    """Answers put together by user and session, in the order in which they ended."""
    answers: dict[tuple[str, str], list[tuple[AnswerRecord, Sequence[Event]]]] = {}
    for answer, events in joined:
        answers.setdefault((answer.user, answer.session), []).append((answer, events))
    found = []
    for (user, session), own in answers.items():
        own.sort(key=lambda one: one[0].answered_at)
        # The last that is known counts: later answers have changed more. What the server knew of an
        # answer counts more than what its client says.
        known: dict[str, Any] = {RECORD: None, FILES: None}
        for answer, events in own:
            for extra in (*(event.extra for event in events), answer.extra):
                known |= {key: extra[key] for key in known if isinstance(extra.get(key), dict)}
        last = own[-1][0]
        found.append(
            RecordedSession(
                session, user, last.version, last.answered_at, known[RECORD], known[FILES]
            )
        )
    return sorted(found, key=lambda one: (one.at, one.user, one.session))


def suite_rows(
    found: Iterable[RecordedSession], *, per_user: int, count: int, seed: int
) -> SuiteRows:
    """Rows for the source ``records``, of tasks that people brought.

    per_user: tasks of one user at most, so that nobody's habits are the suite. count: rows at most,
    drawn at random; 0 for all. Rows name neither the user nor the session.
    """
    malformed: list[str] = []
    pairs: list[tuple[str, dict[str, Any] | None]] = []
    for one in found:
        try:
            row = None if one.record is None else _checked(one) | {"split": "test"}
        except ValueError as error:
            malformed.append(str(error))
        else:
            pairs.append((one.user, row))
    made = collected(pairs, per_user=per_user, count=count, seed=seed)
    return dataclasses.replace(made, malformed=malformed)


def collected(
    pairs: Iterable[tuple[str, Mapping[str, Any] | None]], *, per_user: int, count: int, seed: int
) -> SuiteRows:
    """Rows of a suite, each with an id.

    pairs: a user, and the row without an id that they brought; None for none. The others are as of
    ``suite_rows``.
    """
    rows: dict[str, dict[str, Any]] = {}
    of_user: dict[str, int] = {}
    left = {"ungraded": 0, "repeated": 0, "crowded": 0}
    for user, row in pairs:
        if row is None:
            left["ungraded"] += 1
            continue
        id = f"session-{hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]}"
        if id in rows:
            left["repeated"] += 1
        elif of_user.get(user, 0) >= per_user:
            left["crowded"] += 1
        else:
            of_user[user] = of_user.get(user, 0) + 1
            rows[id] = {"id": id, **row}
    ids = sorted(rows)
    if count and len(ids) > count:
        ids = sorted(random.Random(seed).sample(ids, count))
    return SuiteRows([rows[id] for id in ids], (), **left)


def case_of(found: Iterable[RecordedSession], session: str, name: str, user: str = "") -> dict:
    """A session as a case of the red team (``redteam.recorded``).

    session: its name. user: whose, where two have sessions of that name. name: of the case.

    Raises ValueError for a session that is not there, is there twice, or cannot be graded.
    """
    mine = [one for one in found if one.session == session and user in ("", one.user)]
    if not mine:
        raise ValueError(f"{session=}: no such session")
    if len(mine) > 1:
        users = ", ".join(one.user for one in mine)
        raise ValueError(f"{session=}: {len(mine)} users have one; name one of {users}")
    (one,) = mine
    if one.record is None or not one.files:
        raise ValueError(
            f"{session=}: its answers have no extra[{RECORD!r}] with the task, or no extra"
            f"[{FILES!r}] with what it changed, so there is nothing to grade"
        )
    row = {"id": f"case/{name}", **_checked(one)}
    return {"name": name, "session": session, "task": row, "files": dict(one.files)}


def line_of(answer: AnswerRecord, events: Sequence[Event]) -> str:
    """A line of a file of sessions."""
    said = [dataclasses.asdict(event) for event in events]
    return json.dumps({"answer": dataclasses.asdict(answer), "events": said}) + "\n"


def _checked(one: RecordedSession) -> dict[str, Any]:
    """The fields of a session's record, without id and split, which the suite gives."""
    row = {key: value for key, value in (one.record or {}).items() if key not in ("id", "split")}
    if unknown := sorted(row.keys() - COLUMNS.keys()):
        raise ValueError(
            f"session {one.session!r}: its record has {', '.join(unknown)}; a row has "
            f"{', '.join(COLUMNS)}"
        )
    needed = REQUIRED_OF_SUITES if "fail_to_pass" in row else REQUIRED
    if missing := [key for key in needed if key != "id" and key not in row]:
        raise ValueError(f"session {one.session!r}: its record lacks {', '.join(missing)}")
    return row


def _joined(path: Path) -> tuple[Joined, list[str]]:
    """The answers of a file, and why a line holds none."""
    found, wrong = [], []
    try:
        for line, row in each_row(path, {"answer": dict, "events": list}):
            if isinstance(row, RowError):
                wrong.append(str(row))
                continue
            try:
                answer = row["answer"]
                tuples = ("given", "tokens", "logprobs", "versions")
                answer = AnswerRecord(**answer | {key: tuple(answer[key]) for key in tuples})
                events = [Event(**event) for event in row["events"]]
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                wrong.append(
                    f'{path}, line {line}: expected {{"answer": ..., "events": [...]}} with the '
                    f"fields of AnswerRecord and Event: {type(error).__name__}: {error}"
                )
            else:
                found.append((answer, events))
    except TaskFileError as error:
        raise SessionFileError(str(error)) from error
    return found, wrong
