"""Proposed inputs are new, deterministic, and keep to what the known ones have in common."""

from __future__ import annotations

import random

import pytest

from rl_code.tasks.mutation import propose


def proposals(known, count=60, seed=0):
    return propose(known, count, random.Random(seed))


def test_proposals_are_new_distinct_and_a_function_of_the_seed():
    known = [(["ab", "c"], 2), (["d"], 5)]
    first = proposals(known)
    assert len(first) == 60 == len(set(map(repr, first)))
    assert not {repr(a) for a in known} & set(map(repr, first))
    assert first == proposals(known) != proposals(known, seed=1)


def test_the_known_inputs_are_left_alone():
    known = [([[1, 2], [3]], {"a": [1]}), ([[4]], {"b": [2]})]
    before = repr(known)
    proposals(known)
    assert repr(known) == before


KINDS = {
    "types": (
        [(1, "a", True, [1.5], (2, "x"), {"k": [1]}, {3})] * 2,
        lambda a: _types(a) == "int str bool list tuple dict set",
    ),
    "positive": ([(3,), (8,)], lambda a: 1 <= a[0] <= 16),
    "not negative": ([(0,), (8,)], lambda a: 0 <= a[0] <= 16),
    "any sign": ([(-4,), (8,)], lambda a: -16 <= a[0] <= 16),
    "not empty": ([([1, 2],), ([3],)], lambda a: 1 <= len(a[0]) <= 4),
    "ascending": ([([1, 2, 5],), ([3, 8, 9],)], lambda a: a[0] == sorted(a[0])),
    "descending": ([([5, 2, 1],), ([9, 8, 3],)], lambda a: a[0] == sorted(a[0], reverse=True)),
    "distinct": ([([5, 2, 1],), ([9, 8, 3],)], lambda a: len(set(a[0])) == len(a[0])),
    "records": ([([(1, "a"), (2, "b")],), ([(3, "c")],)], lambda a: all(map(_record, a[0]))),
    "rectangular": (
        [([[1, 2], [3, 4]],), ([[1, 2, 3]],)],
        lambda a: len({len(row) for row in a[0]}) <= 1,
    ),
    "characters": ([("hello",), ("abc",)], lambda a: a[0].isalpha() and a[0].islower()),
    "brackets": ([("(a)[b]",), ("(())",)], lambda a: a[0].count("(") == a[0].count(")")),
    "length given": ([([1, 2], 2), ([1, 2, 3], 3)], lambda a: len(a[0]) == a[1]),
    "at most length": ([([1, 2, 4], 2), ([1, 2, 3], 3)], lambda a: a[1] <= len(a[0])),
    "index": ([([1, 2, 4], 2), ([1, 2, 3], 0)], lambda a: a[1] < len(a[0])),
    "equal lengths": ([([1, 2], [3, 4]), ([1], [2])], lambda a: len(a[0]) == len(a[1])),
    "interval": ([(1, 5), (2, 9)], lambda a: a[0] <= a[1]),
}


def _types(arguments) -> str:
    return " ".join(type(value).__name__ for value in arguments)


def _record(value) -> bool:
    return len(value) == 2 and type(value[0]) is int and type(value[1]) is str


@pytest.mark.parametrize("name", KINDS)
def test_proposals_keep_to_the_kind_of_the_known_inputs(name):
    known, holds = KINDS[name]
    found = proposals(known)
    assert len(found) >= 5
    assert all(holds(arguments) for arguments in known)
    assert [arguments for arguments in found if not holds(arguments)] == []


def test_functions_without_known_inputs_get_none():
    assert proposals([]) == proposals([()]) == proposals([(1,), (1, 2)]) == []
