"""Tasks that ask for the same function are found; tasks that merely sound alike are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rl_code.tasks import mbpp
from rl_code.tasks.deduplicate import DuplicateConfig, code_of, near_duplicates, words_of
from rl_code.types import Task, Tests

CONFIG = DuplicateConfig(words=0.8, code=0.8)
LONG = """def f(values):
    total = 0
    for value in values:
        if value % 2 == 0:
            total += value * value
    return total
"""
RENAMED = '''def sum_it(numbers):
    """Adds."""
    s = 0
    for number in numbers:  # each
        if number % 2 == 0:
            s += number * number
    return s
'''


def task(name: str, description: str, code: str) -> Task:
    return Task(
        name,
        (),
        {},
        "a.py",
        "f",
        Tests(),
        Tests(),
        {"a.py": code},
        meta={"description": description},
    )


def test_same_words_in_other_clothes_are_duplicates():
    a = task("a", "Write a function to find minimum of two numbers.", "def f(x, y): return x")
    b = task(
        "b",
        "Write a python function to find the minimum of two given numbers.",
        "def g(a): return 2",
    )
    (pair,) = near_duplicates([a], [b], CONFIG)
    assert (pair.task, pair.other, pair.words) == ("a", "b", 1.0)


def test_the_same_code_under_other_names_is_a_duplicate():
    a = task("a", "even squares", LONG)
    b = task("b", "something quite different", RENAMED)
    assert code_of(a) == code_of(b)
    assert [pair.other for pair in near_duplicates([a], [b], CONFIG)] == ["b"]


def test_different_tasks_and_short_code_are_no_duplicates():
    a = task(
        "a", "Write a function to find the maximum of two numbers.", "def f(a, b): return a + b"
    )
    b = task("b", "Write a function to reverse a string.", "def g(x, y): return x + y")
    assert near_duplicates([a], [b], CONFIG) == []


def test_a_task_is_no_duplicate_of_itself():
    a = task("a", "even squares of a list", LONG)
    assert near_duplicates([a], [a], CONFIG) == []


def test_code_that_does_not_parse_still_compares():
    a = task("a", "one thing here", LONG + "  oops (")
    b = task("b", "other thing", LONG + "  oops (")
    assert near_duplicates([a], [b], CONFIG)


def test_words_ignore_plurals_and_filler():
    assert words_of("Write a function to find the sums of given arrays") == words_of(
        "sum of a list"
    )


@pytest.mark.skipif(
    "RL_CODE_DATA" not in os.environ, reason="RL_CODE_DATA, the folder with mbpp.jsonl, is not set"
)
def test_known_duplicates_of_mbpp_are_found():
    tasks = mbpp.load(str(Path(os.environ["RL_CODE_DATA"]) / "mbpp.jsonl"))
    train = [t for t in tasks if t.meta["split"] == "train" and t.meta["number"] >= 900]
    test = [t for t in tasks if t.meta["split"] == "test"]
    found = {pair.task: pair.other for pair in near_duplicates(train, test, CONFIG)}
    assert found["MBPP/970"] == "MBPP/404"
    assert len(found) < len(train) / 2
