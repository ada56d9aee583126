"""Writes of several threads are committed together, and fail alone."""

from __future__ import annotations

import contextlib
import threading

import pytest
from sqlalchemy.exc import OperationalError

from rl_code.feedback.store import FeedbackStore
from rl_code.feedback.together import Together
from tests.rl_code.feedback.people import answer, event


class Transactions:
    """Counts them; what is written is there once they end."""

    def __init__(self):
        self.written: list[str] = []
        self.count = 0
        self.failing: Exception | None = None

    @contextlib.contextmanager
    def begin(self):
        found: list[str] = []
        yield found
        if self.failing is not None:
            raise self.failing
        self.count += 1
        self.written += found


def at_once(together: Together, writes) -> list:
    """What becomes of writes that all wait while another one is at work."""
    came: dict[int, object] = {}

    def one(number: int) -> None:
        try:
            came[number] = together.write(writes[number])
        except Exception as error:
            came[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(writes))]
    with together._turn:
        for thread in threads:
            thread.start()
        while len(together._waiting) < len(writes):
            threading.Event().wait(0.001)
    for thread in threads:
        thread.join()
    return [came[number] for number in range(len(writes))]


def adding(word: str):
    def write(connection):
        connection.append(word)
        return word

    return write


@pytest.fixture
def made():
    transactions = Transactions()
    return transactions, Together(transactions.begin, threading.Lock())


def test_those_who_wait_are_committed_once(made):
    transactions, together = made
    words = [str(number) for number in range(30)]
    assert at_once(together, [adding(word) for word in words]) == words
    assert sorted(transactions.written) == sorted(words)
    assert transactions.count == 1


def test_a_write_that_is_wrong_takes_no_other_with_it(made):
    transactions, together = made

    def wrong(connection):
        connection.append("wrong")
        raise ValueError("no such thing")

    came = at_once(together, [adding("a"), wrong, adding("b")])
    assert (came[0], came[2]) == ("a", "b") and isinstance(came[1], ValueError)
    assert sorted(transactions.written) == ["a", "b"]


def test_a_database_that_is_away_fails_all_of_them(made):
    transactions, together = made
    transactions.failing = OperationalError("COMMIT", {}, Exception("away"))
    came = at_once(together, [adding("a"), adding("b")])
    assert all(isinstance(one, OperationalError) for one in came)
    assert transactions.written == []


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

        failures: list[BaseException] = []

        def guarded(number: int) -> None:
            try:
                person(number)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        counts = store.counts()
        assert (counts["answers"], counts["events"]) == (24, 48)
