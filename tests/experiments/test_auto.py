"""The router that learns costs less than fixed shares where one agent is better."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.auto import study
from experiments.auto.study import ROUTERS, Setting, SilenceFirst, TestThenAll


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Two agents, of which one earns 1 in each session and one nothing; 200 sessions."""
    monkeypatch.setattr(study, "SESSIONS", 200)
    monkeypatch.setattr(study, "sessions_of", lambda right: np.full((study.USERS, 2), right))


def test_regret_is_counted_from_the_best_agent_of_the_time():
    setting = Setting("", (0.0, 1.0), late=5, later=(1.0, 0.0))
    found = study.regrets(setting, "80 % deployed", 2)
    assert found.shape == (2, 200)
    steps = np.diff(found, axis=1)
    assert set(np.unique(steps)) == {0.0, 1.0}
    # four in five have the worse one, and from the middle on the better one
    assert 60 <= found[:, 99].min() and (found[:, -1] - found[:, 99]).max() <= 40


def test_what_learns_ends_with_the_best_agent_and_late_rewards_delay_that():
    costs = {
        late: study.regrets(Setting("", (0.0, 1.0), late=late), "Thompson sampling", 2)
        for late in (1, 100)
    }
    assert costs[1][:, -1].max() < 30 < costs[100][:, 99].min()
    fixed = study.regrets(Setting("", (0.0, 1.0)), "equal shares", 2)
    assert fixed[:, -1].min() > 70


def test_a_fixed_test_decides_once_by_rewards_that_are_known():
    router = TestThenAll(["a", "b"], "seed", 2)
    users = [f"{number:032x}" for number in range(40)]
    assert {router.choose(user, "") for user in users} == {"a", "b"}
    for arm, value in (("a", 0.0), ("b", 1.0), ("a", 0.0)):
        router.reward(arm, value)
    assert {router.choose(user, "") for user in users} == {"a", "b"}
    router.reward("b", 1.0)
    assert {router.choose(user, "") for user in users} == {"b"}
    assert all(make(["a", "b"], 0).arms == ("a", "b") for make in ROUTERS.values())


def test_the_router_of_before_counts_what_waits_as_silence():
    router = SilenceFirst(["a"], 0)
    assert router.seen("a") == (0, 0.0, 0.0)
    for number in range(3):
        router.choose("user", str(number))
    router.reward("a", 1.0)
    # 1, 0, 0
    assert router.seen("a") == pytest.approx((3, 1 / 3, 2 / 3))
    router.reward("a", 2.0)
    # 1, 2, 0
    assert router.seen("a") == pytest.approx((3, 1.0, 2.0))


def test_late_rewards_cost_less_where_what_waits_is_no_silence():
    setting = Setting("", (0.0, 1.0), late=50)
    now, before = (
        study.regrets(setting, name, 2)[:, -1].mean()
        for name in ("Thompson sampling", "Thompson sampling before")
    )
    assert now < before
