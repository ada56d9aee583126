"""What the A/B test says of sessions whose answer is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from people.realtime.parts import Sessions
from people.realtime.watching import Guardrail, WatchConfig, look

CONFIG = WatchConfig(
    metric="retained",
    scale=0.1,
    margin=0.05,
    least_users=20,
    guardrails=(Guardrail("latency", "up", scale=0.5, allowed=0.2),),
    least_s=10.0,
    most_s=100.0,
)


def sessions(version: int, users: int, retained: float, latency: float = 1.0) -> Sessions:
    """Four sessions of each user, around these means."""
    rng = np.random.default_rng(version)
    count = 4 * users
    return Sessions(
        session=np.arange(count).astype(str),
        user=np.repeat(np.arange(users), 4).astype(str),
        version=np.full(count, version),
        at=np.arange(count, dtype=np.float64),
        values={
            "retained": retained + 0.1 * rng.standard_normal(count),
            "latency": latency + 0.1 * rng.standard_normal(count),
        },
    )


DEPLOYED = sessions(1, 400, 0.5)


@pytest.mark.parametrize(
    ("candidate", "watched_s", "decision", "reason"),
    [
        (sessions(2, 400, 0.6), 50.0, "promote", "the lower end is above"),
        # not before the least time
        (sessions(2, 400, 0.6), 5.0, "wait", "retained"),
        (sessions(2, 400, 0.5), 50.0, "promote", "the lower end is above"),
        (sessions(2, 400, 0.3), 5.0, "roll_back", "worse than the deployed version"),
        # better, and much slower
        (sessions(2, 400, 0.6, latency=3.0), 50.0, "roll_back", "guardrail latency"),
        # slower by what is allowed
        (sessions(2, 400, 0.6, latency=1.1), 50.0, "promote", "the lower end is above"),
        (sessions(2, 19, 0.9), 50.0, "wait", "retained"),
    ],
)
def test_the_decision_is_that_of_the_sessions(candidate, watched_s, decision, reason):
    found = look(CONFIG, DEPLOYED, candidate, watched_s)
    assert found.decision == decision and reason in found.reason


@pytest.mark.parametrize("at_end", ["promote", "roll_back"])
def test_the_longest_time_decides_what_nothing_proves(at_end):
    config = dataclasses.replace(CONFIG, margin=0.0, at_end=at_end)
    same = sessions(2, 400, 0.5)
    assert look(config, DEPLOYED, same, 99.0).decision == "wait"
    found = look(config, DEPLOYED, same, 100.0)
    assert found.decision == at_end and "nothing proven in 100 s" in found.reason


@pytest.mark.parametrize("users", [0, 19])
def test_a_candidate_that_too_few_users_had_is_never_promoted(users):
    config = dataclasses.replace(CONFIG, at_end="promote")
    few = sessions(2, users, 0.9)
    assert look(config, DEPLOYED, few, 99.0).decision == "wait"
    found = look(config, DEPLOYED, few, 100.0)
    assert found.decision == "roll_back" and "fewer than 20 users" in found.reason


@pytest.mark.parametrize(("watched_s", "decision"), [(50.0, "wait"), (200.0, "roll_back")])
def test_nothing_is_promoted_past_a_guardrail_that_nobody_reported(watched_s, decision):
    better = sessions(2, 400, 0.6)
    values = dict(better.values, latency=np.full(len(better.user), np.nan))
    values["latency"][:4] = 1.0  # one user of 400
    config = dataclasses.replace(CONFIG, at_end="promote")
    found = look(config, DEPLOYED, dataclasses.replace(better, values=values), watched_s)
    assert found.decision == decision
    assert "guardrail latency says nothing, fewer than 20 users of an arm" in found.reason


def test_a_test_ends_after_its_sessions_however_fast_they_came():
    config = dataclasses.replace(CONFIG, margin=0.0, most_sessions=3_200)
    same = sessions(2, 400, 0.5)
    found = look(config, DEPLOYED, same, 11.0)
    assert found.over and found.decision == "roll_back"
    assert "nothing proven in 11 s and 3200 sessions" in found.reason
    found = look(dataclasses.replace(config, most_sessions=3_201), DEPLOYED, same, 11.0)
    assert not found.over and found.decision == "wait"
    with pytest.raises(ValueError, match="most_sessions=0"):
        dataclasses.replace(config, most_sessions=0)
