"""Correct solutions that nobody derived from the references pass the differential tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rl_code.environment.grader import grade
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.tasks import mbpp
from rl_code.tasks.differential import DifferentialConfig, mutations, strengthen
from rl_code.types import Tests
from tests.rl_code.tasks import independent

CONFIG = DifferentialConfig(cases=12, timeout_s=5.0, workers=2)
SANDBOX = SandboxConfig(
    workers=1, memory_mb=512, processes=16, workspace_mb=8, cpu_s=10, output_bytes=1 << 16
)
pytestmark = pytest.mark.skipif(
    "RL_CODE_DATA" not in os.environ, reason="RL_CODE_DATA, the folder with mbpp.jsonl, is not set"
)


@pytest.mark.parametrize(
    "every", [10, pytest.param(1, marks=pytest.mark.long)], ids=["a tenth", "all"]
)
def test_independent_solutions_pass_the_differential_tests(tmp_path, every):
    solutions = independent.solutions()
    ids = list(solutions)[::every]
    tasks = {t.id: t for t in mbpp.load(str(Path(os.environ["RL_CODE_DATA"]) / "mbpp.jsonl"))}
    chosen = [tasks[name] for name in ids]
    with SandboxPool(SANDBOX) as pool:
        cache = tmp_path / "cache.json"
        result = strengthen(chosen, mutations, CONFIG, pool, cache, list(tasks.values()))
        refused = {}
        for task in result.tasks:
            tests = Tests(
                cases=task.visible_tests.cases + task.hidden_tests.cases,
                code=task.visible_tests.code + task.hidden_tests.code,
            )
            files = {task.path: solutions[task.id]}
            marks = grade(task.path, task.entry_point, tests, files, pool, 5.0)
            if not all(marks.passed):
                refused[task.id] = [error for error in marks.errors if error]
    assert refused.keys() <= set(independent.WRONG_REFERENCES), refused
    # there is still something to test by
    assert sum(result.added.values()) >= 10 * len(result.tasks), result.summary()
