"""Comparison of the grader of training with the maker's own findings about its tasks."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rl_code.environment.grading import grade_in_words, grade_work
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.suite_grader import SuiteError, passes
from rl_code.environment.suites.applied import solved
from rl_code.types import Limits, Task

# Wide in time: what is asked is how tests end, not how long a busy machine takes.
LIMITS = Limits(turns=1, tokens=1, turn_tokens=1, test_runs=1, command_s=120.0, grade_s=600.0)


def drawn(tasks: Sequence[Task], count: int) -> list[Task]:
    """``count`` of the tasks, the same for the same tasks."""
    return random.Random(len(tasks)).sample(tasks, min(count, len(tasks)))


def problem(task: Task, pool: SandboxPool) -> str:
    """ "" where the grader fails exactly the tests that must fail at the start, passes all with the
    reference, and notices nothing odd in either; else what is wrong. Raises SandboxFault.
    """
    try:
        start, errors = grade_in_words(task, task.files, pool, LIMITS)
        right = grade_work(task, solved(task), pool, LIMITS)
    except SuiteError as error:
        return f"its suite cannot be run: {error}"
    suite = task.hidden_tests.suite
    assert suite is not None  # as made.load gives them
    words = errors[len(start.visible) :]
    failed = {one for one, error in zip(suite.ids, words, strict=True) if not passes(error)}
    if failed != set(suite.fail_to_pass):
        return f"at the start {len(failed)} tests fail, not {len(suite.fail_to_pass)}"
    if not all(right.hidden + right.visible):
        return "the reference does not pass"
    flags = {*start.flags, *right.flags}
    return f"the grader noticed {', '.join(sorted(flags))}" if flags else ""
