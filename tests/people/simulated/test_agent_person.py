"""A simulated person decides by what the agent really did."""

from __future__ import annotations

import dataclasses
import random

import pytest

from people.feedback.records import EVENTS, Event
from people.feedback.rewards.follow_up_data import DISSATISFIED, HELD_OUT, training_families
from people.simulated.agent_habits import KINDS, AgentHabits
from people.simulated.agent_person import AgentPerson, Decision, Happened, Turn
from people.simulated.changes import Change, renamed
from people.simulated.fit import embedded
from people.simulated.post import Post

BEFORE = {"f.py": "def f(xs):\n    pass\n"}
RIGHT = {"f.py": "def f(xs):\n    return [x + 2 for x in xs]\n"}
WRONG = {"f.py": "def f(xs):\n    return [x + 3 for x in xs]\n"}
# Checks everything by tests, differs from nobody, votes and complains always, posts all at once.
EXACT = AgentHabits(
    tests=1.0,
    mends=0.0,
    reverts=1.0,
    talks=1.0,
    opens=1.0,
    votes=1.0,
    fair=1.0,
    goes_on=0.0,
    persons=0.0,
)


def turn(after=RIGHT, **changes) -> Turn:
    found = dict(
        answers=("a",),
        questions=(),
        change=Change(BEFORE, after),
        wanted=RIGHT,
        handed_in=True,
        ambiguous=False,
        tested=None,
        passes=after == RIGHT,
        right=after == RIGHT,
    )
    return Turn(**found | changes)


def decided(given: Turn, attempt: int = 0, seed: int | str = 0, **habits) -> Decision:
    person = AgentPerson(embedded(), dataclasses.replace(EXACT, **habits), seed)
    return person.decide(given, attempt)


def values(decision: Decision) -> dict[str, float | None]:
    return {one.kind: one.value for one in decision.happened}


def test_a_right_change_is_kept_and_merged():
    found = decided(turn())
    happened = values(found)
    assert found.done and not found.disappointed and not found.says and found.satisfaction == 1.0
    assert found.files == RIGHT and happened["retained"] == 1.0 and happened["thumbs"] == 1.0
    assert happened.keys() == {"shown", "accepted", "retained", "opened", "merged", "thumbs"}


def test_a_wrong_change_is_taken_back_and_complained_about():
    found = decided(turn(WRONG))
    happened = values(found)
    assert not found.done and found.disappointed and found.files == BEFORE
    assert happened["reverted"] == 1.0 and happened["thumbs"] == -1.0 and found.says
    assert happened.keys() == {"shown", "rejected", "reverted", "follow_up", "thumbs"}
    (said,) = [one for one in found.happened if one.kind == "follow_up"]
    assert said.extra == {"text": found.says}
    # whoever has no more patience does it alone
    last = decided(turn(WRONG), attempt=EXACT.patience)
    assert last.done and last.files == RIGHT and "reverted" in values(last)


def test_a_wrong_change_that_is_mended_by_hand_tells_the_share_that_was_changed():
    found = decided(turn(WRONG), mends=1.0)
    happened = values(found)
    # one of the ten tokens that the agent wrote
    assert found.files == RIGHT and happened["edited"] == pytest.approx(0.1)
    assert happened["retained"] == pytest.approx(0.9) and "merged" not in happened
    assert 0 < found.satisfaction < 1


def test_a_mistake_that_own_tests_do_not_see_is_opened_found_later_and_never_merged():
    found = decided(turn(WRONG, passes=True), finds=1.0)
    kept = {one.horizon_s: one.value for one in found.happened if one.kind == "retained"}
    assert kept[300.0] == 1.0 and kept[3_600.0] == pytest.approx(0.9)
    assert "opened" in values(found) and "merged" not in values(found)
    assert found.satisfaction == 0.0


def test_what_is_more_than_needed_is_trimmed_and_large_diffs_are_not_merged():
    long = {"f.py": RIGHT["f.py"] + "# more\n" * 9}
    found = decided(turn(long, passes=True, right=True))
    assert found.files == RIGHT and values(found)["edited"] > 0 and "merged" in values(found)
    large = decided(turn(long, passes=True, right=True), merged_lines=4)
    assert "opened" in values(large) and "merged" not in values(large)
    assert large.satisfaction < 1.0


def test_names_are_replaced_by_those_who_like_longer_ones():
    found = decided(turn(), shortest_name=2)
    assert "each_x" in found.files["f.py"] and values(found)["edited"] > 0
    assert renamed("def f(x:\n", 2) == "def f(x:\n"  # what cannot be read stays


def test_nothing_but_questions_is_refused_and_a_needless_one_costs():
    only = turn(BEFORE, answers=(), questions=("q",), passes=False, right=False)
    found = decided(only)
    assert {one.kind for one in found.happened} == {"shown", "rejected", "follow_up"}
    assert found.happened[0].extra == {"ambiguous": False} and found.disappointed
    clear = decided(turn(questions=("q",)))
    unclear = decided(turn(questions=("q",), ambiguous=True))
    assert clear.satisfaction < unclear.satisfaction == 1.0
    assert unclear.happened[0].extra == {"ambiguous": True}


def test_the_same_person_does_the_same_and_persons_differ():
    def rates(seed: str, kind: str = "steady") -> list[Decision]:
        person = AgentPerson(embedded(), KINDS[kind], seed, "history")
        return [person.decide(turn(after), 0) for after in (RIGHT, WRONG) * 5]

    assert rates("a") == rates("a") != rates("b")
    assert rates("a") != rates("a", "hurried")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_happier_with_right_changes_and_keeps_more_of_them(kind):
    def mean(after) -> tuple[float, float]:
        found = [
            AgentPerson(embedded(), KINDS[kind], f"{kind}/{i}").decide(turn(after), 0)
            for i in range(120)
        ]
        kept = [values(one).get("retained") or 0.0 for one in found]
        return sum(one.satisfaction for one in found) / 120, sum(kept) / 120

    (right, kept), (wrong, kept_wrong) = mean(RIGHT), mean(WRONG)
    assert right > wrong + 0.3 and kept > kept_wrong


def test_satisfaction_is_in_no_event():
    fields = {field.name for field in dataclasses.fields(Happened)}
    assert fields == {"answers", "kind", "after_s", "value", "horizon_s", "extra"}
    for kind in KINDS:
        for after in (RIGHT, WRONG):
            person = AgentPerson(embedded(), KINDS[kind], kind)
            for one in person.decide(turn(after, questions=("q",)), 0).happened:
                assert one.kind in EVENTS and one.extra.keys() <= {"text", "ambiguous"}


def test_some_families_of_complaints_are_unknown_to_the_classifier():
    spoken = {family for habits in KINDS.values() for family in habits.words}
    assert spoken & set(HELD_OUT) and spoken & set(training_families())
    assert spoken <= DISSATISFIED.keys()
    with pytest.raises(ValueError, match="words"):
        AgentHabits(words=("thanks",))
    with pytest.raises(ValueError, match="care"):
        AgentHabits(care=1.5)


def test_the_post_sends_late_loses_and_repeats_by_its_chances():
    now = [0.0]
    post = Post(10.0, clock=lambda: now[0])
    sent: list[Event] = []
    habits = dataclasses.replace(EXACT, late=0.3, lost=0.1, twice=0.2)
    events = [Event(str(i), "a", "shown", 0.0, 0.0) for i in range(500)]
    lost = post.take(events, habits, random.Random(0), sent.extend)
    assert 20 < len(lost) < 90
    at_once = {event.key for event in sent}
    assert 0.5 < len(at_once) / 500 < 0.75
    now[0] = 1_000.0
    assert post.deliver() == 0
    # all but those that were lost have come, some of them twice, with the same keys
    keys = [event.key for event in sent]
    assert set(keys) == {event.key for event in events} - {event.key for event in lost}
    assert len(set(keys)) < len(keys)
    # what is rare comes later, whoever sends it
    post.take([Event("m", "a", "merged", 0.0, 1.0)], EXACT, random.Random(0), sent.extend)
    assert sent[-1].key != "m" and post.deliver(everything=True) == 0 and sent[-1].key == "m"
