"""A router hears what was reported of answers that are old enough, over HTTP, and again after the
server has started anew.
"""

from __future__ import annotations

import contextlib
import time

from people.feedback.identity import AnswerIds
from people.feedback.records import Event
from people.feedback.rewards.combine import FeedbackRewardConfig, make_reward
from people.serving.access import Access
from people.serving.earned import EarningStore
from people.serving.router import AUTO, Thompson
from people.simulated.client import Client
from rl_code.config.named import Named
from rl_code.harness.endpoint.endpoint import Endpoint
from rl_code.rewards.combine import SignalConfig
from rl_code.run.serving import AutoConfig
from tests.people.serving.scripted import PATIENCE_S, SECRET, Scripted

ARMS = ("policy@1", "policy@2")
WAIT_S = 100.0


class Heard(Thompson):
    """Keeps what it was told, too."""

    def __init__(self):
        super().__init__(ARMS, AutoConfig())
        self.told = []

    def reward(self, arm, value):
        super().reward(arm, value)
        self.told.append((arm, value))


class Served:
    """Two versions behind a router that learns, and a client of their server."""

    def __init__(self, stack, folder, wait_s=WAIT_S):
        # Seconds that the clock of the store is ahead.
        self.ahead = 0.0
        reward = make_reward(FeedbackRewardConfig((SignalConfig(Named("tab")),)))
        self.store = stack.enter_context(
            EarningStore(
                f"sqlite:///{folder / 'people.db'}",
                ids=AnswerIds(SECRET),
                reward=reward,
                clock=lambda: time.time() + self.ahead,
            )
        )
        made = Scripted(stack, on_answer=self.store.submit_answer)
        made.load("policy", 1, "one")
        made.load("policy", 2, "two")
        self.router = Heard()
        made.fleet.models.route(AUTO, self.router)
        self.store.follow(made.fleet.models, AUTO, wait_s)
        access = Access(made.fleet)
        routes = access.feedback_routes(self.store)
        endpoint = stack.enter_context(Endpoint(access.find, routes=routes))
        self.client = Client(f"{endpoint.url}/v1", "ada", patience_s=PATIENCE_S)
        stack.callback(self.client.close)

    def ask(self, session):
        return self.client.suggest("a", "b", session=f"{session}")

    def report(self, found, kind):
        event = Event(f"{kind} {found.id}", found.id, kind, time.time(), 1.0)
        assert self.client.report([event]) == {}

    def later(self, seconds):
        """What the router has heard so many seconds later."""
        self.ahead += seconds
        self.store.tell()
        return self.router.told


@contextlib.contextmanager
def serving(folder, **options):
    with contextlib.ExitStack() as stack:
        yield Served(stack, folder, **options)


def test_a_router_learns_from_what_is_reported_and_has_not_forgotten_after_a_restart(tmp_path):
    texts = []
    with serving(tmp_path) as served:
        for number in range(60):
            found = served.ask(number)
            texts.append(found.text)
            assert len(served.later(0.0)) == number  # it is too young to count
            served.report(found, "accepted" if found.text == "two" else "rejected")
            told = served.later(WAIT_S + 1)
            expected = ("policy@2", 0.75) if found.text == "two" else ("policy@1", -0.25)
            assert len(told) == number + 1 and told[-1] == expected
        assert texts[-20:].count("two") >= 18  # it has learned which arm people take
    with serving(tmp_path) as again:
        assert again.later(served.ahead) == told  # in the same order
        assert [again.router.choose("b", f"{i}") for i in range(20)] == [
            served.router.choose("b", f"{i}") for i in range(20)
        ]


def test_an_answer_counts_once_with_what_was_reported_until_it_was_old_enough(tmp_path):
    with serving(tmp_path) as served:
        silent, early, late = (served.ask(number) for number in range(3))
        served.ahead += WAIT_S / 2
        served.report(early, "accepted")
        served.ahead += WAIT_S
        served.report(late, "accepted")
        assert [value for _, value in served.later(0.0)] == [0.0, 0.75, 0.0]
        served.report(silent, "accepted")
        assert len(served.later(WAIT_S)) == 3


def test_a_router_hears_of_an_answer_when_it_is_old_enough(tmp_path):
    with serving(tmp_path, wait_s=0.05) as served:
        served.ask(0)
        end = time.monotonic() + PATIENCE_S
        while not served.router.told:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert [value for _, value in served.router.told] == [0.0]
