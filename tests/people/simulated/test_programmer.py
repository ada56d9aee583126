"""Simulated programmers do what their habits say."""

from __future__ import annotations

import dataclasses

import pytest

from people.simulated.fit import embedded
from people.simulated.programmer import NAMED, Habits, Programmer, Reading, match

BEFORE = "def f(x):\n    return "
WANTED = "x + 1 if x > 2 else 0"
NEAR = "x + 1 if x > 3 else 0"


def chance(habits: Habits, suggestion: str, seed: int = 0) -> float:
    return Programmer(embedded(), habits, seed).chance(BEFORE, suggestion, WANTED)


@pytest.mark.parametrize("name", NAMED)
def test_the_chance_is_how_often_it_accepts(name):
    programmer = Programmer(embedded(), NAMED[name], 3)
    wanted = programmer.chance(BEFORE, NEAR, WANTED)
    count = 750
    share = sum(programmer.react(BEFORE, NEAR, WANTED).accepted for _ in range(count)) / count
    assert abs(share - wanted) < 0.06


@pytest.mark.parametrize("name", NAMED)
def test_the_right_text_is_accepted_more_often(name):
    right, near, wrong = (chance(NAMED[name], text) for text in (WANTED, NEAR, "import os"))
    assert right > near > wrong
    # a suggestion pays above 1/4, so there is something to show and something to leave out
    assert right > 0.25 > wrong


def test_habits_shift_the_chance_as_they_say():
    recorded = chance(Habits(), NEAR)
    assert chance(Habits(leniency=1.0), NEAR) > recorded
    assert chance(Habits(noise=1.0), NEAR) == 0.5
    assert chance(Habits(length=-1.0), "x + 1" * 20) < chance(Habits(), "x + 1" * 20)
    assert chance(Habits(taste=3.0), WANTED) > chance(Habits(), WANTED)
    assert chance(Habits(ambiguity=1.0), WANTED) < 0.3 < chance(Habits(), WANTED)
    assert chance(Habits(pace=0.1), NEAR) == pytest.approx(recorded)


def test_pace_and_rewriting_change_what_follows():
    usual, fast = (Programmer(embedded(), Habits(pace=pace), 1) for pace in (1.0, 0.1))
    a, b = (one.react(BEFORE, WANTED, WANTED) for one in (usual, fast))
    assert b.seconds == pytest.approx(a.seconds / 10)
    rewriter = Programmer(embedded(), Habits(leniency=9.0, rewriting=0.5), 1)
    reactions = [rewriter.react(BEFORE, WANTED, WANTED) for _ in range(30)]
    assert all(share <= 0.5 for one in reactions for _, share in one.alive)


def test_the_same_seed_is_the_same_person_and_another_seed_another():
    def history(seed):
        programmer = Programmer(embedded(), NAMED["diverse"], seed)
        return [programmer.react(BEFORE, NEAR, WANTED) for _ in range(5)]

    assert history(1) == history(1)
    assert history(1) != history(2)
    chances = {chance(NAMED["diverse"], NEAR, seed) for seed in range(5)}
    assert len(chances) == 5


def test_match_reads_tokens():
    assert match("x+1", "x + 1") == 1.0
    assert match("", "") == 1.0
    assert match("", "x") == 0.0
    assert match("y * 3", "import os") == 0.0
    assert 0 < match("x + 1", "x + 2") < 1


def test_a_reading_ranks_a_match_among_those_that_are_shown():
    read = Reading((0.0, 0.5, 0.9, 1.0, 1.0))
    ranks = [read.rank(m) for m in (0.0, 0.25, 0.5, 0.7, 0.9)]
    assert ranks == pytest.approx([0, 0.125, 0.25, 0.375, 0.5])
    # those that are right share the middle of their ranks
    assert read.rank(1.0) == 0.875
    assert Reading((0.2, 0.8)).rank(0.1) == 0.0 and Reading((0.2, 0.8)).rank(0.9) == 1.0
    assert Reading().rank(0.3) == 0.3


def test_what_is_like_all_that_is_shown_is_accepted_less_often_with_a_reading():
    def of(reading, text):
        programmer = Programmer(embedded(), NAMED["particular"], 0, reading=reading)
        return programmer.chance(BEFORE, text, WANTED)

    common = Reading((0.0, 0.9, 0.95, 1.0, 1.0))
    assert of(common, NEAR) < of(Reading(), NEAR)
    assert of(dataclasses.replace(common, leniency=1.0), NEAR) > of(common, NEAR)


@pytest.mark.parametrize("matches", [(0.5,), (0.9, 0.1), (0.0, 1.1)])
def test_a_reading_needs_rising_shares(matches):
    with pytest.raises(ValueError, match="rising shares"):
        Reading(matches)


@pytest.mark.parametrize("wrong", [{"noise": 1.5}, {"pace": 0.0}, {"ambiguity": -1.0}])
def test_wrong_habits_are_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        dataclasses.replace(Habits(), **wrong)
