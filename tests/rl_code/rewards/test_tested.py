"""Own tests are paid by the bugs that they notice, and by nothing else."""

from __future__ import annotations

import ast
import dataclasses
import random

import pytest

from rl_code.environment.finished import Grade
from rl_code.environment.sandbox.disposable import bounded
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.rewards import tested
from rl_code.rewards import versions as versions_module
from rl_code.rewards.disguise import disguised
from rl_code.rewards.tested import Tested, is_test
from rl_code.rewards.versions import versions
from tests.rl_code.rewards.test_rewards import TASK, finished
from tests.rl_code.signals import signals

BEFORE = "def f(x):\n    return None\n\n\ndef g(x):\n    return x - 1\n"
WORK = BEFORE.replace("return None", "if x > 3:\n        return x + 1\n    return x * 2")
SOLVED = Grade(True, (True,), (True,))
GOOD = "from f import f\n\n\ndef test_f():\n    assert [f(x) for x in (-2, 1, 3, 4, 9)] == [-4, 2, 6, 5, 10]\n"
BY_CASES = (
    "import unittest\nfrom f import f\n\n\nclass Cases(unittest.TestCase):\n    def test_f(self):\n"
    "        self.assertEqual([f(x) for x in (-2, 1, 3, 4, 9)], [-4, 2, 6, 5, 10])\n"
)
HALF = "from f import f\n\n\ndef test_f():\n    assert f(9) == 10\n"
EMPTY = "from f import f\n\n\ndef test_f():\n    for x in range(9):\n        f(x)\n"
FAILING = "from f import f\n\n\ndef test_f():\n    assert f(9) == 11\n"
NONE = "from f import f\n"
# looks at the code instead of running it
READS = "def test_f():\n    assert open('f.py').read().count('return x * 2') == 1\n" + (
    "    assert len(open('f.py').read()) in SIZES\n"
)
BREAKS = "def test_f():\n    import os\n    os._exit(0)\n"


@pytest.fixture(scope="module")
def sandboxes():
    with SandboxPool(SandboxConfig()) as pool:
        yield pool


def paid(sandboxes, tests: str | None, grade: Grade = SOLVED, work: str = WORK, **settings):
    after = {"f.py": work} | ({} if tests is None else {"test_f.py": tests})
    episode = dataclasses.replace(
        finished(grade),
        task=TASK,
        files_before={"f.py": BEFORE},
        files_after=after,
        sandboxes=sandboxes,
    )
    return Tested(**settings)(episode)


def test_tests_are_paid_by_the_bugs_that_they_notice(sandboxes):
    good = paid(sandboxes, GOOD, seconds=120.0, run_s=60.0)
    half = paid(sandboxes, HALF, seconds=120.0, run_s=60.0)
    assert good >= 0.85 and 0 < half < good
    assert paid(sandboxes, BY_CASES, seconds=120.0, run_s=60.0) == good
    assert paid(sandboxes, EMPTY, seconds=120.0, run_s=60.0) == 0.0


@pytest.mark.parametrize("tests", [None, NONE, FAILING, "def test_f(:"])
def test_tests_that_are_missing_or_fail_are_paid_nothing(sandboxes, tests):
    assert paid(sandboxes, tests, seconds=120.0, run_s=60.0) == 0.0


def test_tests_that_look_at_the_code_are_paid_nothing(sandboxes):
    size = len(ast.unparse(ast.parse(WORK))) + 1
    assert paid(sandboxes, READS.replace("SIZES", f"({size},)"), seconds=120.0, run_s=60.0) == 0.0
    # an exit that says that all is well notices nothing
    assert paid(sandboxes, BREAKS, seconds=120.0, run_s=60.0) == 0.0


_SOURCE = "import inspect, re, f\n\n\ndef test_f():\n    assert f.f(1) == 2\n    "
TELLS = {
    "an unread constant": "any(re.fullmatch(r'(_[a-z]+){3}_[0-9]+', k) for k in vars(f))",
    "no unread constant": "not any(re.fullmatch(r'(_[a-z]+){3}_[0-9]+', k) for k in vars(f))",
    "text": "'return x * 2' in open('f.py').read() and 'x + 1' in open('f.py').read()",
    "a piece of the text": "'x > 3' in open('f.py').read()",
    "text by inspect": "inspect.getsource(f.f).count('if x > 3:') == 1",
    "text without constants": (
        "re.sub(r'    _.*\\n|^_.*\\n|#.*', '', inspect.getsource(f.f)) == "
        "'def f(x):\\n    if x > 3:\\n        return x + 1\\n    return x * 2\\n'"
    ),
    "lines": "len(open('f.py').read().splitlines()) in (8, 9, 10)",
    "size": "len(open('f.py').read()) < 95",
    "code object": "f.f.__code__.co_code == CODE",
    "names": "f.f.__code__.co_varnames == ('x',)",
    "constants": "set(f.f.__code__.co_consts) <= {None, 1, 2, 3}",
    "time": "__import__('os').stat('f.py').st_mtime_ns % 2 == 0",
}


@pytest.mark.parametrize("tell", TELLS)
def test_tests_that_tell_versions_apart_by_their_form_are_paid_nothing(
    sandboxes, tell, monkeypatch
):
    # so many that a tell which is right now and then is not right each time
    monkeypatch.setattr(tested, "_CONTROLS", 20)
    namespace: dict = {}
    exec(WORK, namespace)
    said = TELLS[tell].replace("CODE", repr(namespace["f"].__code__.co_code))
    assert paid(sandboxes, f"{_SOURCE}assert {said}\n", seconds=240.0, run_s=60.0) == 0.0


CODE = '''
import contextlib

CONSTANT = [1, 2]


class Shelf:
    """Words."""

    size: int = 3

    def put(self, *things, twice=CONSTANT):
        """More words."""
        for thing in things:
            if thing in twice:
                continue
            elif thing is None:
                raise ValueError("nothing")
            else:
                self.size += thing
        return self.size


class Low(Shelf):
    def put(self, *things):
        """Less."""
        return -super().put(*things), f"{self.size:>{3}} of {len(things)}", things[1:]


def count(n):
    """Yields."""
    total: int = 0
    while (n := n - 1) >= 0:
        total += (yield n) or 1
    return total


def outer(x):
    y = x

    def inner():
        nonlocal y
        y += 1
        return [y for y in range(y)]

    try:
        return inner(), y
    except TypeError:
        return None
    finally:
        with contextlib.suppress(KeyError):
            del {}[x]
'''
ASKS = (
    "Shelf().put(1, 5, 7)", "Shelf().put(None)", "Low().put(4, 5)", "list(count(4))", "outer(3)", "outer('a')",
    "Shelf.__doc__, Shelf.put.__doc__, count.__doc__, Shelf.put.__kwdefaults__",
)  # fmt: skip


def said(code: str) -> list[str]:
    namespace: dict = {"__name__": "code"}
    exec(code, namespace)
    found = []
    for ask in ASKS:
        try:
            found.append(repr(eval(ask, namespace)))
        except ValueError as error:
            found.append(repr(error))
    return found


def test_another_form_does_the_same():
    forms = {disguised(CODE, random.Random(seed), (seed % 3 + 1) / 3) for seed in range(60)}
    assert len(forms) == 60
    for form in forms:
        assert said(form) == said(CODE)
    assert len({len(form.splitlines()) for form in forms}) > 5


def test_only_solved_work_is_paid(sandboxes):
    assert paid(sandboxes, GOOD, Grade(True, (True,), (False,))) == 0.0
    assert paid(None, GOOD) == 0.0
    # nothing but tests was changed
    assert paid(sandboxes, GOOD, work=BEFORE) == 0.0


def test_bugs_are_in_changed_lines_alone(monkeypatch):
    monkeypatch.setattr(versions_module, "disguised", lambda text, drawn, share: text)
    found = versions({"f.py": BEFORE}, {"f.py": WORK}, "seed", 1000, 2)
    same = [texts for texts, is_bug in found if not is_bug]
    assert [texts["f.py"].split() for texts in same] == [WORK.split()] * 2
    old = same[0]["f.py"].splitlines()
    seen = set()
    for texts, is_bug in found:
        if is_bug:
            pairs = enumerate(zip(old, texts["f.py"].splitlines(), strict=False), 1)
            seen.add(next(i for i, (a, b) in pairs if a != b))
    assert seen == {2, 3, 4}
    # as many as are asked for, of different lines first
    few = [texts for texts, is_bug in versions({"f.py": BEFORE}, {"f.py": WORK}, "a", 3, 0)]
    assert len({texts["f.py"] for texts in few}) == 3


HUGE = {
    "nested calls": "def f(x):\n    g = abs\n    return " + "g(" * 150 + "x * 2" + ")" * 150 + "\n",
    "a long sum": "def f(x):\n    return 2 * x" + " + 0" * 2600 + "\n",
    "a deep sum": "def f(x):\n    return " + "-" * 3000 + "x\n",
    "many statements": "def f(x):\n" + "    x += 0\n" * 2500 + "    return 2 * x\n",
}


@pytest.mark.parametrize("work", HUGE)
def test_bugs_of_any_work_are_made_elsewhere_and_within_the_seconds_of_the_signal(
    sandboxes, work, monkeypatch
):
    asked = []

    def noted(function, cpu_s, *arguments):
        asked.append((function, cpu_s))
        return bounded(function, cpu_s, *arguments)

    monkeypatch.setattr(tested, "bounded", noted)
    monkeypatch.setattr(tested, "_pass", lambda *_: False)
    monkeypatch.setattr(ast, "parse", lambda *_, **__: pytest.fail("parsed in this process"))
    monkeypatch.setattr(ast, "unparse", lambda *_: pytest.fail("written in this process"))
    assert paid(sandboxes, GOOD, work=HUGE[work], seconds=0.2) == 0.0
    assert asked == [(versions, 0.2)]


def test_settings_and_names():
    assert [is_test(path) for path in ("test_a.py", "a/b_test.py", "tests/a.py", "test_a.txt")] == [
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(ValueError, match="bugs=0 must be above 0"):
        Tested(bugs=0)
    (_, active) = signals("tests", dict(name="tested", weight=0.1, bugs=3))
    assert active.signal == Tested(bugs=3)
