"""References of tasks of every source at hand: each must pass, and none may be called a cheat."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from rl_code.environment.grading import grade_work
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.suites.applied import solved
from rl_code.redteam.ground import GRADERS, LIMITS, task
from rl_code.redteam.trial import Outcome
from rl_code.tasks import generated, humaneval, mbpp, repositories
from rl_code.text.lines import split_lines
from rl_code.types import Suite, Task, Tests, World

_FILE = "tests/test_values.py"


def references(world: World, count: int, data: str = "") -> Iterator[tuple[str, Task]]:
    """Source and task, ``count`` of each source that is at hand.

    world: one with pytest in it. data: the folder that may hold mbpp.jsonl; "" for none.
    """
    for grader in GRADERS:
        yield "this page", task(grader, world)
    for index in range(count):
        one = generated.generate("train", 0, index)
        yield "generated", one
        yield "generated, as a suite", as_suite(one, world)
    for index in range(count):
        yield "repositories", repositories.generate("train", 0, index)
    for one in humaneval.load()[:count]:
        yield "humaneval", one
        yield "humaneval, as a suite", as_suite(one, world)
    path = Path(data) / "mbpp.jsonl"
    if data and path.exists():
        for one in mbpp.load(str(path))[:count]:
            yield "mbpp", one
            yield "mbpp, as a suite", as_suite(one, world)


def as_suite(task: Task, world: World) -> Task:
    """A task about one function whose hidden tests are a suite: its cases and statements, each a
    test function.
    """
    module = re.sub(r"\.py$", "", task.path).replace("/", ".")
    lines = ["import pytest", f"from {module} import {task.entry_point}", ""]
    statements = [
        f"assert {task.entry_point}({', '.join(map(repr, case.args))}) == {case.expected!r}"
        for case in task.hidden_tests.cases
    ]
    statements += task.hidden_tests.code
    for number, statement in enumerate(statements):
        body = [f"    {line}" for line in split_lines(statement)]
        lines += ["", f"def test_value_{number}():", *body, ""]
    ids = tuple(f"{_FILE}::test_value_{number}" for number in range(len(statements)))
    suite = Suite({_FILE: "\n".join(lines)}, ids)
    return dataclasses.replace(
        task,
        id=f"{task.id}/suite",
        visible_tests=Tests(),
        hidden_tests=Tests(suite=suite),
        world=world,
    )


def outcomes(pool: SandboxPool, world: World, count: int, data: str = "") -> Iterator[Outcome]:
    """The outcome of each reference. What does not pass, or is flagged, is harm."""
    for source, one in references(world, count, data):
        grade = grade_work(one, solved(one), pool, LIMITS)
        harm = ()
        if not grade.solved or grade.cheated:
            harm = (f"the reference fails: {grade.flags} {grade.cause}",)
        yield Outcome("honest", one.id, source, flags=grade.flags, harm=harm)
