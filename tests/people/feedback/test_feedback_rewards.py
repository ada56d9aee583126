"""What each signal pays, and how a config combines them."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from people.feedback.rewards.answered import Answered, answered
from people.feedback.rewards.asked import Asked
from people.feedback.rewards.combine import (
    AGENT_SIGNALS,
    SIGNALS,
    STANDARD,
    FeedbackRewardConfig,
    make_reward,
)
from people.feedback.rewards.follow_up import FollowUp, standard
from people.feedback.rewards.follow_up_data import HELD_OUT, messages
from people.feedback.rewards.latency import Latency
from people.feedback.rewards.leaving import Left, switched
from people.feedback.rewards.merged import Merged
from people.feedback.rewards.re_edited import ReEdited
from people.feedback.rewards.retention import retention
from people.feedback.rewards.tab import Tab
from people.feedback.rewards.thumbs import thumbs
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from tests.people.feedback.people import answer, event


def given(*events, **fields) -> Answered:
    return answered([(answer(**fields), list(events))])[0]


def retained(value, horizon_s, **fields):
    key = f"retained {horizon_s}"
    return event("retained", key=key, value=value, horizon_s=horizon_s, **fields)


SHOWN = event("shown", at=101.0)
ACCEPTED = event("accepted", at=102.0, value=1.0)
REJECTED = event("rejected", at=102.0, value=1.0)


def test_tab_pays_showing_exactly_above_a_quarter():
    tab = Tab()
    assert tab(given()) == 0
    assert tab(given(SHOWN, ACCEPTED)) == tab(given(ACCEPTED)) == 0.75
    assert tab(given(SHOWN, REJECTED)) == tab(given(REJECTED)) == -0.25
    assert tab(given(SHOWN)) == -0.25  # typed past
    # the first decision counts
    assert tab(given(REJECTED, event("accepted", at=103.0))) == -0.25
    assert tab.threshold == 0.25
    for chance in np.linspace(0, 1, 41):
        expected = chance * tab.accepted + (1 - chance) * tab.rejected
        assert (expected > 1e-12) == (chance > tab.threshold)


def test_retention_is_paid_at_the_last_horizon_reached():
    early, late = retained(1.0, 30.0, at=132.0), retained(0.5, 300.0, at=402.0)
    assert retention(given(ACCEPTED)) == 0
    assert retention(given(ACCEPTED, early)) == 1
    assert retention(given(ACCEPTED, late, early)) == 0.5
    assert retention(given(REJECTED, early)) == 0


def test_what_happens_too_late_is_no_penalty():
    edited = event("edited", value=0.25, at=200.0)
    assert ReEdited()(given(edited)) == -0.25
    assert ReEdited()(given(edited, event("reverted", value=1.0, at=300.0))) == -1
    assert ReEdited(within_s=50.0)(given(edited)) == 0
    day = 86_400.0
    assert Left()(given(event("left", at=6 * day))) == -1
    assert Left()(given(event("left", at=8 * day))) == 0
    assert Left()(given(event("left", at=6 * day, value=0.0))) == 0


def test_nothing_that_was_refused_earns_more_than_a_wrong_edit():
    """A broken call and a question in place of an edit change nothing that could be taken back."""
    refused = event("rejected", value=4.0)
    wrong = given(refused, event("reverted", value=1.0))
    assert ReEdited()(given(refused)) == ReEdited()(wrong) == -1
    # the earlier decision counts, as everywhere
    assert ReEdited()(given(event("accepted", at=101.0), event("rejected", at=102.0))) == 0
    reward = make_reward(FeedbackRewardConfig())
    broken = given(refused, kind="chat", extra={"invalid_calls": 1.0})
    asked = given(refused, kind="chat", extra={"question": True})
    edited = given(refused, event("reverted", value=1.0), kind="chat")
    assert reward(broken).total == reward(asked).total == reward(edited).total


def test_whether_a_question_was_needed_is_said_by_its_client():
    about = dict(kind="chat", extra={"question": True})
    said = event("shown", extra={"ambiguous": False})
    assert Asked()(given(**about)) == 0 and Asked()(given(said, **about)) == -0.25


def test_the_other_signals():
    assert switched(given()) == 0 and switched(given(event("switched"))) == -1
    assert Merged()(given()) == 0
    assert Merged()(given(event("opened"))) == 0.25
    assert Merged()(given(event("opened"), event("merged"))) == 1
    slow = given(asked_at=100.0, answered_at=110.0, first_token_s=2.0)
    assert Latency(first=0.1, whole=0.01)(slow) == pytest.approx(-0.3)
    assert Latency()(given(asked_at=100.0, answered_at=90.0, first_token_s=0.0)) == 0
    assert [thumbs(given(event("thumbs", value=value))) for value in (1.0, -1.0)] == [1, -1]
    assert thumbs(given()) == 0


def in_session(ambiguous, *later) -> Answered:
    """A question, and what was answered after it."""
    extra = {"question": True} if ambiguous is None else {"question": True, "ambiguous": ambiguous}
    first = answer("q", asked_at=1.0, extra=extra), []
    return answered([first, *later])[0]


def test_a_long_session_takes_as_much_memory_as_its_answers():
    number = 4_000
    rows = [(answer(f"{i}", asked_at=float(i)), []) for i in range(number)]
    tracemalloc.start()
    try:
        found = answered(rows)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most / number < 5_000  # bytes; a list of the later ones alone would have 16,000
    assert [one.answer.id for one in found[-3].later] == [f"{number - 2}", f"{number - 1}"]
    assert sum(1 for _ in found[0].later) == number - 1


def test_asking_pays_exactly_on_ambiguous_tasks():
    edit = answer("edit", asked_at=2.0), [event("accepted", "edit"), retained(0.5, 30.0)]
    edit[1][1] = retained(0.5, 30.0, at=140.0)
    of_other = answer("other", "bob", asked_at=2.0, session="session of ann"), edit[1]
    asked = Asked(cost=0.25)
    assert asked(in_session(True, edit)) == 0.5
    assert asked(in_session(False, edit)) == -0.25
    assert asked(in_session(None, edit)) == 0
    assert asked(in_session(True)) == asked(in_session(True, of_other)) == 0
    assert asked(given(ACCEPTED)) == 0
    again = answer("q2", asked_at=1.5, extra={"question": True}), []
    assert Asked(by="accepted")(in_session(True, edit, again)) == 1


def test_a_dissatisfied_message_is_told_from_others_it_never_saw():
    classifier = standard()
    made = messages(HELD_OUT, 400, seed=99)
    chances = classifier.chances([one.text for one in made])
    wanted = np.array([one.dissatisfied for one in made])
    assert np.mean(chances[wanted][:, None] > chances[~wanted][None]) > 0.8
    assert abs(chances.mean() - wanted.mean()) < 0.15


def test_a_follow_up_costs_by_its_text_or_else_by_its_value():
    signal = FollowUp()
    angry = event("follow_up", value=0.0, extra={"text": "that's wrong, the parser still crashes"})
    pleased = event("follow_up", value=1.0, extra={"text": "thanks, that works"})
    assert signal(given(angry)) < -0.8 and signal(given(pleased)) == 0
    assert signal(given(event("follow_up", value=0.75))) == pytest.approx(-0.5)
    assert signal(given(event("follow_up"))) == signal(given()) == 0
    assert -1 <= signal(given(event("follow_up", extra={"text": "\ud800" * 2_000 + "no"}))) <= 0


def test_the_order_of_arrival_does_not_matter():
    config = FeedbackRewardConfig(AGENT_SIGNALS)
    reward = make_reward(config)
    events = [
        SHOWN,
        ACCEPTED,
        event("accepted", key="again", at=105.0),
        retained(1.0, 30.0, at=132.0),
        retained(0.5, 300.0, at=402.0),
        event("edited", value=0.5, at=300.0),
        event("edited", value=0.9, at=400.0, key="again later"),
        event("merged", at=900.0),
    ]
    expected = reward(given(*events))
    assert expected.components["retention"] == 0.5 and expected.components["re_edited"] == -0.25
    assert expected.components["latency"] == pytest.approx(-0.01)
    assert expected.total == pytest.approx(sum(expected.components.values()))
    for seed in range(10):
        random.Random(seed).shuffle(events)
        assert reward(given(*events)) == expected


def build(*signals):
    return make_reward(read_config.build(FeedbackRewardConfig, {"signals": signals}))


def test_a_config_names_signals_weights_and_bounds():
    outside = "people.feedback.rewards.thumbs:thumbs"
    reward = build(
        {"name": "tab", "accepted": 1.0, "weight": 2.0, "cap": (-1.0, 1.5)},
        {"name": outside, "label": "voted"},
    )
    found = reward(given(ACCEPTED, event("thumbs", value=-1.0)))
    assert (found.total, found.components) == (0.5, {"tab": 1.5, "voted": -1.0})
    assert make_reward(FeedbackRewardConfig())(given()).total < 0  # latency alone


@pytest.mark.parametrize(
    ("signals", "says"),
    [
        (["tap"], "Did you mean 'tab'"),
        ([{"name": "tab", "accepted": -1.0}], "accepted"),
        ([{"name": "retention", "at": 3}], "takes no settings"),
        (["tab", "tab"], "names of their own"),
        ([{"name": "asked", "by": "tab"}], "expected one of retention, accepted"),
        (["people.feedback.rewards.combine:SIGNALS"], "cannot be called"),
        ([], "names of their own"),
    ],
)
def test_a_wrong_config_is_refused(signals, says):
    with pytest.raises(ConfigError, match=says):
        build(*signals)


def test_thumbs_are_in_no_default_reward():
    assert "thumbs" in SIGNALS
    assert "thumbs" not in make_reward(FeedbackRewardConfig()).components


def test_an_agent_is_paid_as_one_unless_a_config_names_signals():
    reward = make_reward(FeedbackRewardConfig())
    turn = given(ACCEPTED, kind="chat")
    paid = {kind: [one.component for one in own] for kind, own in STANDARD.items()}
    assert list(reward(given(ACCEPTED)).components) == paid["completion"]
    assert list(reward(turn).components) == paid["chat"]
    assert paid["chat"] == [one.component for one in AGENT_SIGNALS] and "tab" not in paid["chat"]
    assert set(reward.components) == {*paid["chat"], *paid["completion"]}
    named = build("tab")
    assert list(named(turn).components) == list(named(given(ACCEPTED)).components) == ["tab"]
    assert len({reward.version, named.version, build(*paid["completion"]).version}) == 3


def test_the_version_changes_with_the_function_alone():
    version = build("tab", "retention").version
    assert build("tab", "retention").version == version
    others = [
        build("retention", "tab"),
        build("tab"),
        build({"name": "tab", "accepted": 0.8}, "retention"),
        build("tab", {"name": "retention", "weight": 2.0}),
    ]
    assert len({version, *(other.version for other in others)}) == 5
    assert build("follow_up").version == build("follow_up").version
