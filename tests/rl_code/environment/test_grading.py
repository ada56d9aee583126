"""Tests of a repository: each is run once on the function that it names, and none passes unrun."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_code.environment.grading import grade_work, mark, targets
from rl_code.types import Case, Tests

# Functions of two files; "" and the first name the task's own.
TARGETS = ("", "solution.py:f", "solution.py:g", "more/other.py:f")
FILES = {
    "solution.py": "def f(x):\n    return x\ndef g(x):\n    return 2 * x\n",
    "more/other.py": "def f(x):\n    return 3 * x\n",
}
FACTOR = {"": 1, "solution.py:f": 1, "solution.py:g": 2, "more/other.py:f": 3}
cases = st.builds(
    lambda target, right: Case((1,), FACTOR[target] if right else -1, target=target),
    st.sampled_from(TARGETS),
    st.booleans(),
)
code = st.sampled_from(["assert f(1) == 1", "assert f(1) == -1"])
tests = st.builds(
    lambda cases, code: Tests(tuple(cases), tuple(code)),
    st.lists(cases, max_size=5),
    st.lists(code, max_size=2),
)


def expected(tests: Tests) -> tuple[bool, ...]:
    return (*(case.expected > 0 for case in tests.cases), *("-" not in t for t in tests.code))


@pytest.fixture
def repository(task):
    return dataclasses.replace(task, files=FILES, tools=None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(visible=tests, hidden=tests)
def test_every_test_is_run_on_the_function_that_it_names(pool, repository, limits, visible, hidden):
    task = dataclasses.replace(repository, visible_tests=visible, hidden_tests=hidden)
    grade = grade_work(task, FILES, pool, limits)
    assert (grade.visible, grade.hidden) == (expected(visible), expected(hidden))
    marks = mark(task, visible, FILES, pool, 1.0)
    assert tuple(not error for error in marks.errors) == expected(visible)


@given(tests=tests)
def test_a_function_is_one_target_however_it_is_named(task, tests):
    found = targets(task, tests)
    places = [(target.path, target.entry_point) for target in found]
    assert len(set(places)) == len(places)
    assert sorted(i for target in found for i in target.cases) == list(range(len(tests.cases)))
    assert sum(target.has_code for target in found) == bool(tests.code) or not tests.code


def test_grading_has_a_time_of_its_own_and_what_is_left_over_has_failed(pool, repository, limits):
    hidden = Tests(tuple(Case((1,), FACTOR[name], target=name) for name in TARGETS[1:]))
    task = dataclasses.replace(repository, visible_tests=Tests(), hidden_tests=hidden)
    pool.delay_s = 0.2
    short = dataclasses.replace(limits, grade_s=0.3)
    assert grade_work(task, FILES, pool, limits).hidden == (True,) * 3
    assert grade_work(task, FILES, pool, short).hidden == (True, True, False)
