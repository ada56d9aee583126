"""A task in a repository, and the sandbox that it is played in."""

from __future__ import annotations

import pytest

from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.types import Case, Task, Tests


@pytest.fixture(scope="package")
def sandboxes():
    config = SandboxConfig(
        workers=2, memory_mb=512, processes=16, workspace_mb=8, cpu_s=30, output_bytes=20_000
    )
    with SandboxPool(config) as pool:
        yield pool


@pytest.fixture(scope="session")
def task() -> Task:
    return Task(
        id="double/0",
        messages=({"role": "user", "content": "f in lib/a.py must double each number"},),
        files={"lib/a.py": "def f(x):\n    return x\n", "notes.txt": "one\n"},
        path="lib/a.py",
        entry_point="f",
        visible_tests=Tests(cases=(Case(([1],), [2]),)),
        hidden_tests=Tests(cases=(Case(([3, 1],), [6, 2]),)),
        reference={"lib/a.py": "def f(x):\n    return [2 * y for y in x]\n"},
    )
