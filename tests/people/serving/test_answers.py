"""How answers come from other threads into the event loop, and from there to a connection."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from rl_code.harness.endpoint.answers import Answer, Mailbox, Pending, Progress
from rl_code.harness.endpoint.completions import CompletionRequest
from rl_code.harness.endpoint.connections import _Joining
from rl_code.harness.endpoint.conversation import Message
from tests.late import Late
from tests.people.serving.scripted import PATIENCE_S, scripted
from tests.people.serving.test_fleet import client_of, in_thread

openai = Late("openai")


REQUEST = CompletionRequest(prompt="a b", stream=True)


def whole(index=0):
    message = Message("assistant", "one")
    return Answer("id", "policy", message, "stop", [1], [-0.5], 2, 0, version=1, index=index)


def test_calls_of_many_threads_are_made_once_each_in_their_order():
    async def run():
        mailbox = Mailbox()
        made: list[tuple[int, int]] = []
        woken = 0
        read = mailbox.read

        def counting():
            nonlocal woken
            woken += 1
            read()

        mailbox.read = counting

        def post(number):
            for place in range(500):
                mailbox.post(lambda place=place: made.append((number, place)))

        threads = [threading.Thread(target=post, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or len(made) < 2000:
            await asyncio.sleep(0.001)
        # a loop that is busy is woken once for all that comes meanwhile
        before = woken
        for place in range(100):
            mailbox.post(lambda place=place: made.append((4, place)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert woken == before + 1
        return made

    made = asyncio.run(run())
    for number, count in ((0, 500), (1, 500), (2, 500), (3, 500), (4, 100)):
        assert [place for who, place in made if who == number] == list(range(count))


def test_an_answer_that_comes_while_the_news_are_read_is_not_lost():
    async def run():
        pending = Pending(REQUEST, Mailbox())
        news = pending.news()
        first = asyncio.create_task(anext(news))
        await asyncio.sleep(0)  # it waits
        pending.sampled([1])
        await asyncio.sleep(0)  # it is woken, and has not read yet
        pending.answer(whole())
        assert await first == [Progress(0, [1])]
        return await asyncio.wait_for(anext(news), PATIENCE_S)

    assert asyncio.run(run()) == [whole()]


def test_what_comes_at_once_is_told_at_once_and_a_failure_ends_it():
    async def run():
        pending = Pending(CompletionRequest(prompt="a b", stream=True, n=3), Mailbox())
        news = pending.news()
        pending.sampled([1], 0)
        pending.sampled([1, 2], 0)
        pending.sampled([3], 1)
        pending.answer(whole(1))
        assert await anext(news) == [Progress(0, [1, 2]), whole(1)]
        pending.fail(ValueError("over"))
        assert await anext(news) == []
        with pytest.raises(ValueError, match="over"):
            await anext(news)

    asyncio.run(run())


def test_an_answer_ends_when_its_record_is_kept():
    kept: list[Future] = []

    def keep(record):
        kept.append(Future())
        return kept[-1]

    with scripted(on_answer=keep) as made:
        ask = dict(model="policy", prompt="a b", stream=True)
        stream = iter(client_of(made).completions.create(**ask))
        first = next(stream)
        assert first.choices[0].finish_reason is None
        rest = in_thread(lambda: list(stream))
        while not kept:
            pass
        assert made.fleet.models.running == 1 and b"serving_answers_total{" not in metrics(made)
        kept[0].set_result(True)
        assert rest()[-1].choices[0].finish_reason == "stop"
        assert made.fleet.models.running == 0 and b"serving_answers_total{" in metrics(made)

        stream = iter(client_of(made).completions.create(**ask))
        next(stream)
        rest = in_thread(lambda: list(stream))
        while len(kept) < 2:
            pass
        kept[1].set_exception(OSError("no space"))
        with pytest.raises(openai.APIError, match="could not be recorded"):
            rest()
        assert made.fleet.models.running == 0


def metrics(made):
    return made.fleet.metrics.text()


class Transport:
    """Notes what is written."""

    def __init__(self):
        self.writes, self.closed = [], False

    def write(self, data):
        self.writes.append(data)

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True


def test_what_is_sent_in_one_turn_of_the_loop_is_written_once():
    async def run():
        own = Transport()
        joining = _Joining(own, asyncio.get_running_loop())
        joining.write(b"head ")
        joining.write(b"part")
        assert own.writes == []
        await asyncio.sleep(0)
        joining.write(b"more")
        await asyncio.sleep(0)
        assert own.writes == [b"head part", b"more"]
        joining.write(b"last")
        joining.close()
        joining.write(b"too late")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert own.writes == [b"head part", b"more", b"last"] and own.closed

    asyncio.run(run())
