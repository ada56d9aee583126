"""What a candidate sends costs nothing but a disposable process, and no exception gets lost."""

from __future__ import annotations

import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from rl_code.environment.grader import grade
from rl_code.environment.sandbox import caller, judge_pool, kept, pool
from rl_code.environment.sandbox.inside import wire
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.redteam.ground import MEMORY
from rl_code.types import Case, Tests

CONFIG = SandboxConfig(
    workers=1, memory_mb=256, processes=16, workspace_mb=8, cpu_s=20, output_bytes=4000
)
RIGHT = "def f(x):\n    return x * 2\n"
CASES = Tests(cases=(Case((2,), 4), Case((3,), 6)))


@pytest.fixture(scope="module")
def sandboxes():
    with SandboxPool(CONFIG) as pool:
        yield pool


@pytest.fixture
def marks(sandboxes):
    def run(text: str, tests: Tests = CASES, timeout_s: float = 30.0):
        files = {"solution.py": text}
        return grade("solution.py", "f", tests, files, sandboxes, timeout_s)

    return run


# Answers with a text of its own, written to the channel with the number of the call.
ANSWER = """
import os, struct, sys
def f(x):
    frame = sys._getframe()
    while "channel" not in frame.f_locals: frame = frame.f_back
    data = ("v" + frame.f_locals["call"][:16] + TEXT()).encode()
    data = struct.pack("<I", len(data)) + data
    while data: data = data[os.write(3, data):]
    os._exit(0)
"""
COLLIDING = """
def TEXT():
    numbers = (i * ((1 << 61) - 1) for i in range(30_000))
    return '{"set":[' + ",".join('{"int":"%#x"}' % number for number in numbers) + "]}"
"""
COSTLY = {
    "colliding integers": (COLLIDING, "costly_value"),
    "a million empty lists": ("TEXT = lambda: '[' + '[],' * 1_000_000 + '[]]'", "forged_result"),
    "deep lists": ("TEXT = lambda: '[' * 1_000_000 + ']' * 1_000_000", "forged_result"),
    "a long frame": ("TEXT = lambda: '0' * (1 << 23)", "forged_result"),
}


# the first of them takes the judge all its seconds
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name == "colliding integers"))
        for name in COSTLY
    ],
)
def test_a_costly_value_is_read_elsewhere_and_flagged(marks, monkeypatch, name):
    text, flag = COSTLY[name]
    # This process decodes nothing that a candidate sent.
    monkeypatch.setattr(wire, "read", lambda *args: pytest.fail("decoded in the training process"))
    result = marks(ANSWER + text)
    assert result.passed == (False, False) and result.flags == (flag,), result
    assert marks(RIGHT).passed == (True, True)


def test_the_judge_knows_nothing_but_the_standard_library():
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import rl_code.environment.sandbox.judge; "
        "print([n for n in ('jax', 'numpy', 'absl') if n in sys.modules])"
    )
    root = str(Path(judge_pool.__file__).parents[3])
    line = [sys.executable, "-I", "-S", "-c", program, root]
    assert subprocess.run(line, capture_output=True, text=True).stdout == "[]\n"


def test_a_judge_that_cannot_start_is_a_fault_and_not_a_failure(sandboxes, monkeypatch):
    monkeypatch.setattr(kept, "_START", "raise SystemExit('no memory')")
    judges = judge_pool.Judges()
    with pytest.raises(pool.SandboxFault, match="no memory"):
        judges.ask(None, [judge_pool.Question((1,))], 5.0)


def test_judges_are_used_again_and_replaced_when_they_die(sandboxes, marks):
    marks(RIGHT)
    (process,) = sandboxes._judges._processes._idle
    marks(RIGHT)
    assert sandboxes._judges._processes._idle == [process]
    process._process.kill()
    process._process.wait()
    assert marks(RIGHT).passed == (True, True)
    assert sandboxes._judges._processes._idle != [process]


LOST = {
    "all of map": "assert all(map(f, [1, 2]))",
    "all of zip": "assert all(a == b for a, b in zip(map(f, [1, 2]), [2, 4]))",
    "list of map": "assert list(map(f, [])) == [] and list(map(f, [1])) in ([], [2])",
    "any exception inside": "try: f(1)\nexcept KeyError: pass",
    "hasattr": "class A:\n    x = property(lambda self: f(1))\nassert hasattr(A(), 'x') in (0, 1)",
    "getattr": "class A:\n    x = property(lambda self: f(1))\nassert getattr(A(), 'x', 2) == 2",
    "getitem": "class A:\n    __getitem__ = lambda self, i: (f(1), i // 0)\nassert not list(A())",
    "dict of zip": "assert dict(zip([1], map(f, [1]))) in ({}, {1: 2})",
    "suppress": "import contextlib\nwith contextlib.suppress(KeyError): f(1)",
}


@pytest.mark.parametrize("error", ["StopIteration", "IndexError", "AttributeError"])
def test_an_exception_that_a_test_loses_fails_it(marks, error):
    tests = Tests(code=tuple(LOST.values()))
    result = marks(f"def f(x):\n    raise {error}\n", tests)
    assert not any(result.passed), dict(zip(LOST, result.passed, strict=True))


@pytest.mark.parametrize(
    "body",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit()",
        "raise KeyboardInterrupt",
        "raise GeneratorExit",
        "raise type('E', (BaseException,), {})",
    ],
)
def test_no_test_asks_for_the_end_of_a_process(marks, body):
    any_exception = "try: f(1)\nexcept BaseException: pass\nelse: assert False"
    result = marks(f"def f(x):\n    {body}\n", Tests(code=(any_exception,)))
    assert result.passed == (False,) and "swallowed_exception" in result.flags


ODD = """
class Sly(Exception):
    args = ["no tuple"]
class Own:
    def __eq__(self, other): return self.x == other.x
class Near(int):
    def __eq__(self, other): return abs(int(self) - int(other)) < 3
    __hash__ = int.__hash__
def f(x):
    if x == 1: raise ValueError("x" * 5_000_000, [[]] * 300_000)
    if x == 2: raise Sly
    if x == 3: return [0] * 300_000
    if x == 4: return "x" * 5_000_000
    if x == 5: return Own()
    if x == 6: return Near(5)
    if x == 7: return [1j] * 150_000
    if x == 8: raise OSError(2, "no file", "name")
    return (i for i in range(10 ** 9))
"""


def test_odd_but_honest_work_is_not_taken_for_a_cheat(marks):
    """A flag that proves cheating takes the whole reward away."""
    tests = Tests(
        cases=tuple(Case((i,), "right") for i in range(1, 10)),
        code=tuple(f"assert f({i}) == 'right'" for i in range(1, 10)),
    )
    result = marks(ODD, tests)
    assert not any(result.passed) and result.flags == (), result


ASKS = (
    "try: f(1)\nexcept ValueError: pass\nelse: assert False",
    "try: f(1)\nexcept (KeyError, ValueError) as error: "
    "assert error.code == 7 and error.args == (1, 'a')",
    "import unittest\nwith unittest.TestCase().assertRaises(ValueError): f(1)",
    "import unittest\nunittest.TestCase().assertRaises(ValueError, f, 1)",
    "import contextlib\nwith contextlib.suppress(ValueError): f(1)",
    "try: f(1)\nexcept ValueError as error: "
    "assert type(error).__name__ == 'Own' and str(error) == 'own words'",
)


def test_an_exception_that_a_test_asks_for_arrives_with_its_attributes(marks):
    text = """
class Own(ValueError):
    def __init__(self, *args):
        super().__init__(*args)
        self.code = 7
    def __str__(self): return "own words"
def f(x): raise Own(1, "a")
"""
    result = marks(text, Tests(code=ASKS))
    assert result.passed == (True,) * len(ASKS) and result.flags == (), result
    wrong = marks("def f(x): raise KeyError(x)\n", Tests(code=ASKS))
    assert not any(wrong.passed)


def test_a_test_that_takes_any_exception_passes_and_is_flagged(marks):
    tests = Tests(code=("try: f(1)\nexcept Exception: pass\nelse: assert False",))
    result = marks("def f(x): raise NotImplementedError\n", tests)
    assert result.passed == (True,) and result.flags == ("any_exception",)
    asks = Tests(code=("try: f(1)\nexcept StopIteration: pass\nelse: assert False",))
    assert marks("def f(x): return next(iter(()))\n", asks).passed == (True,)


VALUES = """
import collections, dataclasses, datetime, decimal, enum, fractions, itertools
Colour = enum.Enum("Colour", "RED GREEN")
Pair = collections.namedtuple("Pair", "left right")
@dataclasses.dataclass
class Point:
    x: int
def f(kind, *rest):
    if kind == "move":
        rest[0].x += 1
        return rest[0].x
    if kind == "adder":
        total = [rest[0]]
        def add(n):
            total[0] += n
            return total[0]
        return add
    return {"generator": (i * i for i in range(4)), "count": itertools.count(5),
            "keys": {"a": 1}.keys(),
            "decimal": decimal.Decimal("1.10"), "fraction": fractions.Fraction(1, 3),
            "date": datetime.date(2026, 2, 28), "enum": Colour.GREEN,
            "pair": Pair(1, 2), "point": Point(4),
            "zip": zip([1], [2])}[kind]
"""
USES = (
    "assert list(f('generator')) == [0, 1, 4, 9]",
    "assert next(f('count')) == 5",
    "assert f('keys') == {'a'} and sorted(f('keys')) == ['a']",
    "from decimal import Decimal\n"
    "assert f('decimal') == Decimal('1.1') and type(f('decimal')) is Decimal",
    "from fractions import Fraction\nassert f('fraction') * 3 == 1",
    "import datetime\nassert f('date').isoformat() == '2026-02-28'",
    "assert f('enum').name == 'GREEN' and f('enum').value == 2",
    "assert f('pair') == (1, 2) and f('pair').right == 2",
    "assert f('point').x == 4",
    "assert dict(f('zip')) == {1: 2}",
    "add = f('adder', 10)\nassert add(1) == 11 and add(2) == 13",
    "import dataclasses\n@dataclasses.dataclass\nclass Point:\n    x: int\np = Point(1)\n"
    "assert f('move', p) == 2 and p.x == 2 and f('point') == Point(4)",
)


def test_values_that_are_no_plain_data_reach_tests(marks):
    result = marks(VALUES, Tests(code=USES))
    assert result.passed == (True,) * len(USES), result.errors
    assert result.flags == ()


def test_an_input_is_not_in_memory_before_its_call(marks):
    needles = [f"zqqx{uuid.uuid4().hex}" for _ in range(5)]
    search = r"""
import re
def f(x):
    found = set()
    for block in memory():
        found |= set(re.findall(b"zq[q]x[0-9a-f]{32}", block))
    return len(found)
"""
    result = marks(MEMORY + search, Tests(cases=tuple(Case((needle,), -1) for needle in needles)))
    counts = [int(re.search(r"returned (\d+)", error)[1]) for error in result.errors]
    assert sorted(counts)[0] == 1
    assert all(count <= i + 1 for i, count in enumerate(sorted(counts))), counts


def test_the_order_of_cases_is_not_the_one_given(marks):
    text = "calls = []\ndef f(x):\n    calls.append(x)\n    return len(calls)\n"
    result = marks(text, Tests(cases=tuple(Case((i,), 0) for i in range(12))))
    order = [int(re.search(r"returned (\d+)", error)[1]) for error in result.errors]
    assert sorted(order) == list(range(1, 13)) and order != sorted(order)
    assert marks(text, Tests(cases=tuple(Case((i,), 0) for i in range(12)))).errors == result.errors


LATE = """
import os, time
def f(x):
    with open("runs", "a") as file: file.write("x")
    if os.path.getsize("runs") <= {late}: time.sleep(20)
    return x * 2
"""


@pytest.mark.parametrize("tests", [CASES, Tests(code=("assert f(2) == 4",))], ids=["cases", "code"])
def test_what_was_starved_is_run_once_more_and_only_once(marks, tests):
    passed = (True,) * len(tests)
    once = marks(LATE.format(late=1), tests, timeout_s=1.0)
    assert once.passed == passed and once.flags == ()
    twice = marks(LATE.format(late=2), tests, timeout_s=1.0)
    assert not any(twice.passed) and twice.flags == ("timeout",)


def test_what_used_its_cpu_time_is_not_run_again(marks, monkeypatch):
    monkeypatch.setattr(caller.Child, "idle", lambda self: False)
    assert marks(LATE.format(late=1), timeout_s=1.0).flags == ("timeout",)
