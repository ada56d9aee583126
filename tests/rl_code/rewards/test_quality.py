"""Quality: only solved work is judged, against the reference, and tricks do not pay."""

from __future__ import annotations

import pytest

from rl_code.read_config import ConfigError
from rl_code.rewards.finished import FinishedEpisode, Grade, Usage
from rl_code.rewards.quality import Quality
from rl_code.types import Task, Tests
from tests.rl_code.signals import signals

pytest.importorskip("ruff", reason="quality is measured by ruff")

GIVEN = "def f(x):\n    return x\n"
REFERENCE = "def f(x):\n    if x is None:\n        return 0\n    return 2 * x\n"
BRANCHES = "def f(x):\n    if x is None:\n        return 0\n" + "".join(
    f"    if x == {i}:\n        return {2 * i}\n" for i in range(9)
)


def judged(text: str, solved: bool = True, **settings: float) -> float:
    task = Task("t", (), {"a.py": GIVEN}, "a.py", "f", Tests(), Tests(), {"a.py": REFERENCE})
    grade = Grade(True, (), (solved,))
    usage = Usage(0, 0, 0, {}, 0, {})
    episode = FinishedEpisode(task, None, {"a.py": GIVEN}, {"a.py": text}, grade, usage)
    return Quality(**settings)(episode)


def test_work_like_the_reference_costs_nothing_and_unsolved_work_is_not_judged():
    assert judged(REFERENCE) == judged("def f(x):\n    return 2 * (x or 0)\n") == 0.0
    assert judged(BRANCHES, solved=False) == 0.0


@pytest.mark.parametrize(
    "worse",
    [
        REFERENCE + "import os\n",
        REFERENCE + "import os  # noqa\n",
        REFERENCE.replace("0\n", "0  # type: ignore\n"),
        "from typing import Any\n" + REFERENCE.replace("(x)", "(x: Any)"),
        BRANCHES,
        "def a(x):\n    return x\ndef b(x):\n    return a(x)\ndef f(x):\n    return b(2 * (x or 0))\n",
        REFERENCE + "\n".join(f"Y{i} = {i}" for i in range(40)) + "\n",
        REFERENCE + 3 * "def g(y):\n    z = y + 1\n    z = z * 2\n    return z\n",
    ],
)
def test_what_is_worse_costs_something_and_never_more_than_one(worse):
    assert -1.0 <= judged(worse) < 0.0


def test_each_part_counts_by_its_weight_and_what_is_too_long_costs_all():
    none = dict(diagnostics=0.0, complexity=0.0, duplication=0.0, length=0.0)
    assert judged(BRANCHES, **none) == 0.0
    assert judged(BRANCHES, **{**none, "complexity": 0.01}) == pytest.approx(-0.09)
    assert judged("x" * 500_000) == -1.0
    assert -1.0 <= judged("(" * 100_000) < 0.0
    with pytest.raises(ValueError, match="length=2"):
        Quality(length=2)


def test_a_missing_checker_is_named(monkeypatch):
    monkeypatch.setattr("rl_code.rewards.quality._ruff", lambda: None)
    with pytest.raises(ConfigError, match="needs ruff"):
        signals("tests", {"name": "quality", "weight": 0.2})
