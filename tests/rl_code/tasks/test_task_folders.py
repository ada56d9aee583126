"""Tasks from folders and files of known forms: Exercism, QuixBugs, HumanEvalFix. All texts
here are made for these tests."""

from __future__ import annotations

import json

import pytest

from rl_code.config.named import Named
from rl_code.tasks import validate
from rl_code.tasks.api import find_source
from rl_code.tasks.pytest_ids import UnknownIds, ids_of
from rl_code.tasks.row_files import TaskFileError
from rl_code.types import Limits
from tests.rl_code.tasks import projects

LIMITS = Limits(turns=1, tokens=1, turn_tokens=1, test_runs=1, command_s=60.0, grade_s=120.0)


def source(name, path, **settings):
    return find_source(Named(name, {"path": str(path), **settings}), "tasks")


def reasons(tasks, pool):
    return {
        id: found if isinstance(found, str) else validate.judge(found, pool, LIMITS, 1).reason
        for id, found in tasks
    }


# --- Exercism -------------------------------------------------------------------------------------

EXERCISE = {
    ".docs/instructions.md": "# Instructions\n\nCount the even numbers.\n",
    ".meta/example.py": "def evens(numbers):\n    return sum(n % 2 == 0 for n in numbers)\n",
    "count_evens.py": "def evens(numbers):\n    pass\n",
    "count_evens_test.py": (
        "import unittest\nfrom count_evens import evens\n\n\nclass CountEvensTest(unittest.TestCase):\n"
        "    def test_some(self):\n        self.assertEqual(evens([1, 2, 4]), 2)\n\n"
        "    def test_kept(self):\n        self.assertTrue(callable(evens))\n\n"
        "    @unittest.skip('extra')\n    def test_extra(self):\n        self.fail()\n"
    ),
}
PREFIX = "count_evens_test.py::CountEvensTest::"


def test_an_exercise_becomes_a_task_that_works(layered_pool, packages, tmp_path):
    track = tmp_path / "track" / "exercises" / "practice"
    projects.write(track / "count-evens", EXERCISE)
    projects.write(track / "no-docs", {**EXERCISE, ".docs/instructions.md": ""})
    config = {"files": {"solution": ["count_evens.py"], "test": ["../x_test.py"]}}
    projects.write(track / "outside", {**EXERCISE, ".meta/config.json": json.dumps(config)})
    config = {"files": {"solution": "count_evens.py"}}
    projects.write(track / "no-list", {**EXERCISE, ".meta/config.json": json.dumps(config)})
    projects.write(track / "no-text", EXERCISE)
    (track / "no-text" / ".docs" / "introduction.md").write_bytes(b"\xff")
    exercises = source("exercism", tmp_path / "track", places={"packages": packages})
    assert exercises.count() == 5
    found = dict(exercises.load_each(layered_pool, tmp_path))
    task = found["exercism/count-evens"]
    suite = task.hidden_tests.suite
    assert (suite.fail_to_pass, suite.pass_to_pass) == (
        (f"{PREFIX}test_some",),
        (f"{PREFIX}test_kept",),
    )
    assert task.files == {"count_evens.py": EXERCISE["count_evens.py"]}
    assert "Count the even numbers." in task.messages[0]["content"]
    assert found["exercism/no-docs"] == ".docs/instructions.md is missing"
    assert "leads out of the folder" in found["exercism/outside"]
    assert found["exercism/no-list"] == (
        ".meta/config.json cannot be read: files holds 'count_evens.py' instead of a list of paths"
    )
    assert found["exercism/no-text"].startswith("introduction.md cannot be read: 'utf-8' codec")
    assert validate.judge(task, layered_pool, LIMITS, 2).reason == ""
    # which tests fail at first is kept
    assert dict(exercises.load_each(layered_pool, tmp_path)) == found
    assert (tmp_path / "suites.json").exists()
    with pytest.raises(TaskFileError, match="no folder of exercises"):
        source("exercism", tmp_path).load(layered_pool, None)


def test_ids_are_those_of_pytest():
    text = (
        "def test_a(): pass\n\nasync def test_b(): pass\n\nclass TestC:\n    def test_d(self): pass\n"
        "    def helper(self): pass\n\nclass Other:\n    def test_e(self): pass\n"
    )
    assert ids_of({"t.py": text}) == ("t.py::test_a", "t.py::test_b", "t.py::TestC::test_d")
    for text, message in (
        ("@pytest.mark.parametrize('x', [1])\ndef test_a(x): pass", "test_a is parametrised"),
        ("x = 1", "t.py holds no tests"),
        ("def", "t.py is no Python"),
        ("def test_a(): pass\ndef test_a(): pass", "stands twice"),
    ):
        with pytest.raises(UnknownIds, match=message):
            ids_of({"t.py": text})


# --- QuixBugs -------------------------------------------------------------------------------------

QUIXBUGS = {
    "python_programs/halves.py": 'def halves(n):\n    while n > 1:\n        n //= 2\n        yield n + 1\n\n"""\nAll halves of n\n"""\n',
    "correct_python_programs/halves.py": "def halves(n):\n    while n > 1:\n        n //= 2\n        yield n\n",
    "json_testcases/halves.json": "[[8], [4, 2, 1]]\n[[1], []]\n\n[5, [2, 1]]\n",
    "python_programs/root.py": "def root(x, epsilon):\n    return x / 3\n",
    "correct_python_programs/root.py": "def root(x, epsilon):\n    return x ** 0.5 + epsilon / 2\n",
    "json_testcases/root.json": "[[4, 0.01], 2.0]\n",
    "python_programs/node.py": "class Node:\n    def __init__(self, value, successor=None):\n        self.value = value\n        self.successor = successor\n",
    "python_programs/last.py": "def last(node):\n    return node.value\n",
    "correct_python_programs/last.py": "def last(node):\n    while node.successor:\n        node = node.successor\n    return node.value\n",
    "python_testcases/test_last.py": (
        "from python_programs.last import last\nfrom python_programs.node import Node\n\n\n"
        "def test_two():\n    assert last(Node(1, Node(2))) == 2\n"
    ),
    "python_programs/alone.py": "def alone(): pass\n",
    "correct_python_programs/alone.py": "def alone(): pass\n",
    "python_programs/odd.py": "def odd(n): pass\n",
    "correct_python_programs/odd.py": "def odd(n): pass\n",
    "json_testcases/odd.json": "[[1], [2], 3]\n",
    "python_programs/many.py": "def many(n): pass\n",
    "correct_python_programs/many.py": "def many(n): pass\n",
    "python_testcases/test_many.py": "@pytest.mark.parametrize('n', [1])\ndef test_n(n): pass\n",
    "python_programs/torn.py": "def torn(n): pass\n",
    "correct_python_programs/torn.py": "def torn(n): pass\n",
    "python_testcases/test_torn.py": "def test_n(:\n",
}


@pytest.mark.long
def test_quixbugs_programs_become_tasks_that_work(layered_pool, packages, tmp_path):
    projects.write(tmp_path / "quixbugs", QUIXBUGS)
    tasks = source("quixbugs", tmp_path / "quixbugs", places={"packages": packages})
    found = dict(tasks.load_each(layered_pool, tmp_path))
    assert tasks.count() == len(found) == 7
    assert found["quixbugs/halves"].meta["description"] == "halves \nAll halves of n"
    assert found["quixbugs/halves"].world is None and found["quixbugs/last"].world is not None
    assert found["quixbugs/alone"].startswith("it has neither json_testcases/alone.json nor")
    assert found["quixbugs/odd"].startswith("odd.json, line 1: no [arguments, expected]")
    assert "test_n is parametrised" in found["quixbugs/many"]
    assert "python_testcases/test_torn.py is no Python" in found["quixbugs/torn"]
    working = {id: task for id, task in found.items() if not isinstance(task, str)}
    assert reasons(working.items(), layered_pool) == dict.fromkeys(working, "")
    without = dict(source("quixbugs", tmp_path / "quixbugs").load_each(layered_pool, tmp_path))
    assert "name packages with it" in without["quixbugs/last"]
    with pytest.raises(TaskFileError, match="no checkout of QuixBugs"):
        source("quixbugs", tmp_path).load(layered_pool, None)


# --- HumanEvalFix ---------------------------------------------------------------------------------


def fix_row(**change):
    row = {
        "task_id": "Python/900",
        "prompt": 'import math\n\n\ndef near(x: float, y: float) -> bool:\n    """Whether x is near y"""\n',
        "declaration": "import math\n\n\ndef near(x: float, y: float) -> bool:\n",
        "canonical_solution": "    return math.fabs(x - y) < 1\n",
        "buggy_solution": "    return math.fabs(x + y) < 1\n",
        "bug_type": "operator misuse",
        "docstring": "Whether x is near y",
        "entry_point": "near",
        "test": "\n\ndef check(near):\n    assert near(3.0, 3.5)\n    assert not near(1.0, 9.0)\n\ncheck(near)",
        "example_test": "def check(near):\n    assert near(3.0, 3.5)\ncheck(near)\n",
    }
    return {**row, **change}


@pytest.mark.parametrize("docs", [True, False])
@pytest.mark.parametrize("form", ["agent", "chat"])
def test_functions_to_repair(layered_pool, tmp_path, docs, form):
    path = projects.write_rows(tmp_path / "pack.jsonl", fix_row())
    (task,) = source("humanevalfix", path, docs=docs, form=form).load(None, None)
    text = task.messages[0]["content"]
    assert ("assert near(3.0, 3.5)" in text) == (not docs) and "Fix bugs in near" in text
    assert len(task.visible_tests) == (0 if docs else 1)
    if form == "agent":
        assert ("Whether" in task.files["solution.py"]) == docs
        assert "x + y" in task.files["solution.py"]
    assert validate.judge(task, layered_pool, LIMITS, 1).reason == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(buggy_solution=None),
            "line 1, field 'buggy_solution': expected a string, found None",
        ),
        (dict(canonical_solution="    return ("), "'canonical_solution': expected Python code"),
        (dict(entry_point="far"), "expected a definition of the entry point 'far'"),
        (
            dict(test="def other(): pass"),
            r"'test': expected a function check\(candidate\), found other",
        ),
    ],
)
def test_a_malformed_row_to_repair_is_named(tmp_path, change, message):
    path = projects.write_rows(tmp_path / "pack.jsonl", fix_row(**change))
    with pytest.raises(TaskFileError, match=message):
        source("humanevalfix", path).load(None, None)
