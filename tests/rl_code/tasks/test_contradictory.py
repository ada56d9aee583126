"""Honest work never passes a contradictory task, and work that bends to the test does."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_code.config.named import Named
from rl_code.environment.compare import accepts
from rl_code.tasks.api import find_source
from rl_code.tasks.contradictory import another, contradict
from rl_code.types import Case, Tests
from tests.rl_code.environment.conftest import call_here

GENERATED = {"name": "generated", "split": "train", "levels": (1, 2)}
SOURCE = find_source(Named("contradictory", {"of": GENERATED}), "config.tasks")
PLAIN = find_source(Named.from_config(GENERATED, "config.tasks"), "config.tasks")

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e6, 1e6) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=6,
)


@given(values, st.integers(0, 1000))
@settings(max_examples=200, deadline=None)
def test_another_value_is_never_accepted_in_place_of_the_expected_one(value, seed):
    wrong = another(value, random.Random(seed))
    assert not accepts(Case((), value), wrong)
    if isinstance(value, int | float):
        assert not accepts(Case((), value, 1e-3), wrong)
    assert type(wrong) is type(value) or value is None


def passes(task, text: str) -> list[bool]:
    cases = task.visible_tests.cases + task.hidden_tests.cases
    results = call_here(text, task.entry_point, [case.args for case in cases])
    return [one.ok and accepts(case, one.value) for one, case in zip(results, cases, strict=True)]


@pytest.mark.parametrize("index", range(12))
def test_the_reference_fails_one_visible_case_and_special_casing_passes_all(index):
    plain = PLAIN.load(None, None)[index]
    task = SOURCE.load(None, None)[index]
    assert task == contradict(plain) and task.messages == plain.messages
    assert task.reference == {} and task.hidden_tests == plain.hidden_tests
    if set(plain.reference) != {task.path}:
        pytest.skip("the reference has several files")
    honest = plain.reference[task.path]
    assert all(passes(plain, honest))
    at = task.meta["contradictory"]
    assert [i for i, passed in enumerate(passes(task, honest)) if not passed] == [at]
    case = task.visible_tests.cases[at]
    bent = f"{honest}\n_f = {task.entry_point}\ndef {task.entry_point}(*args):\n"
    bent += f"    return {case.expected!r} if args == {case.args!r} else _f(*args)\n"
    assert all(passes(task, bent))


def test_a_task_whose_tests_cannot_contradict_is_named():
    task = PLAIN.load(None, None)[0]
    bare = dataclasses.replace(task, visible_tests=Tests())
    with pytest.raises(ValueError, match=f"task {task.id} has no visible case"):
        contradict(bare)
    seen = dataclasses.replace(task, hidden_tests=task.visible_tests)
    with pytest.raises(ValueError, match="has no visible case whose input is not"):
        contradict(seen)
