"""A process that writes is killed again and again: what it acknowledged is there, once."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError

from people.feedback.store import FeedbackStore
from people.feedback.tables import ANSWERS, EVENTS, USES
from tests import programs
from tests.people.feedback.people import answer, event

ROOT = Path(__file__).resolve().parents[3]
KILLS = 5


def run_and_kill(url: str, prefix: str, lines: int) -> list[str]:
    """What a writer acknowledged until it was killed, which is after so many lines at the least."""
    with programs.start("tests.people.feedback.writer", url, prefix, stderr=None) as writer:
        said = [writer.stdout.readline() for _ in range(lines)]
        writer.kill()
        said += writer.stdout.readlines()
    # the last one may have been cut off
    return [line.strip() for line in said if line.endswith("\n")]


@pytest.mark.long
def test_nothing_acknowledged_is_lost_and_nothing_is_half_done(url):
    rng = random.Random(0)
    said = []
    for number in range(KILLS):
        said += run_and_kill(url, str(number), rng.randint(1, 30))
    acknowledged = {kind: [] for kind in ("answer", "events", "cycle", "deleted")}
    for line in said:
        kind, _, what = line.partition(" ")
        acknowledged[kind].append(what)
    assert len(said) >= KILLS
    with FeedbackStore(url) as store:
        with store.engine.connect() as connection:
            answers = dict(connection.execute(select(ANSWERS.c.user, ANSWERS.c.id)).all())
            count = select(EVENTS.c.user, func.count()).group_by(EVENTS.c.user)
            events = dict(connection.execute(count).all())
            uses = connection.execute(select(USES)).all()
        gone = set(acknowledged["deleted"])
        for id in acknowledged["answer"]:
            there = f"user of {id}" in answers
            # a deletion that was not acknowledged may have happened
            assert there or id.endswith(("4", "9")), id
            assert not (there and id in gone), id
        for id in acknowledged["events"]:
            assert events.get(f"user of {id}", 0) == 2 * (f"user of {id}" in answers), id
        assert set(events.values()) <= {2}
        assert len({row.answer for row in uses}) == len(uses)
        sets = store.training_sets()
        assert {int(cycle) for cycle in acknowledged["cycle"]} <= {one.cycle for one in sets}
        for one in sets:
            used = store.used(one.cycle)
            assert len(used.ids) == one.answers - one.deleted
            if not one.deleted:
                assert store.digest(used.ids, used.watermark) == one.digest


@pytest.mark.long
def test_a_crash_of_the_database_loses_nothing_acknowledged(server):
    """A client repeats until it is acknowledged, while the server of the database crashes."""
    enough = threading.Event()
    acknowledged: list[str] = []
    failures: list[OperationalError] = []

    def write() -> None:
        for number in range(100_000):
            one = event("thumbs", "crash", key=str(number), value=1.0)
            while not enough.is_set():
                try:
                    (result,) = store.record_events([one], "ann")
                except OperationalError as error:
                    failures.append(error)
                    enough.wait(0.05)  # not all the time: the server has to come back
                    continue
                # repeated: it was committed, and the crash took the reply
                assert result.status in ("recorded", "repeated")
                acknowledged.append(one.key)
                break
            if enough.is_set():
                return

    with FeedbackStore(server.url) as store:
        store.record_answer(answer("crash"))
        writer = threading.Thread(target=write)
        writer.start()
        while len(acknowledged) < 10 and writer.is_alive():
            enough.wait(0.01)
        server.crash()
        server.start()
        after = len(acknowledged)
        while len(acknowledged) < after + 5 and writer.is_alive():
            enough.wait(0.01)
        enough.set()
        writer.join()
        ((_, events),) = store.joined(["crash"])
    keys = [one.key for one in events]
    assert failures and len(acknowledged) >= 15
    assert len(keys) == len(set(keys)) and set(acknowledged) <= set(keys)
    # at most the one that was under way at the end is there without having been acknowledged
    assert len(set(keys) - set(acknowledged)) <= 1
