"""A chooser finds what tells a real test from its copies, and nothing where nothing tells."""

from __future__ import annotations

import random

import pytest

from rl_code.redteam.chooser import Chooser, Group, groups, measure

PATH = "tests/test_a.py"
WORDS = ("stone", "river", "cloud", "plant", "house", "bread", "chair", "green", "winter", "field")


def text(rng: random.Random) -> str:
    """A file of tests."""
    tests = [
        f"def test_{number}(tmp_path):\n"
        f"    given = {[rng.randint(100, 999) for _ in range(3)]}\n"
        f"    assert call(given, {number}) == '{rng.choice(WORDS)} {rng.choice(WORDS)}'\n"
        for number in range(6)
    ]
    return "\n\n".join(tests)


def made(count: int, seed: int, real: str, others: str) -> list[Group]:
    """Groups whose real copies have one kind of letters, and all others another one."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        at = rng.randrange(4)
        kinds = [real if number == at else others for number in range(4)]
        words = ["".join(rng.choice(kind) for _ in range(5)) for kind in kinds]
        copies = tuple(f"def test():\n    assert f() == '{word}'\n" for word in words)
        found.append(Group("string", copies, at, "import shop\n"))
    return found


def right(chooser: Chooser, found: list[Group]) -> float:
    return chooser.scores(found)[-1].right / len(found)


def test_it_learns_what_tells_and_guesses_where_nothing_does():
    told = Chooser(made(80, 0, "aeiou", "bcdfg"))
    assert right(told, made(60, 1, "aeiou", "bcdfg")) > 0.9
    blind = Chooser(made(80, 0, "abcde", "abcde"))
    assert right(blind, made(200, 1, "abcde", "abcde")) < 0.4


def test_groups_are_the_copies_of_tests_that_nothing_tells():
    rng = random.Random(0)
    found = list(
        groups({PATH: text(rng), "tests/test_b.py": "def test_b():\n    assert f()\n"}, rng)
    )
    assert len(found) == 6 and all(len(set(one.copies)) >= 3 for one in found)
    assert all(copy.startswith("def test(") for one in found for copy in one.copies)
    places = {one.real for one in found}
    assert len(places) > 1  # not always the first
    (last,) = [row for row in Chooser(found).scores(found) if row.kind == "all"]
    assert last.groups == 6 and last.chance == pytest.approx(
        sum(1 / len(one.copies) for one in found)
    )


def test_a_folder_without_such_tests_is_named(tmp_path):
    with pytest.raises(ValueError, match="no test there can have canaries"):
        measure([tmp_path], [tmp_path], 5)
