"""Untidy solutions earn less than tidy ones, and never less than failures."""

from __future__ import annotations

import dataclasses
import json

import pytest
from ruff.__main__ import find_ruff_bin

from rl_code.config.read_config import ConfigError
from rl_code.environment.finished import Grade
from rl_code.rewards import quality, readability
from rl_code.rewards.quality import Quality, measure
from rl_code.rewards.readability import Measure, measures
from tests.rl_code.rewards.test_rewards import TASK, finished
from tests.rl_code.signals import signals

BEFORE = "def f(x):\n    return None\n"
TIDY = "def f(x):\n    return [y + 1 for y in x]\n"
TASK = dataclasses.replace(TASK, path="f.py", reference={"f.py": TIDY})
TOLD = ["value", [[1, 2, 3, 4]]]
SOLVED = Grade(True, (True,), (True,))


def paid(after: str, grade: Grade = SOLVED, **files: str) -> float:
    episode = dataclasses.replace(
        finished(grade),
        task=TASK,
        files_before={"f.py": BEFORE, "notes.txt": "x"},
        files_after={"f.py": after, "notes.txt": "y", **files},
    )
    return Quality()(episode)


def test_the_reference_costs_nothing():
    assert paid(TIDY) == 0.0


UNTIDY = {
    "an unused import": "import os\n" + TIDY,
    "a suppressed one": "import os  # noqa\n" + TIDY,
    "a bare except": "def f(x):\n    try:\n        return [y + 1 for y in x]\n    except:\n        raise\n",
    "branches for nothing": "def f(x):\n    if x:\n        if len(x) > 1:\n            return [y + 1 for y in x]\n"
    "        return [x[0] + 1]\n    return []\n",
    "many tiny functions": "def g(y):\n    return y + 1\n\n\ndef h(x):\n    return map(g, x)\n\n\n"
    "def f(x):\n    return list(h(x))\n",
    "a copy": TIDY
    + "\n\n"
    + "".join(
        f"def {name}(x):\n    a = x\n    b = a\n    c = b\n    d = c\n    return d\n\n\n"
        for name in "gh"
    ),
}


@pytest.mark.parametrize("kind", UNTIDY)
def test_untidy_solutions_cost_something_and_less_than_failing(kind):
    assert -1.0 <= paid(UNTIDY[kind]) < 0.0
    active = signals("tests", dict(name="quality", weight=0.2))
    assert [one.config.component for one in active] == ["tests", "quality"]


def test_hiding_a_diagnostic_does_not_pay():
    shown, hidden = paid(UNTIDY["an unused import"]), paid(UNTIDY["a suppressed one"])
    assert hidden < shown < 0.0
    for comment in ("# type: ignore", "# pyright: ignore", "# ty: ignore", "# pylint: disable=all"):
        assert paid(f"{TIDY.rstrip()}  {comment}\n") == pytest.approx(-0.1)


def test_work_that_fails_or_changes_no_python_costs_nothing():
    assert paid(UNTIDY["a copy"], Grade(True, (True,), (False,))) == 0.0
    assert paid(BEFORE) == 0.0
    assert paid(BEFORE, more="import os") == 0.0


def test_the_whole_diff_counts_and_removing_old_faults_earns_nothing():
    assert paid(TIDY, **{"g.py": "import os\n"}) < 0.0
    episode = dataclasses.replace(
        finished(SOLVED),
        task=TASK,
        files_before={"f.py": "import os\nimport sys\n" + BEFORE},
        files_after={"f.py": TIDY},
    )
    assert Quality()(episode) == 0.0


def test_without_a_reference_length_and_complexity_are_free():
    task = dataclasses.replace(TASK, reference={})
    episode = dataclasses.replace(
        finished(SOLVED),
        task=task,
        files_before={"f.py": BEFORE},
        files_after={"f.py": UNTIDY["many tiny functions"]},
    )
    assert Quality()(episode) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "(" * 5000,
        "def f(:\n",
        "\udcff",
        "x = 1\n" * 300_000,
        "\0",
        "def f():\n" + " " * 99999 + "x",
    ],
)
def test_no_text_raises_and_what_cannot_be_measured_costs_most(text):
    assert -1.0 <= paid(text) < 0.0 or text == "\0"
    assert paid("x = 1\n" * 300_000) == -1.0


def test_what_ruff_says_is_read_up_to_a_bound(tmp_path, monkeypatch):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "0.py").write_text("a;" * 40)
    ruff = find_ruff_bin()
    ((diagnostics, *_),) = measures(str(tmp_path), [["a;" * 40]], ruff)
    assert diagnostics > 80
    monkeypatch.setattr(readability, "_SAID_BYTES", 20_000)
    with pytest.raises(ValueError, match="ruff says more than 20000 bytes"):
        measures(str(tmp_path), [["a;" * 40]], ruff)
    # and this process reads none of it
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail(text) if "code" in text else TOLD)
    assert measure([{"f.py": "a;" * 40}]) == [Measure(1, 2, 3, 4)]


def test_a_program_that_does_not_end_well_costs_most(monkeypatch):
    monkeypatch.setattr(quality, "find_ruff_bin", lambda: "/bin/false")
    assert measure([{"f.py": TIDY}]) is None and paid(TIDY) == -1.0


def test_measures_of_several_trees_are_kept_apart():
    texts = [{"a.py": TIDY}, {}, {"../../a b.py": TIDY, "c.py": "import os\n\nx = 1\n"}]
    assert measure(texts) == [Measure(0, 1, 0, 2), Measure(), Measure(1, 1, 0, 4)]


def test_prices_are_checked():
    with pytest.raises(ValueError, match=r"length=-1 must be at least 0"):
        Quality(length=-1)
    with pytest.raises(ConfigError, match=r"signals\[1\]\.size: no such key"):
        signals("tests", dict(name="quality", size=2))
