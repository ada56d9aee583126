"""Simulated programmers who carry a change through several files."""

from __future__ import annotations

import numpy as np
import pytest

from people.simulated.fit import embedded
from people.simulated.jumper import JUMP_HABITS, Jumper, JumpHabits

REMAINING = ("a.py:3", "b.py:1")


def rate(habits: JumpHabits, place: str) -> float:
    """The share of 200 persons who take a jump."""
    people = [Jumper(embedded(), habits, i, "history") for i in range(200)]
    return float(np.mean([one.takes(place, REMAINING) for one in people]))


@pytest.mark.parametrize("name", JUMP_HABITS)
def test_the_next_place_is_taken_most_often_and_a_wrong_one_hardly(name):
    habits = JUMP_HABITS[name]
    following, later, wrong = (rate(habits, place) for place in (*REMAINING, "c.py:1"))
    assert following > later > wrong
    assert (wrong == 0) == (habits.wrong == 0)
    # nothing is left to do
    assert Jumper(embedded(), habits, 0).chance("a.py:3", ()) < 0.5


def test_persons_differ_and_one_person_does_the_same_again():
    habits = JUMP_HABITS["usual"]
    chances = {Jumper(embedded(), habits, i).chance("b.py:1", REMAINING) for i in range(20)}
    assert len(chances) == 20
    alike = JumpHabits(persons=0.0)
    assert Jumper(embedded(), alike, 1).chance("b.py:1", REMAINING) == pytest.approx(0.75)
    first, again = (
        [Jumper(embedded(), habits, i, "h").takes("b.py:1", REMAINING) for i in range(30)]
        for _ in range(2)
    )
    assert first == again
    assert first != [
        Jumper(embedded(), habits, i, "g").takes("b.py:1", REMAINING) for i in range(30)
    ]


@pytest.mark.parametrize("wrong", [{"next": 1.5}, {"wrong": -0.1}, {"persons": -1.0}])
def test_wrong_habits_are_named(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        JumpHabits(**wrong)
