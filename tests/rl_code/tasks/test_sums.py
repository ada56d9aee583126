"""Sums: the reference passes, a demonstration is right as often as it should be, splits are apart."""

from __future__ import annotations

import random

import pytest

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.tasks.api import find_source
from rl_code.tasks.demonstrations import DemonstrationConfig, demonstrate
from rl_code.types import Limits
from tests.rl_code.environment.conftest import call_here

LIMITS = Limits(turns=1, tokens=60, turn_tokens=30, test_runs=0, command_s=5.0)


def tasks(split, count, **settings):
    source = find_source(Named("sums", {"split": split, **settings}), "config.tasks")
    return source.load(None, None)[:count]


def passes(text, task):
    (case,) = task.hidden_tests.cases
    (result,) = call_here(text, task.entry_point, [case.args])
    return result.ok and result.value == case.expected


def test_the_reference_passes_and_is_one_line():
    for task in tasks("train", 4):
        text = task.reference[task.path]
        assert passes(text, task) and text.count("\n") == 1
        assert eval(task.messages[0]["content"]) == task.hidden_tests.cases[0].expected


def test_the_place_of_a_number_does_not_say_whether_it_is_the_larger_one():
    first = {True: 0, False: 0}
    for task in tasks("train", 200, signs=("max", "min"), most=99):
        one, sign, other = task.messages[0]["content"].split()
        numbers = int(one), int(other)
        assert one != other
        expected = task.hidden_tests.cases[0].expected
        assert expected == {"max": max, "min": min}[sign](numbers) and passes(
            task.reference[task.path], task
        )
        first[int(one) == expected] += 1
    assert min(first.values()) > 70


def test_demonstrations_are_right_as_often_as_the_source_says():
    for right in (0.0, 0.4, 1.0):
        found = []
        for task in tasks("train", 300, right=right):
            prompt, said = demonstrate(task, random.Random(0), DemonstrationConfig(), LIMITS)
            assert said.sampled and not prompt.sampled
            found.append(task.reference[task.path].strip() + "\n" in said.text)
        assert abs(sum(found) / len(found) - right) < 0.1


def test_a_pair_of_numbers_belongs_to_one_split():
    pairs = {
        split: {
            tuple(sorted(task.messages[0]["content"].replace("-", "+").split(" + ")))
            for task in tasks(split, 500)
        }
        for split in ("train", "validation", "test")
    }
    assert all(len(found) > 20 for found in pairs.values())
    assert not pairs["train"] & pairs["test"] and not pairs["validation"] & pairs["test"]


@pytest.mark.parametrize("wrong", [{"most": 3}, {"right": 2.0}, {"signs": ("*",)}, {"signs": ()}])
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        tasks("train", 1, **wrong)
