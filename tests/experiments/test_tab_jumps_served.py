"""What people got from the checkpoints of a cycle of Tab jumps is compared with the copy's."""

from __future__ import annotations

import dataclasses

import rich.console

from experiments.tab_jumps.served import report
from people.feedback.identity import AnswerIds
from people.feedback.records import Event
from people.feedback.store import FeedbackStore
from people.realtime import tables
from people.realtime.ledger import Ledger
from tests.people.realtime.test_training import ANSWER

IDS = AnswerIds(bytes(range(32)))


def answered(store: FeedbackStore, user: str, version: int, number: int, *kinds: str) -> None:
    """Records an answer of a version, and what became of it."""
    id = IDS.make(user, version, number)
    fields = dict(id=id, user=user, version=version, versions=(version,) * 2, asked_at=5.0)
    arm = dict(arm=f"policy@{version}", session=f"s{number}", kind="completion")
    store.record_answer(dataclasses.replace(ANSWER, **fields | arm))
    events = [Event(f"{number}/{kind}", id, kind, 6.0, 1.0) for kind in kinds]
    store.record_events(events, user)


def test_the_deployed_version_is_compared_with_the_copy_in_the_same_time(tmp_path):
    engine = tables.connect(f"sqlite:///{tmp_path}/people.db")
    with FeedbackStore(engine, ids=IDS) as store:
        Ledger(engine).start(0, 1.0)
        for number in range(4):  # of the copy: two are taken, two are not
            answered(store, f"u{number}", 0, number, "shown", ("accepted", "rejected")[number % 2])
        answered(store, "u0", 0, 9)  # nothing was shown
        (alone,) = report.read(tmp_path)
        assert (alone.version, alone.state, alone.sessions) == (0, "collect", (5, 5))
        with engine.begin() as connection:  # as after a promotion
            connection.exec_driver_sql("INSERT INTO cycle_versions VALUES (1, 0, 'candidate', 1)")
            connection.exec_driver_sql("UPDATE cycles SET base = 1")
        assert report.read(tmp_path) == []  # nobody has had it yet
        for number in range(10, 14):
            answered(store, f"v{number}", 1, number, "shown", "accepted")
        (period,) = report.read(tmp_path)
    deployed, copy = period.deployed, period.copy
    assert deployed["reward"].mean == 0.75 and deployed["accepted"].mean == 1.0
    # one number for each person, of whom one was shown something in half of the sessions
    assert copy["reward"].mean == (0.375 - 0.25 + 0.75 - 0.25) / 4
    assert copy["shown"].mean == 3.5 / 4 and copy["accepted"].mean == 0.5
    console = rich.console.Console(width=200, record=True)
    console.print(report.differences([alone, period]))
    text = console.export_text()
    assert "4 + 5" in text and "0.750 / 0.156, +0.594" in text
