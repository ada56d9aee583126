"""A source of repository-like tasks from outside of the tree, as docs/adding.md adds it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from rl_code.config.read_config import ConfigError
from rl_code.tasks.api import find_source
from rl_code.types import Case
from tests.drills.episodes import SUBMIT, answers, configured, player, write

FILES = {
    "shop/__init__.py": "",
    "shop/prices.py": "def total(prices):\n    return sum(prices) + 1\n",
    "shop/taxes.py": (
        "from shop.prices import total\n\n\ndef taxed(prices):\n    return total(prices)\n"
    ),
}
TESTS = {
    "visible": [{"target": "shop/prices.py:total", "args": [[1, 2]], "expected": 3}],
    "hidden": [
        {"target": "shop/taxes.py:taxed", "args": [[10]], "expected": 20},
        {"target": "shop/prices.py:total", "args": [[]], "expected": 0},
    ],
}
RIGHT_PRICES = "def total(prices):\n    return sum(prices)\n"
DOUBLE_TAXES = "<|call|>run\nsed -i 's/return total/return 2 * total/' shop/taxes.py<|end|>"
TEST = "<|call|>test<|end|>"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "tasks"
    for name, text in FILES.items():
        path = folder / "shop-1" / "repo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "shop-1" / "issue.md").write_text("Totals are off by one, taxes are 100 %.")
    (folder / "shop-1" / "tests.json").write_text(json.dumps(TESTS))
    return folder


def test_repositories_with_tests_over_several_modules_come_from_outside(outside, folder):
    outside("A source of tasks")
    config = configured(
        tasks=dict(name="my_lab.repositories:Repositories", folder=str(folder)),
        tokenizer=dict(source="file", path="tokenizer.json"),
        reward=dict(signals=("tests", dict(name="partial", weight=0.5))),
    )
    (task,) = find_source(config.tasks, "tasks").load(None, None)
    assert task.files == FILES and len(task.hidden_tests) == 2
    with player(config) as play:
        both = play(task, TEST, write(RIGHT_PRICES) + DOUBLE_TAXES + TEST, SUBMIT)
        half = play(task, write(RIGHT_PRICES) + SUBMIT)
        code = dataclasses.replace(
            task.hidden_tests, code=("assert total([2, 2]) == 4", "assert total([]) == 1")
        )
        mixed = play(dataclasses.replace(task, hidden_tests=code), write(RIGHT_PRICES) + SUBMIT)
    assert answers(both)[0] == "FAIL total([1, 2]) gave 4 want 3 left 2"
    assert answers(both)[-2:] == ["PASS left 1", "submitted"]
    assert both.solved and both.reward.total == 1.0
    assert not half.solved and half.reward.total == 0.5 * 1 / 2
    assert mixed.reward.total == 0.5 * 2 / 4


def test_a_wrong_source_is_named_when_the_config_is_built(outside):
    outside("A source of tasks")
    with pytest.raises(ConfigError, match=r"tasks\.folder: missing"):
        configured(tasks="my_lab.repositories:Repositories")
    with pytest.raises(ConfigError, match=r"which tasks\.name='my_lab.repositories:Repositories'"):
        configured(tasks=dict(name="my_lab.repositories:Repositories", folder="x"))


def test_the_target_of_a_case_is_a_file_and_a_function():
    with pytest.raises(ValueError, match=r"must be path/of/file\.py:function"):
        Case((1,), 2, target="total")
