"""Stand-ins that run in this process, so that tools and episodes are tested without a sandbox."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from collections.abc import Mapping

import pytest

from models.tokenizer import Tokenizer
from rl_code.environment.compare import accepts
from rl_code.environment.grader import Grade
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.pool import CallResult, Completed, SandboxFault
from rl_code.environment.tools.text import show
from rl_code.types import Case, Limits, Task, Tests


def call_here(text: str, entry_point: str, calls: list[tuple]) -> list[CallResult]:
    """Calls trusted code in this process."""
    results = []
    for args in calls:
        namespace: dict = {}
        try:
            exec(text, namespace)
            results.append(CallResult(value=namespace[entry_point](*args), error="", ok=True))
        except Exception as error:
            results.append(
                CallResult(value=None, error=f"{type(error).__name__}: {error}", ok=False)
            )
    return results


class FakeSandbox:
    def __init__(self, pool: FakePool, files: Mapping[str, str]):
        self.pool = pool
        self.files = dict(files)
        self.closed = False
        self.lost = False
        self.cpu_s = 0.0

    def call(self, path, entry_point, args, *, timeout_s):
        time.sleep(self.pool.delay_s)
        if self.pool.faulty:
            raise SandboxFault("the zygote died")
        return call_here(self.files.get(path, ""), entry_point, list(args))

    def ask(self, path, entry_point, questions, timeout_s):
        results = self.call(
            path, entry_point, [question.args for question in questions], timeout_s=timeout_s
        )
        return [
            dataclasses.replace(
                result,
                passed=result.ok and accepts(question.case, result.value),
                shown=show(result.value),
            )
            for question, result in zip(questions, results, strict=True)
        ]

    def run(self, argv, *, stdin="", timeout_s):
        if self.pool.faulty:
            raise SandboxFault("the zygote died")
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        output = done.stdout + done.stderr
        return Completed(
            stdout=output, exit_code=done.returncode, timed_out=False, cut_bytes=0, seconds=0.0
        )

    def read_file(self, path):
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def write_file(self, path, text):
        self.files[path] = text

    def list_files(self, below=""):
        return list(self.files)

    def snapshot(self):
        return dict(self.files)

    def close(self):
        self.closed = True


class FakePool:
    """Opens sandboxes that run in this process. faulty: every command fails as the sandbox's own
    fault.
    """

    def __init__(self, delay_s: float = 0.0):
        self.opened: list[FakeSandbox] = []
        self.graded: list[dict[str, str]] = []
        self.faulty, self.delay_s = False, delay_s

    def open(self, files, world=None):
        self.opened.append(FakeSandbox(self, files))
        return self.opened[-1]

    def grade(self, path, entry_point, tests, snapshot, pool, timeout_s, world=None, canaries=0):
        if self.faulty:
            raise SandboxFault("the zygote died")
        self.graded.append(dict(snapshot))
        time.sleep(self.delay_s)
        text = snapshot.get(path, "")
        results = call_here(text, entry_point, [case.args for case in tests.cases])
        passed = [
            result.ok and result.value == case.expected
            for result, case in zip(results, tests.cases, strict=True)
        ]
        errors = [result.error for result in results]
        for statement in tests.code:
            namespace: dict = {}
            try:
                exec(text + "\n" + statement, namespace)
                passed.append(True)
                errors.append("")
            except Exception as error:
                passed.append(False)
                errors.append(type(error).__name__)
        return Grade(passed=tuple(passed), errors=tuple(errors), flags=(), seconds=0.0)


@pytest.fixture
def pool(monkeypatch) -> FakePool:
    pool = FakePool()
    monkeypatch.setattr("rl_code.environment.grading.grade", pool.grade)
    return pool


@pytest.fixture(scope="session")
def task() -> Task:
    return Task(
        id="double/0",
        messages=({"role": "user", "content": "double each number\nf([1]) == [2]"},),
        files={"solution.py": "def f(x):\n    return x\n", "notes.txt": "one\ntwo\nthree\n"},
        path="solution.py",
        entry_point="f",
        tools=("terminal", "read_file", "write_file", "edit_file", "run_tests", "submit"),
        visible_tests=Tests(cases=(Case(([1],), [2]), Case(([],), []))),
        hidden_tests=Tests(cases=(Case(([3, 1],), [6, 2]), Case(([0],), [0]))),
        reference={"solution.py": "def f(x):\n    return [2 * y for y in x]\n"},
    )


@pytest.fixture
def limits() -> Limits:
    return Limits(turns=4, tokens=400, turn_tokens=120, test_runs=2, command_s=5.0)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    texts = [
        "def f(x):\n    return [2 * y for y in x]\n",
        "FAIL f([3, 1]) gave [4, 2] want [5, 3] left 2",
    ] * 4
    return Tokenizer.train(texts, 330, Compact.SPECIAL_TOKENS)
