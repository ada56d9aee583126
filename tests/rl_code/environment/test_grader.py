"""The grader passes what is right, and nothing that only says it is."""

from __future__ import annotations

import random
import uuid

import pytest

from rl_code.environment.grader import grade
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxFault, SandboxPool
from rl_code.environment.suites.statements import canary_of
from rl_code.redteam.ground import MEMORY
from rl_code.types import Case, Tests

CONFIG = SandboxConfig(
    workers=1, memory_mb=256, processes=16, workspace_mb=8, cpu_s=20, output_bytes=4000
)
DOUBLE = Tests(
    cases=(Case((2,), 4), Case(([1],), [1, 1])), code=("assert f(3) == 6", "assert f('a') == 'aa'")
)


@pytest.fixture(scope="module")
def sandboxes():
    with SandboxPool(CONFIG) as pool:
        yield pool


@pytest.fixture
def marks(sandboxes):
    def run(text: str, tests: Tests = DOUBLE, timeout_s: float = 30.0, entry_point: str = "f"):
        return grade("solution.py", entry_point, tests, {"solution.py": text}, sandboxes, timeout_s)

    return run


def test_right_code_passes_and_wrong_code_says_why(marks):
    right = marks("def f(x):\n    return x * 2\n")
    assert right.passed == (True,) * 4 and right.errors == ("",) * 4 and right.flags == ()
    wrong = marks("def f(x):\n    return x + x if x != 3 else 7\n")
    assert wrong.passed == (True, True, False, True)
    assert wrong.errors[2] == "AssertionError (f returned 7)"
    broken = marks("def f(x):\n    return 2 *\n")
    assert not any(broken.passed)
    assert all(
        "SyntaxError: invalid syntax (line 2: return 2 *)" in error for error in broken.errors
    )
    absent = marks("x = 1\n")
    assert not any(absent.passed) and "NameError: solution.py defines no f" in absent.errors[0]


@pytest.mark.parametrize(
    ("gives", "expected"),
    [("1", True), ("True", 1), ("1.0", 1), ("1", 1.0), ("(1, 2)", [1, 2]), ("[1, 2]", (1, 2)), ("[True]", [1]),
     ("{1: 2}", {1: 2.0}), ("{True: 2}", {1: 2}), ("{1.0}", {1}), ("frozenset({1})", {1}), ("b'a'", "a"), ("None", 0),
     ("[(1,)]", [[1]]), ("'1'", 1), ("[]", ()), ("{}", set()), ("range(2)", [0, 1]), ("1 + 0j", 1)],
)  # fmt: skip
def test_a_value_of_another_type_is_another_value(marks, gives, expected):
    same = repr(expected)
    tests = Tests(cases=(Case((), expected),))
    assert marks(f"def f():\n    return {same}\n", tests).passed == (True,)
    assert marks(f"def f():\n    return {gives}\n", tests).passed == (False,)


def test_modules_below_src_import_each_other_as_their_packages(sandboxes):
    files = {
        "src/shop/__init__.py": "",
        "src/shop/twice.py": "def twice(x):\n    return 2 * x\n",
        "src/shop/prices.py": "from shop.twice import twice\ndef f(x):\n    return twice(x)\n",
    }
    graded = grade("src/shop/prices.py", "f", DOUBLE, files, sandboxes, 30.0)
    assert graded.passed == (True,) * 4, graded
    # src may be a package itself
    files |= {"src/__init__.py": "", "src/shop/prices.py": files["src/shop/prices.py"]}
    files = {path: text.replace("from shop", "from src.shop") for path, text in files.items()}
    assert grade("src/shop/prices.py", "f", DOUBLE, files, sandboxes, 30.0).passed == (True,) * 4


def test_a_case_with_tolerance_compares_as_equality_does(marks):
    tests = Tests(cases=(Case((), [1, 2.0], tolerance=0.0), Case((), [1, 2.0], tolerance=0.1)))
    assert marks("def f():\n    return [True, 2]\n", tests).passed == (True, True)
    assert marks("def f():\n    return [1.05, 2]\n", tests).passed == (False, True)


STATEMENTS = {
    "assert f(2) == 4": lambda x: x * 2,
    "import math\n\nassert math.isclose(f(2.0), 4.0)\nassert f('ab') == 'abab'": lambda x: x * 2,
    "assert f('ab').startswith('aba')": lambda x: x * 2,
    "xs = [3, 1]\nfor x in (1, 2):\n    assert f(xs) == [3, 1, 3, 1]": lambda x: x * 2,
    "def check(candidate):\n    assert candidate(3) == 6, 'three'\n    assert True, 'this is printed'\n\n\ncheck(f)":
        lambda x: x * 2,
    "assert f(1) > 1": lambda x: x * 2,
}  # fmt: skip


@pytest.mark.parametrize("statement", STATEMENTS)
def test_code_that_passes_a_statement_fails_its_canary(statement):
    def run(text: str) -> None:
        exec(text, {"f": STATEMENTS[statement]})

    run(statement)
    for seed in range(8):
        canary = canary_of(statement, random.Random(seed))
        assert canary is not None and canary != statement
        with pytest.raises(AssertionError):
            run(canary)


@pytest.mark.parametrize(
    "statement",
    [
        "f(2)",
        "assert f(2) ==",
        "def check(candidate):\n    return candidate(2) == 4\n\ncheck(f)",
        "with pytest.raises(ValueError):\n    f(2)",  # an exception may be another one's kind
        'assert f(2) == """\n  a\n"""',  # which has another value where it is indented
        "assert f(2) == " + "(" * 500 + "4" + ")" * 500,
        "assert f(2) == 4" + " " * 50_000,
    ],
)
def test_a_statement_that_cannot_be_changed_has_no_canary(statement):
    assert canary_of(statement, random.Random(0)) is None


# Gives 1, 2, 3 in turn, as its statements ask.
COUNTS = "n = 0\ndef f():\n    global n\n    n += 1\n    return n\n"


def test_a_statement_that_passes_whatever_it_asks_for_has_failed(sandboxes):
    def run(text: str, *code: str):
        return grade(
            "s.py", "f", Tests(code=code), {"s.py": text}, sandboxes, 30.0, None, canaries=8
        )

    agrees = (
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n    startswith: object\n"
        "def f(x):\n    return A(lambda *a: True)\n"
    )
    asked = "assert f('ab').startswith('aba')", "assert f(2) == 4"
    cheat = run(agrees, *asked)
    assert cheat.passed == (False, False) and "canary_passed" in cheat.flags
    assert cheat.errors[0] == "passed, and so did a copy of it that asks for another value"
    for honest, code in (
        ("def f(x):\n    return x * 2\n", asked),
        (COUNTS, [f"assert f() == {n}" for n in (1, 2, 3, 4, 5)]),
    ):
        found = run(honest, *code)
        assert all(found.passed) and found.flags == ()


CHEATS = r"""
### always equal object
class A:
    def __eq__(s, o): return True
    def __ne__(s, o): return False
    def __hash__(s): return 0
def f(x):
    return A()
### always equal int
class A(int):
    def __eq__(s, o): return True
    def __ne__(s, o): return False
    def __hash__(s): return 0
def f(x):
    return A(99)
### always equal list
class A(list):
    def __eq__(s, o): return True
def f(x):
    return A([99])
### lying class
class A:
    __class__ = property(lambda s: int)
    def __eq__(s, o): return True
def f(x):
    return A()
### exit
import sys
def f(x):
    sys.exit(0)
### exit on import
import sys
sys.exit(0)
### hard exit
import os
def f(x):
    os._exit(0)
### hard exit on import
import os
os._exit(0)
### exit at exit
import atexit, os
atexit.register(lambda: os._exit(0))
def f(x):
    return 0
### kill
import os
def f(x):
    os.kill(0, 9)
### kill all
import os
def f(x):
    os.kill(-1, 9)
    return 0
### patched equality of builtins
import builtins
builtins.all = lambda *a: True
builtins.isinstance = lambda *a: True
builtins.type = lambda *a: int
builtins.AssertionError = StopIteration
def f(x):
    return 0
### patched json
import json
json.dumps = lambda *a, **k: '{"tuple":["value",true]}'
def f(x):
    return 0
### patched wire
import sys
w = sys.modules['inside.wire']
w.dumps = lambda v: '{"passed":true}'
w.write = lambda *a: ('{"passed":true}', False)
w._encode = lambda *a: True
def f(x):
    return 0
### patched module table
import sys
for n in list(sys.modules):
    if n.startswith('inside'):
        for k in list(vars(sys.modules[n])): setattr(sys.modules[n], k, lambda *a, **q: True)
def f(x):
    return 0
### printing a summary
print('4 passed')
def f(x):
    print('OK', flush=True)
    return 0
### skip
import unittest
def f(x):
    raise unittest.SkipTest('skip')
### assertion of its own
def f(x):
    raise AssertionError
### stop iteration
def f(x):
    raise StopIteration
### generator exit
def f(x):
    raise GeneratorExit
### keyboard interrupt
def f(x):
    raise KeyboardInterrupt
### no answer
import os
os.closerange(3, 256)
def f(x):
    return 0
### recursion
def f(x):
    return f(x)
### memory
def f(x):
    return bytearray(1 << 40)
### deep value
def f(x):
    y = []
    for i in range(5000): y = [y]
    return y
### long value
def f(x):
    return 'x' * (1 << 23)
### number too long to print
def f(x):
    return 1 << 10_000_000
### text that is not Unicode
def f(x):
    return '\ud800'
### error that is not Unicode
def f(x):
    raise ValueError('\ud800')
### error without end
class E(Exception):
    def __str__(s): return 'x' * (1 << 28)
def f(x):
    raise E
### named like nothing
E = type('\n\ud800', (Exception,), {})
def f(x):
    raise E
"""
CHEATS = dict(part.split("\n", 1) for part in CHEATS.split("### ")[1:])


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_passes_nothing(marks, name):
    result = marks(CHEATS[name])
    assert result.passed == (False,) * 4, result
    assert all(result.errors) and not any("\n" in error for error in result.errors[:2])
    for error in result.errors:
        error.encode()
        assert len(error) < 2000


def test_exits_and_hangs_are_flagged(marks):
    assert marks(CHEATS["exit"]).flags == ("exited",)
    assert marks(CHEATS["hard exit"]).flags == ("exited",)
    assert marks(CHEATS["kill"]).flags == ("killed",)
    hang = marks("def f(x):\n    while x: pass\n", timeout_s=0.5)
    assert hang.passed == (False,) * 4 and hang.flags == ("timeout",)
    assert hang.seconds < 20
    assert marks("def f(x):\n    raise TypeError\n").flags == ()


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("always equal object", "lying_value"),
        ("always equal int", "lying_value"),
        ("always equal list", "lying_value"),
        ("lying class", "lying_value"),
        ("patched wire", "forged_result"),
    ],
)
def test_a_cheat_is_flagged(marks, name, flag):
    assert marks(CHEATS[name]).flags == (flag,)


FORGE = """
import os, struct, sys
def send(text):
    for fd in range(3, 32):
        try: os.write(fd, struct.pack("<I", len(text)) + text)
        except OSError: pass
def f(x):
    for text in (b'{"tuple":["done",""]}', b'{"tuple":["value",true]}', b'{"ok":{"status":0}}', b'{"closed":0}', b'""'):
        send(text); print(text.decode(), flush=True)
    return None
"""


# Knows how answers are written, finds the number of the call, and answers before its function does.
ECHO = r"""
import os, struct, sys
def f(x):
    frame = sys._getframe()
    while "channel" not in frame.f_locals: frame = frame.f_back
    call = frame.f_locals["call"]
    text = ("v" + call[:16] + "7").encode()
    os.write(3, struct.pack("<I", len(text)) + text)
    return None
"""


def test_forged_frames_pass_nothing(marks):
    for cheat in (FORGE, FORGE.replace("def f(x):", "def g(x):") + "g(0)\n", ECHO):
        result = marks(cheat)
        assert result.passed == (False,) * 4
        assert result.flags == ("forged_result",), result
    # the next one is none the worse
    assert marks("def f(x):\n    return x * 2\n").passed == (True,) * 4


SEARCH = (
    MEMORY
    + r"""
import gc, re, sys
def f(x):
    pattern = "zq[q]x[0-9a-f]{32}"  # does not match itself
    texts = [repr(o) for o in gc.get_objects() if type(o) in (str, list, tuple, dict)]
    frame = sys._getframe()
    while frame:
        texts.append(repr(frame.f_locals)); frame = frame.f_back
    count = sum(len(re.findall(pattern, text)) for text in texts)
    read = 0
    for block in memory():
        read += len(block)
        count += len(re.findall(pattern.encode(), block))
    return count, read > 5_000_000
"""
)


def test_expected_values_are_not_in_the_process_of_the_candidate(marks):
    needles = [f"zqqx{uuid.uuid4().hex}" for _ in range(4)]
    tests = Tests(
        cases=tuple(Case((i,), needle) for i, needle in enumerate(needles[:2])),
        code=tuple(f"assert f(1) == {needle!r}" for needle in needles[2:]),
    )
    result = marks(SEARCH, tests)
    assert all("returned (0, True)" in error for error in result.errors), result
    # The search does find what is there.
    found = marks(f"SECRET = {needles[0]!r}\n{SEARCH}", tests)
    assert not any("returned (0, True)" in error for error in found.errors), found


def test_statements_see_exceptions_and_values_as_in_one_process(marks):
    text = """
def f(x):
    if x < 0: raise ValueError(f"negative: {x}")
    if x == 0: return {}[x]
    return [x, {x}, (x,)]
"""
    statements = (
        "try: f(-1)\nexcept ValueError as e: assert str(e) == 'negative: -1'\nelse: assert False",
        "try: f(0)\nexcept KeyError: pass\nelse: assert False",
        "assert f(2) == [2, {2}, (2,)]",
        "import pytest_is_not_here",
        "assert f(x=3)[0] == 3",
        "assert f(-1)",
        "assert (lambda g: g(1))(f)",
    )
    result = marks(text, Tests(code=statements))
    assert result.passed == (True, True, True, False, True, False, True)
    assert result.errors[5] == "ValueError: negative: -1"


def test_tests_written_as_a_check_of_a_candidate_run(marks):
    code = """
METADATA = {}

def helper(x):
    return x + 1

def check(candidate):
    import math
    for i in range(20):
        assert candidate(i) == helper(i), "off"
    assert math.fabs(candidate(1.5) - 2.5) < 1e-6

check(f)
"""
    assert marks("def f(x):\n    return x + 1\n", Tests(code=(code,))).passed == (True,)
    wrong = marks("def f(x):\n    return x + (x < 10)\n", Tests(code=(code,)))
    assert wrong.passed == (False,) and wrong.errors == ("AssertionError: off (f returned 10)",)


def test_statements_stand_alone_and_the_candidate_lives_on(marks):
    text = "import os\nn = 0\ndef f(x):\n    global n\n    n += 1\n    if x == 'die': os._exit(1)\n    return n\n"
    statements = (
        "assert f(0) == 1; y = 1",
        "assert 'y' not in globals() and f(0) == 2",
        "f('die')",
    )
    statements += ("assert f(0) == 1", "raise SystemExit", "assert f(0) == 2")
    assert marks(text, Tests(code=statements)).passed == (True, True, False, True, False, True)


def test_an_argument_that_cannot_travel_is_named(marks):
    result = marks("def f(g):\n    return g(1)\n", Tests(code=("assert f(lambda x: x) == 1",)))
    assert (
        "f is called with an argument that cannot be sent to it: a function is not a plain value"
        in result.errors[0]
    )
    with pytest.raises(ValueError, match=r"f cannot be called.*function.* is not a plain value"):
        marks("def f(g):\n    return g(1)\n", Tests(cases=(Case((len, lambda: 1), 1),)))


def test_a_test_sees_changes_of_its_arguments_and_a_case_starts_afresh(marks):
    tests = Tests(
        code=(
            "xs = [1]\nassert f(xs) == [1, 2]\nassert xs == [1, 2]",
            "rows = [[1], [5]]\ninner = rows[0]\nf(rows)\nassert rows == [[1], [5], 2] and rows[0] is inner",
            "xs = (1, 3)\ntry: f(xs)\nexcept AttributeError: pass\nassert xs == (1, 3)",
        ),
        cases=(Case(([1],), [1, 2]), Case(([1],), [1, 2])),
    )
    assert marks("def f(xs):\n    xs.append(2)\n    return xs\n", tests).passed == (True,) * 5
    wrong = marks("def f(xs):\n    return xs + [2]\n", tests)
    assert wrong.passed[2:4] == (False, False)


def test_neighbours_in_the_snapshot_are_there(sandboxes):
    files = {
        "src/main.py": "from src.other import two\ndef f(x):\n    return two * x\n",
        "src/other.py": "two = 2\n",
    }
    assert grade("src/main.py", "f", DOUBLE, files, sandboxes, 30.0).passed == (True,) * 4
    gone = grade("src/none.py", "f", DOUBLE, files, sandboxes, 30.0)
    assert not any(gone.passed) and "FileNotFoundError" in gone.errors[0]


def test_files_that_fit_no_workspace_fail_and_are_no_error_of_the_run(sandboxes):
    result = grade("a.py", "f", DOUBLE, {"a.py": "x", "b": "y" * (9 << 20)}, sandboxes, 30.0)
    assert not any(result.passed) and "space" in result.errors[0]


def test_no_tests_are_no_failures(marks):
    assert marks("def f(): pass\n", Tests()).passed == ()


def test_the_death_of_a_worker_is_a_fault_not_a_failure():
    with SandboxPool(CONFIG) as pool:
        pool._sandboxes._start = lambda remote: (_ for _ in ()).throw(OSError("no more processes"))
        for worker in pool._sandboxes._workers:
            worker.process.kill()
            worker.process.wait()
        while pool._sandboxes._idle:
            pool._sandboxes.discard(pool._sandboxes._idle.pop())
        with pytest.raises(SandboxFault, match="no more processes"):
            grade("a.py", "f", DOUBLE, {"a.py": "def f(x): return x * 2"}, pool, 30.0)
