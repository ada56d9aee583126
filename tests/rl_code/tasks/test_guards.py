"""Guards of tasks: which tests are guarded, and what tests rely on that the work may change."""

from __future__ import annotations

import pytest

from rl_code.tasks import guards
from rl_code.types import Case, Suite, Task, Tests

PATH = "tests/test_a.py"
FILES = {
    "shop/prices.py": "def discount(a, b): ...\n",
    "shop/checks.py": "def assert_right(x): ...\ndef made(x): ...\n",
    "data/prices.json": "[90]",
    "tests/data/more.json": "[90]",
    "README.md": "",
}
TOLD = "from shop.prices import discount\ndef test_a():\n    assert discount(100, 10) > 80\n"
GUARDED = "def test_b(tmp_path):\n    assert len(str(tmp_path)) == 473\n"


def task(text: str, id: str = "shop", **tests) -> Task:
    names = [f"{PATH}::{one}" for one in ("test_a", "test_b") if f"def {one}(" in text]
    hidden = Tests(suite=Suite({PATH: text}, (*names,)), **tests)
    fields = dict(messages=(), path="", entry_point="", visible_tests=Tests(), reference={})
    return Task(id=id, files=FILES, hidden_tests=hidden, **fields)


@pytest.mark.parametrize(
    ("text", "guarded", "problem"),
    [
        (TOLD, 0, f"no canary and no value for {PATH}::test_a"),
        (TOLD + GUARDED, 1, ""),
        ('import json\nDATA = json.load(open("data/prices.json"))\n' + GUARDED, 1,
         "its tests read data/prices.json, which the work may change"),
        ('from pathlib import Path\nD = Path(__file__).parents[1] / "data" / "prices.json"\n'
         + GUARDED, 1, "its tests read data/prices.json, which the work may change"),
        ('import json\nDATA = json.load(open("tests/data/more.json"))\n' + GUARDED, 1, ""),
        ('def test_b(tmp_path):\n    (tmp_path / "README.md").write_text("")\n    assert f() == 473\n',
         1, ""),
        ("from shop.checks import assert_right\n"
         "def test_b():\n    assert_right(1)\n    assert f() == 473\n", 1,
         "its tests assert by assert_right of shop/checks.py, which the work may change"),
        ("from shop import checks\n"
         "def test_b():\n    checks.assert_right(1)\n    assert f() == 473\n", 1,
         "its tests assert by assert_right of shop/checks.py, which the work may change"),
        ("from shop.checks import made\ndef test_b():\n    made(1)\n    assert f() == 473\n", 1, ""),
    ],
)  # fmt: skip
def test_guards_name_what_the_work_may_change(text, guarded, problem):
    found = guards.guards_of(task(text), None)
    assert (found.guarded, found.problem) == (guarded, problem)
    assert found.required == text.count("def test_")


def test_cases_are_guarded_and_count():
    found = guards.guards_of(task(TOLD, cases=(Case((1,), 2),)), None)
    assert (found.required, found.guarded, found.problem) == (2, 1, "")


def test_training_leaves_out_what_can_be_forged(caplog, monkeypatch, tmp_path):
    every = [task(TOLD, "told"), task(GUARDED, "guarded")]
    with caplog.at_level("WARNING"):
        assert [one.id for one in guards.kept(every, None, tmp_path)] == ["guarded"]
    assert "left out 1 of 2 tasks" in caplog.text and "told (no canary" in caplog.text
    monkeypatch.setattr(guards, "guards_of", None)  # what is kept is not looked at again
    assert [one.id for one in guards.kept(every, None, tmp_path)] == ["guarded"]
