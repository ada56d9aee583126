"""The router that learns costs less than fixed shares where one agent is better."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.auto import study
from experiments.auto.study import ROUTERS, Setting, TestThenAll


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
        router.reward(arm, 0.0)
        router.reward(arm, value, before=0.0)
    router.reward("b", 0.0)
    assert {router.choose(user, "") for user in users} == {"a", "b"}
    router.reward("b", 1.0, before=0.0)
    assert {router.choose(user, "") for user in users} == {"b"}
    assert all(make(["a", "b"], 0).arms == ("a", "b") for make in ROUTERS.values())
