"""A router hears what is reported of answers, over HTTP, and again after the server has started
anew.
"""

from __future__ import annotations

import contextlib
import time

import pytest

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
from tests.people.serving.scripted import PATIENCE_S, SECRET, Scripted

ARMS = ("policy@1", "policy@2")


class Heard(Thompson):
    """Keeps what it was told, too."""

    def __init__(self):
        super().__init__(ARMS, seed=0)
        self.told = []

    def reward(self, arm, value, before=None):
        super().reward(arm, value, before)
        self.told.append((arm, value, before))

    def seen(self):
        """Of each arm how many rewards, and their mean."""
        return {arm: (count, pytest.approx(mean)) for arm, (count, mean, _) in self._seen.items()}


@contextlib.contextmanager
def serving(folder):
    """Two versions behind a router that learns, and the URL of their server."""
    reward = make_reward(FeedbackRewardConfig((SignalConfig(Named("tab")),)))
    url = f"sqlite:///{folder / 'people.db'}"
    with EarningStore(url, ids=AnswerIds(SECRET), reward=reward) as store:
        with contextlib.ExitStack() as stack:
            made = Scripted(stack, on_answer=store.submit_answer)
            made.load("policy", 1, "one")
            made.load("policy", 2, "two")
            router = Heard()
            made.fleet.models.route(AUTO, router)
            store.follow(made.fleet.models, AUTO)
            access = Access(made.fleet)
            routes = access.feedback_routes(store)
            endpoint = stack.enter_context(Endpoint(access.find, routes=routes))
            yield router, f"{endpoint.url}/v1"


def wait_for(router, count):
    end = time.monotonic() + PATIENCE_S
    while len(router.told) < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_router_learns_from_what_is_reported_and_has_not_forgotten_after_a_restart(tmp_path):
    accepted = []
    with serving(tmp_path) as (router, url):
        client = Client(url, "ada", patience_s=PATIENCE_S)
        for number in range(60):
            found = client.suggest("a", "b", session=f"{number}")
            wait_for(router, 2 * number + 1)
            assert router.told[-1][1:] == (0.0, None)  # nothing was shown yet
            accepted.append(found.text == "two")
            kind = "accepted" if found.text == "two" else "rejected"
            key = f"{number}"
            assert client.report([Event(key, found.id, kind, time.time(), 1.0)]) == {}
            wait_for(router, 2 * number + 2)
            assert router.told[-1][1:] == (0.75 if found.text == "two" else -0.25, 0.0)
            # the same again is nothing new
            client.report([Event(key, found.id, kind, time.time(), 1.0)])
        client.close()
        first = router.seen()
        assert len(router.told) == 120
    taken = sum(accepted)
    assert first == {"policy@1": (60 - taken, -0.25), "policy@2": (taken, 0.75)}
    assert sum(accepted[-20:]) >= 18  # it has learned which arm people take
    with serving(tmp_path) as (router, _):
        assert router.seen() == first


def test_a_reward_that_takes_the_place_of_another_leaves_what_the_new_one_alone_would():
    one, other = Heard(), Heard()
    for value in (0.5, -0.25, 3.0):
        one.reward("policy@1", value)
        one.reward("policy@1", 1.0, value)
        other.reward("policy@1", 1.0)
    one.reward("policy@1", 0.5)
    one.reward("policy@1", 0.25, 0.5)
    other.reward("policy@1", 0.25)
    assert one._seen["policy@1"] == pytest.approx(other._seen["policy@1"])
