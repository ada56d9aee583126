"""Writes of several threads are committed together, and fail alone."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy.exc import OperationalError

from people.feedback import together as together_lib
from people.feedback.store import FeedbackStore
from people.feedback.together import Together
from tests.people.feedback.people import answer, event


class Transactions:
    """Counts them; what is written is there once they end."""

    def __init__(self):
        self.written: list[str] = []
        self.count = 0
        self.failing: Exception | None = None

    def commit(self, words):
        if "wrong" in words:
            raise ValueError("no such thing")
        if self.failing is not None:
            raise self.failing
        self.count += 1
        self.written += words
        return [word.upper() for word in words]


def at_once(together: Together, words) -> list:
    """What becomes of writes that all wait while another one is at work."""
    with together._turn:
        futures = [together.submit(word) for word in words]
        assert not any(future.done() for future in futures)
    return [future.exception() or future.result() for future in futures]


@pytest.fixture
def made():
    transactions = Transactions()
    together = Together(threading.Lock(), transactions.commit)
    yield transactions, together
    together.close()


def test_those_who_wait_are_committed_once(made):
    transactions, together = made
    words = [f"word {number}" for number in range(30)]
    assert at_once(together, words) == [word.upper() for word in words]
    assert transactions.written == words
    assert transactions.count == 1


def test_only_behind_several_writes_it_waits_for_more(made, monkeypatch):
    transactions, together = made
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        together.submit(f"meanwhile {len(slept)}")

    monkeypatch.setattr(together_lib.time, "sleep", sleep)
    assert together.submit("alone").result() == "ALONE" and not slept
    at_once(together, ["a", "b"])
    assert together.submit("c").result() == "C" and len(slept) == 1
    assert transactions.written == ["alone", "a", "b", "c", "meanwhile 1"]
    assert transactions.count == 3


@pytest.mark.parametrize(("cpu_s", "waited_s"), [(0.001, 0.04), (0.1, 0.1)])
def test_it_waits_the_longer_the_more_a_transaction_costs(made, monkeypatch, cpu_s, waited_s):
    _, together = made
    slept, taken = [], itertools.count(step=cpu_s)
    monkeypatch.setattr(together_lib.time, "sleep", slept.append)
    monkeypatch.setattr(together_lib.time, "thread_time", lambda: next(taken))
    at_once(together, ["a", "b"])
    assert together.submit("c").result() == "C" and slept == [pytest.approx(waited_s)]
    # which came alone
    assert together.submit("d").result() == "D" and len(slept) == 1


def test_a_write_that_is_wrong_takes_no_other_with_it(made):
    transactions, together = made
    came = at_once(together, ["a", "wrong", "b"])
    assert (came[0], came[2]) == ("A", "B") and isinstance(came[1], ValueError)
    assert transactions.written == ["a", "b"]


def test_a_database_that_is_away_fails_all_of_them(made):
    transactions, together = made
    transactions.failing = OperationalError("COMMIT", {}, Exception("away"))
    came = at_once(together, ["a", "b"])
    assert all(isinstance(one, OperationalError) for one in came)
    assert transactions.written == []


def test_a_write_that_nobody_waits_for_any_more_is_not_made(made):
    transactions, together = made
    with together._turn:
        first, second = together.submit("a"), together.submit("b")
        assert second.cancel()
    assert first.result() == "A"
    assert transactions.written == ["a"]


def test_what_was_handed_in_is_written_when_it_is_closed_and_later_too(made):
    transactions, together = made
    futures = [together.submit(str(number)) for number in range(300)]
    together.close()
    assert all(future.done() for future in futures)
    assert together.submit("later").result() == "LATER"
    assert transactions.written == [*map(str, range(300)), "later"]


def test_answers_and_events_of_many_threads_are_each_there_once(url):
    with FeedbackStore(url) as store:

        def person(number: int) -> None:
            user = f"user {number}"
            for part in range(3):
                id = f"{number}-{part}"
                assert store.record_answer(answer(id, user))
                events = [event("accepted", id), event("shown", id)]
                assert [one.status for one in store.record_events(events, user)] == ["recorded"] * 2
                assert [one.status for one in store.record_events(events, user)] == ["repeated"] * 2

        with ThreadPoolExecutor(8) as people:
            assert len(list(people.map(person, range(8)))) == 8
        counts = store.counts()
        assert (counts["answers"], counts["events"]) == (24, 48)
