"""A case accepts exactly what its tolerance says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_code.environment.compare import accepts, same
from rl_code.types import Case

KEYS = st.booleans() | st.integers() | st.text(max_size=3)
VALUES = st.recursive(
    st.none() | KEYS | st.floats() | st.binary(max_size=3) | st.frozensets(KEYS, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=5,
)
ALIKE = [
    (1, True),
    (1, 1.0),
    (0, False),
    ([1], [1.0]),
    ((1, 2), (True, 2)),
    ({1: "a"}, {True: "a"}),
    ({"a": 1}, {"a": 1.0}),
    ({1, 2}, {1.0, 2}),
    ({(1,)}, {(True,)}),
    ({frozenset({1})}, {frozenset({1.0})}),
    ({1}, frozenset({1})),
    (0.0, 0),
]


@given(VALUES)
def test_every_value_is_the_same_as_itself(value):
    assert same(value, value) and accepts(Case((), value), value)


@pytest.mark.parametrize(("a", "b"), ALIKE)
def test_without_tolerance_equal_values_of_other_types_are_refused(a, b):
    assert a == b
    for expected, value in ((a, b), (b, a)):
        assert not accepts(Case((), expected), value)
        assert accepts(Case((), expected, tolerance=0.0), value)


@pytest.mark.parametrize(
    ("a", "b"),
    [([1], (1,)), (1, "1"), (None, False), ([1, 2], [1]), ({"a": 1}, {"b": 1}), (1, 1.0001)],
)
def test_tolerance_zero_is_equality(a, b):
    assert not accepts(Case((), a, tolerance=0.0), b)


def test_tolerance_reaches_numbers_at_every_depth_and_nothing_else():
    expected = [1.0, (2, {"k": 3.0})]
    assert accepts(Case((), expected, tolerance=1e-6), [1.0 + 5e-7, (2.0, {"k": 3.0 - 5e-7})])
    assert not accepts(Case((), expected, tolerance=1e-6), [1.0 + 5e-6, (2, {"k": 3.0})])
    assert not accepts(Case((), expected, tolerance=1e-6), [1.0, [2, {"k": 3.0}]])
    assert not accepts(Case((), expected, tolerance=1e-6), [1.0, (2, {"j": 3.0})])
    assert not accepts(Case((), "1.0", tolerance=1e-6), 1.0)


def test_numbers_beyond_the_range_of_floats_compare():
    assert not accepts(Case((), 1.5, tolerance=1e-6), 10**400)
    assert not accepts(Case((), 10**400, tolerance=1e-6), 1.5)
    assert not accepts(Case((), math.inf, tolerance=1e-6), 1e300)
    assert not accepts(Case((), 1.0, tolerance=1e-6), math.inf)
    assert accepts(Case((), math.inf, tolerance=1e-6), math.inf)
    assert not accepts(Case((), math.inf, tolerance=1e-6), -math.inf)


@pytest.mark.parametrize(
    ("expected", "value", "accepted"),
    [
        (6.6e-34, 0.0, False),
        (6.6e-34, 6.6e-34 * (1 + 5e-7), True),
        (6.6e-34, 6.6e-34 * (1 + 5e-6), False),
        (3e-7, 0.0, False),
        ([3e-7, 4e-7], [3e-7, 0.0], False),
        (0.0, 1.2e-16, True),
        (0.0, 1e-9, False),
        ([1e6, 0.0], [1e6, 1e-8], True),
        ([1e6, 0.0], [1e6, 1e-5], False),
        (1e12, 1e12 + 1e4, True),
        (1e12, 1e12 + 1e6, False),
        (0.5, 0.5 + 4e-7, True),
        (0.5, 0.5 + 7e-7, False),
    ],
)
def test_tolerance_is_relative_below_one_and_knows_the_scale(expected, value, accepted):
    assert accepts(Case((), expected, tolerance=1e-6), value) is accepted


@given(st.floats(-1e9, 1e9).filter(lambda x: abs(x) > 1e-300), st.floats(1e-9, 0.1))
def test_a_relative_error_is_judged_alike_at_every_small_scale(number, tolerance):
    small = number / 1e9
    case = Case((), small, tolerance=tolerance)
    assert accepts(case, small * (1 + tolerance / 2))
    assert not accepts(case, small * (1 + 2 * tolerance + 1e-6))
