"""Attacks on what is learned from people, and that honest people are left alone."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from people.feedback.poisoning import PoisoningConfig, weigh
from people.feedback.rewards.answered import Answered, answered
from people.feedback.rewards.tab import Tab
from people.feedback.store import FeedbackStore
from tests.people.feedback.people import answer, event

CONFIG = PoisoningConfig()
TELEMETRY = Path(os.environ.get("RL_CODE_DATA", "")) / "copilot_sessions.jsonl"


def given(user, number, accepts, rng, spread=1.2, origin="") -> list[Answered]:
    """Answers that a user decided about. accepts: the chance, of the model's confidence."""
    found = []
    for i in range(number):
        logprob = -rng.exponential(1.0)
        kind = "accepted" if rng.random() < accepts(math.exp(logprob)) else "rejected"
        id = f"{user} {i}"
        extra = {"origin": origin} if origin else {}
        one = answer(id, user, logprobs=(logprob, logprob), extra=extra)
        seconds = 1.5 * math.exp(spread * rng.standard_normal())
        found.append((one, [event(kind, id, value=seconds)]))
    return answered(found)


def crowd(rng, users=30, number=40) -> list[Answered]:
    """Honest people, whose habits differ as those of the published telemetry do."""
    found = []
    for user in range(users):
        habit = 0.5 * rng.standard_normal()

        def accepts(confidence, habit=habit):
            return 1 / (1 + math.exp(1.5 - 2 * confidence - habit))

        found += given(f"person {user}", number, accepts, rng)
    return found


def share(those, weights, name) -> float:
    mine = np.array([one.answer.user.startswith(name) for one in those])
    return float(weights[mine].sum() / weights.sum())


def reasons(weighed, name) -> set[str]:
    return {one.reason for one in weighed.suspects if one.user.startswith(name)}


def test_honest_people_count_in_full():
    flagged = 0
    for seed in range(5):
        weighed = weigh(crowd(np.random.default_rng(seed)), CONFIG)
        flagged += len({one.user for one in weighed.suspects})
        assert weighed.weights.mean() > 0.99
    assert flagged <= 3  # of 150


@pytest.mark.skipif(not TELEMETRY.is_file(), reason="RL_CODE_DATA has no copilot_sessions.jsonl")
def test_sixteen_real_programmers_count_in_full():
    found = []
    for i, line in enumerate(TELEMETRY.read_text().splitlines()):
        row = json.loads(line)
        if row["event"] not in ("Accepted", "Rejected"):
            continue
        measured = row["measurements"]
        logprob = measured.get("meanLogProb", -0.5)
        seconds = measured.get("timeSinceDisplayedMs", 0) / 1000
        one = answer(str(i), f"person {row['session']}", logprobs=(logprob, logprob))
        found.append((one, [event(row["event"].lower(), str(i), value=seconds or None)]))
    weighed = weigh(answered(found), PoisoningConfig(user_share=0.2))
    assert len({one.answer.user for one in answered(found)}) == 16
    assert weighed.suspects == () and weighed.weights.min() == 1


def test_a_key_that_accepts_everything_counts_little():
    rng = np.random.default_rng(0)
    # honest times and as many answers as all others together
    those = crowd(rng) + given("attacker", 1_200, lambda _: 1.0, rng)
    weighed = weigh(those, CONFIG)
    assert "accept_rate" in reasons(weighed, "attacker")
    assert share(those, np.ones(len(those)), "attacker") == 0.5
    assert share(those, weighed.weights, "attacker") < 0.1 + 1e-6
    # and not much of that is left when it sends as many as an honest one does
    modest = crowd(rng) + given("attacker", 40, lambda _: 1.0, rng)
    weights = weigh(modest, CONFIG).weights
    assert share(modest, weights, "attacker") < 0.5 * share(
        modest, np.ones(len(modest)), "attacker"
    )


def test_constant_times_count_little():
    rng = np.random.default_rng(1)
    those = crowd(rng) + given("program", 40, lambda confidence: confidence, rng, spread=0.01)
    weighed = weigh(those, CONFIG)
    assert reasons(weighed, "program") == {"steady_times"}
    assert share(those, weighed.weights, "program") < 0.001
    assert not reasons(weighed, "person")


def test_a_thousand_keys_of_one_origin_count_as_one():
    rng = np.random.default_rng(2)
    those = crowd(rng)
    for number in range(1_000):
        those += given(f"sybil {number}", 4, lambda _: 1.0, rng, origin="one place")
    weighed = weigh(those, CONFIG)
    assert share(those, np.ones(len(those)), "sybil") > 0.75
    assert share(those, weighed.weights, "sybil") < 0.05
    assert reasons(weighed, "sybil") == {"of_origin accept_rate"}
    assert not reasons(weighed, "person")


def test_a_clever_origin_is_bounded_all_the_same():
    """Its keys look as people do, so nothing is implausible: what is left is the bound."""
    rng = np.random.default_rng(3)
    those = crowd(rng)
    for number in range(300):
        those += given(f"sybil {number}", 10, lambda c: c / 2, rng, origin="one place")
    weighed = weigh(those, CONFIG)
    assert share(those, np.ones(len(those)), "sybil") > 0.7
    assert share(those, weighed.weights, "sybil") < 0.3 + 1e-5
    assert reasons(weighed, "sybil") == {"share"}


@pytest.mark.parametrize("totals", [[1, 1], [5, 1, 1], [100, 1, 1, 1, 1, 1], [9, 9, 9, 1, 1]])
def test_nobody_has_more_than_the_share(totals):
    rng = np.random.default_rng(4)
    those = []
    for user, number in enumerate(totals):
        those += given(f"u{user}", number, lambda _: 0.5, rng)
    config = PoisoningConfig(user_share=0.25, origin_share=1.0)
    weights = weigh(those, config).weights
    shares = [share(those, weights, f"u{user}") for user in range(len(totals))]
    assert max(shares) <= max(0.25, 1 / len(totals)) + 1e-6
    assert weights.max() <= 1 and weights.min() > 0


def test_replays_and_events_for_the_answers_of_others_earn_nothing(url):
    with FeedbackStore(url) as store:
        store.record_answer(answer("mine", "eve"))
        store.record_answer(answer("hers", "ann"))
        accepted = event("accepted", "mine", value=1.0)
        for key in ("1", "1", "2", "3"):
            again = event("accepted", "mine", key=key, value=1.0, at=110.0 + len(key))
            store.record_events([again], "eve")
        stolen = event("rejected", "hers", key="4", value=1.0)
        assert store.record_events([stolen], "eve")[0].status == "refused"
        mine, hers = answered(store.joined(["mine", "hers"]))
    assert [one.kind for one in mine.events] == ["accepted"]
    assert accepted.answer == "mine"
    assert (Tab()(mine), Tab()(hers)) == (0.75, 0.0)


def test_nothing_is_weighed_of_nothing():
    assert weigh([], CONFIG).weights.shape == (0,)
