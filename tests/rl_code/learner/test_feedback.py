"""Texts that a teacher reads and the policy does not, from what is on record of a group."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.grading import grade_in_words
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.learner.feedback import (
    FailedTests,
    Hint,
    LastResult,
    Reference,
    Several,
    SolvedSibling,
    with_feedback,
)
from rl_code.tasks.demonstrations import KINDS, failures
from rl_code.tasks.generated import Generated
from rl_code.types import Case, Limits, Task, Tests, ToolResult, Turn

TASK = Task(
    "add",
    ({"role": "user", "content": "Write add."},),
    path="a.py",
    entry_point="add",
    visible_tests=Tests((Case((1, 2), 3), Case((0,), 0, target="b.py:other")), ("assert add(1)",)),
    hidden_tests=Tests((Case((5, 5), 10),)),
    reference={"a.py": "def add(a, b):\n    return a + b\n"},
    meta={"hint": "Use +."},
)


@pytest.fixture
def group(build):
    """Three trajectories: one that fails tests, one that solves the task, one without a verdict."""
    turns = (
        Turn("assistant", 3, 4, "first"),
        Turn("tool", 4, 4, "", results=(ToolResult("run_tests", "FAIL a"),)),
        Turn("assistant", 4, 5, "second"),
        Turn("tool", 5, 5, "", results=(ToolResult("grep", "b"), ToolResult("run_tests", "PASS"))),
    )
    errors = ("add(1, 2) returned 4, expected 3", "", "AssertionError", "not run")
    changes = [
        dict(test_errors=errors, turns=turns),
        dict(test_errors=("",) * 4, solved=True, turns=turns),
        dict(),
    ]
    members = [
        dataclasses.replace(
            build.trajectory([1, 2, 3, 4], [0, 0, 1, 1], prompt_length=2, index=index), **change
        )
        for index, change in enumerate(changes)
    ]
    return dataclasses.replace(build.group(members), task=TASK)


def told(feedback, group):
    return [feedback(group, trajectory) for trajectory in group.trajectories]


def test_failed_tests_are_told_with_what_they_said(group):
    assert told(FailedTests("Failed:"), group) == [
        "Failed:\nadd(1, 2) returned 4, expected 3\nassert add(1) failed: AssertionError",
        "",
        "",
    ]
    assert told(FailedTests("Failed:", most=1), group)[0].count("\n") == 1


def test_failed_tests_are_told_as_a_warm_start_words_them(build):
    """A wrong attempt that is graded, and the same one by the operations themselves."""
    limits = Limits(5, 288, 64, 3, 5.0)
    tasks = Generated(split="train", levels=(1, 2)).load(None, None)
    kind = KINDS["generated"]
    member = build.trajectory([1, 2, 3, 4], [0, 0, 1, 1], prompt_length=2)
    with SandboxPool(SandboxConfig(workers=1)) as pool:
        for task in itertools.islice(tasks, 8):
            wrong = kind.wrong(task, random.Random(task.id))
            files = {task.path: kind.call(task, wrong).arguments["content"]}
            grade, errors = grade_in_words(task, files, pool, limits)
            words = failures(task, wrong, verbose=True)
            group = dataclasses.replace(build.group([member]), task=task)
            feedback = FailedTests("Failed:", most=2)
            assert not grade.solved and words
            found = feedback(group, dataclasses.replace(member, test_errors=errors))
            assert found == feedback.of(words) == "\n".join(["Failed:", *words[:2]])


def test_hidden_tests_are_told_only_where_the_config_says_so(group):
    assert "add(5, 5)" not in told(FailedTests(), group)[0]
    assert told(FailedTests(hidden=True), group)[0].endswith("\nadd(5, 5) failed: not run")


def test_the_last_result_is_that_of_the_tool(group):
    assert told(LastResult(words="Said:"), group) == ["Said:\nPASS", "Said:\nPASS", ""]
    assert told(LastResult("grep", words="Said:"), group)[0] == "Said:\nb"
    assert told(LastResult("terminal"), group) == ["", "", ""]


def test_a_hint_and_a_reference_come_with_the_task(group):
    assert told(Hint(), group) == ["Hint:\nUse +."] * 3
    assert told(Hint("none"), group) == [""] * 3
    assert told(Reference("It is:"), group)[0] == "It is:\ndef add(a, b):\n    return a + b\n"
    two = dataclasses.replace(TASK, reference={"b.py": "B", "a.py": "A"})
    assert Reference("")(dataclasses.replace(group, task=two), None) == "\na.py\nA\nb.py\nB"
    bare = dataclasses.replace(TASK, reference={})
    assert Reference()(dataclasses.replace(group, task=bare), None) == ""


def test_a_solved_sibling_is_another_trajectory(group):
    solved = "This solved it:\nfirst\nsecond"
    assert told(SolvedSibling(), group) == [solved, "", solved]


def test_several_feedbacks_stand_below_each_other(group):
    several = Several((Named("failed_tests", {"most": 1}), Named("solved_sibling")))
    assert several.reads_test_errors and not Several((Named("hint"),)).reads_test_errors
    failed = FailedTests(most=1)(group, group.trajectories[0])
    solved = "This solved it:\nfirst\nsecond"
    assert told(several, group) == [f"{failed}\n\n{solved}", "", solved]
    with pytest.raises(ConfigError, match="'hints'"):
        Several((Named("hints"),))


def test_feedback_stands_behind_the_last_message():
    found = with_feedback(TASK, "Hint")
    assert found.messages == ({"role": "user", "content": "Write add.\n\nHint"},)
    parts = dataclasses.replace(
        TASK, messages=({"role": "user", "content": ({"type": "document", "text": "d"},)},)
    )
    assert with_feedback(parts, "Hint").messages[0]["content"][-1]["text"] == "\n\nHint"
    with pytest.raises(ValueError, match="'add' has no message"):
        with_feedback(dataclasses.replace(TASK, messages=()), "Hint")
