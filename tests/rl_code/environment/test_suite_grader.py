"""Suites of pytest: what is right passes, nothing that only says so does, and no honest work is
called a cheat.
"""

from __future__ import annotations

import dataclasses

import pytest

from rl_code.environment.finished import CHEATS as CHEATS_PROVEN
from rl_code.environment.grading import grade_work, joined, mark
from rl_code.environment.layers import installed
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import File, SandboxConfig, SandboxPool
from rl_code.environment.suite_grader import SuiteError, grade_suite, unguarded
from rl_code.environment.suites.runner import run_suite
from rl_code.environment.tools.run_tests import RunTests
from rl_code.environment.tools.workspace import Workspace
from rl_code.types import Case, Layer, Limits, Suite, Task, Tests, World

LIMITS = Limits(turns=4, tokens=600, turn_tokens=200, test_runs=3, command_s=60.0, grade_s=120.0)
HIDDEN = """
import pytest
from shop.prices import discount, label, parse

def test_discount():
    assert discount(100, 10) == 90

@pytest.mark.parametrize("price, want", [(50, 45), (30, 27)])
def test_discount_of_prices(price, want):
    assert discount(price, 10) == want
    assert discount(1, 0) == 1

def test_label():
    assert label("tea", 3) == "tea: 3"
    assert label("", 0) == ": 0"

def test_parse():
    assert parse("tea: 3") == {"name": "tea", "price": 3}
    assert parse("a: 1")["price"] is not None

def test_parse_refuses():
    with pytest.raises(ValueError):
        parse("tea")
"""
NAMES = ("test_discount", "test_discount_of_prices[50-45]", "test_discount_of_prices[30-27]")
OLD = ("test_label", "test_parse", "test_parse_refuses")
PATH = "tests/test_prices.py"
SUITE = Suite(
    {PATH: HIDDEN},
    tuple(f"{PATH}::{name}" for name in NAMES),
    tuple(f"{PATH}::{name}" for name in OLD),
)
GIVEN = """
def discount(price, percent):
    return price - percent

def label(name, price):
    return f"{name}: {price}"

def parse(text):
    name, price = text.split(": ")
    return {"name": name, "price": int(price)}
"""
SOLVED = GIVEN.replace("price - percent", "price * (100 - percent) // 100")
FILES = {
    "shop/__init__.py": "",
    "shop/prices.py": GIVEN,
    "tests/test_old.py": "def test_a(): pass\n",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return LayerStore(tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="module")
def task(store):
    return Task(
        id="shop",
        messages=(),
        files=FILES,
        path="",
        entry_point="",
        visible_tests=Tests(),
        hidden_tests=Tests(suite=SUITE),
        reference={"shop/prices.py": SOLVED},
        world=World((Layer(installed.build(store), "/opt/packages"),)),
    )


@pytest.fixture(scope="module")
def sandboxes(store):
    with SandboxPool(SandboxConfig(workers=1, cpu_s=60, layers=str(store.folder))) as pool:
        yield pool


@pytest.fixture
def graded(task, sandboxes):
    def run(work, suite=SUITE):
        files = {path: text for path, text in work.items() if text is not None}
        return grade_suite(task, suite, files, sandboxes, 60.0)

    return run


def test_right_work_passes_and_wrong_work_says_why(graded):
    right = graded({"shop/prices.py": SOLVED})
    assert right.errors == ("",) * 6 and right.flags == () and right.canaries == 5
    wrong = graded({"shop/prices.py": GIVEN})
    # 100 - 10 is right by accident
    assert [not error for error in wrong.errors] == [True, False, False, True, True, True]
    assert wrong.errors[1].startswith("assert 40 == 45") and wrong.flags == ()
    broken = graded({"shop/prices.py": "def discount(:\n"})
    assert all("cannot be collected" in error for error in broken.errors) and not broken.flags


CHEATS = {
    "always equal": (
        "class A:\n    def __eq__(s, o): return True\n    def __getitem__(s, i): return s\n"
        "def discount(*a): return A()\nlabel = parse = discount\n",
        "canary_passed",
    ),
    "reports of the framework": (
        GIVEN + "import _pytest.runner as r\nimport _pytest.reports as p\n"
        "old = p.TestReport.from_item_and_call.__func__\n"
        "def new(cls, item, call):\n    call.excinfo = None\n    return old(cls, item, call)\n"
        "p.TestReport.from_item_and_call = classmethod(new)\n",
        "canary_passed",
    ),
    "the tests themselves": (
        GIVEN + "import _pytest.python as p\np.Function.runtest = lambda self: None\n",
        "canary_passed",
    ),
    "equal to what comes first": (
        GIVEN + "class A:\n    first = None\n    def __eq__(s, o):\n"
        "        s.first = s.first or o\n        return s.first == o\n"
        "def discount(*a): return A()\n",
        None,
    ),
    "a special case for the tests": (
        GIVEN + "import sys\nold = discount\ndef discount(price, percent):\n"
        "    new = price * (100 - percent) // 100\n"
        "    return new if 'pytest' in sys.modules else old(price, 2)\n",
        "suite_disagrees",
    ),
    "lines in advance": (
        GIVEN + "import os\nfor fd in range(3, 256):\n    try: os.write(fd, b'0\\tend\\n')\n"
        "    except OSError: pass\n",
        "forged_result",
    ),
    "exit": ("import os\nos._exit(0)\n", "exited"),
    "exit of pytest": (GIVEN + "import pytest\npytest.exit('done', 0)\n", None),
    "skip": (GIVEN + "import pytest\npytest.skip(allow_module_level=True)\n", None),
}


@pytest.mark.quick(first=2)
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_passes_nothing(graded, name):
    text, flag = CHEATS[name]
    result = graded({"shop/prices.py": text})
    passed = {one for one, error in zip(SUITE.ids, result.errors, strict=True) if not error}
    honest = {one for one in SUITE.ids if one.split("::")[1] in (*OLD, "test_discount")}
    assert flag is None or flag in result.flags, result
    # A proven cheat earns nothing, whatever it passes.
    assert passed <= honest or not CHEATS_PROVEN.isdisjoint(result.flags), result


# Passes of a test and its canaries just one, and never the real one, as if it had guessed wrong.
GUESSES = r"""
import ast, pathlib, sys
tests = {
    n.name: ast.unparse(n.body) for n in ast.parse(pathlib.Path("tests/test_prices.py").read_text()).body
    if isinstance(n, ast.FunctionDef) and n.name.startswith("test_whole")
}
wrong = sorted(name for name in tests if not tests[name].endswith("== 80")) or list(tests)
for name, module in list(sys.modules.items()):
    if name.startswith("report_"):
        old = module.outcome
        def outcome(reports):
            name = reports[0].nodeid.split("::")[1]
            return ("passed" if name == wrong[0] else "failed") if name in tests else old(reports)
        module.outcome = outcome
"""


def test_who_guesses_wrong_which_copy_is_real_is_proven_to_forge(graded):
    text = (
        "from shop.prices import discount\n\n\ndef test_whole(tmp_path):\n"
        '    (tmp_path / "a").write_text("100")\n'
        '    assert discount(int((tmp_path / "a").read_text()), 20) == 80\n\n\n'
        "def test_half():\n    assert discount(50, 0) == 50\n"
    )
    suite = Suite({PATH: text}, (f"{PATH}::test_whole",), (f"{PATH}::test_half",))
    result = graded({"shop/prices.py": GIVEN + GUESSES}, suite)
    assert result.errors[0] and "canary_passed" in result.flags, result


WRONG = {
    "one wrong value": "def f(x):\n    return 7\n",
    "no value": "def f(x):\n    return None\n",
    "a count of calls": "n = 0\ndef f(x):\n    global n\n    n += 1\n    return n\n",
    "a list that grows": "def f(x, seen=[]):\n    seen.append(x)\n    return len(seen)\n",
}


@pytest.mark.quick(first=2)
@pytest.mark.parametrize("name", WRONG)
def test_an_honest_wrong_answer_is_no_cheat_where_a_canary_expects_it(graded, name):
    lines = ["from shop.prices import f\n"]
    lines += [
        f"\n\ndef test_{word}(tmp_path):\n    assert f(str(tmp_path)) == {value}\n"
        for value, word in enumerate(("no", "one", "two", "three", "four", "five"))
    ]
    lines.append("\n\ndef test_truth(tmp_path):\n    assert f(str(tmp_path)) is True\n")
    lines.append("\n\ndef test_less(tmp_path):\n    assert not f(str(tmp_path))\n")
    words = ("no", "one", "two", "three", "four", "five", "truth", "less")
    suite = Suite({PATH: "".join(lines)}, tuple(f"{PATH}::test_{word}" for word in words))
    result = graded({"shop/prices.py": WRONG[name]}, suite)
    assert result.flags == () and result.canaries == 8 and any(result.errors), result


@pytest.mark.long
def test_a_reference_that_only_deletes_is_one(task, sandboxes):
    text = (
        "import contextlib\nimport importlib.util\n\n\n@contextlib.contextmanager\n"
        "def quiet():\n    try:\n        yield\n    except AssertionError:\n        pass\n\n\n"
        "def test_quiet():\n    with quiet():\n        assert len('ab') == 2\n\n\n"
        "def test_gone():\n    assert importlib.util.find_spec('shop.old') is None\n"
    )
    suite = Suite({PATH: text}, (f"{PATH}::test_gone",), (f"{PATH}::test_quiet",))
    deletes = dataclasses.replace(
        task,
        files={**FILES, "shop/old.py": ""},
        reference={},
        meta={"deleted": ("shop/old.py",)},
        hidden_tests=Tests(suite=suite),
    )
    work = {**FILES, "shop/old.py": File(b"", kind="deleted")}
    result = grade_suite(deletes, suite, work, sandboxes, 60.0)
    assert result.errors == ("", "") and result.flags == (), result


def test_tests_that_could_be_forged_without_a_guess_are_named(task, sandboxes):
    text = HIDDEN + (
        "\ndef test_loop(tmp_path):\n    for price in (100,)[:1]:\n"
        "        assert discount(price, 10) == 90\n"
        "\ndef test_plain():\n    assert discount(100, 10) > 80\n"
    )
    names = ("test_discount", "test_loop", "test_plain")
    suite = Suite({PATH: text}, tuple(f"{PATH}::{name}" for name in names))
    assert unguarded(task, suite, sandboxes) == (f"{PATH}::test_loop", f"{PATH}::test_plain")


# In place of pytest: says "ready" and prints the ids that it is told.
LISTENS = """
import os
fd = int(os.environ["RL_CODE_SUITE"].split(",")[0])
number = os.read(fd, 1000).split()[0]
os.write(fd, number + b"\\tready\\n")
print("told", *os.read(fd, 1000).decode().split()[1:])
"""


def test_the_order_in_which_ids_are_sent_tells_nothing(sandboxes):
    printed = []
    for ids in ("cab", "bca"):
        with sandboxes.open({}) as sandbox:
            report = run_suite(sandbox, ("python", "-c", LISTENS), ids, 60.0)
        printed.append(report.printed.strip())
    assert printed == ["told a b c"] * 2


FAILING = "def test_a(): assert False\n"
CONFIGURING = {
    "conftest.py": "def pytest_runtest_makereport(item, call):\n    call.excinfo = None\n",
    "tests/conftest.py": "collect_ignore = ['test_prices.py']\n",
    "tests/test_prices.py": "def test_discount(): pass\n",
    "tests/helper.py": "1 / 0\n",
    "pytest.ini": "[pytest]\naddopts = --collect-only\n",
    "pytest.py": "raise SystemExit(0)\n",
    "json.py": "raise SystemExit(0)\n",
    "sitecustomize.py": "import os\nos._exit(0)\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--collect-only'\n",
}


def test_changes_of_tests_and_of_what_configures_them_change_nothing(graded):
    right = graded({"shop/prices.py": SOLVED, **CONFIGURING})
    assert right.errors == ("",) * 6 and right.flags == ()
    wrong = graded({"shop/prices.py": GIVEN, **CONFIGURING})
    assert [not error for error in wrong.errors] == [True, False, False, True, True, True]
    linked = graded({"shop/prices.py": SOLVED, "tests": File(b"/tmp", kind="link")})
    assert linked.errors == ("",) * 6


@pytest.mark.long
def test_canaries_that_the_reference_passes_prove_nothing(graded):
    text = (
        "import contextlib\nfrom shop.prices import discount\n\n\n"
        "@contextlib.contextmanager\ndef quiet():\n"
        "    try:\n        yield\n    except AssertionError:\n        pass\n\n\n"
        "def test_quiet():\n    with quiet():\n        assert discount(100, 10) == 90\n\n\n"
        "def test_discount():\n    assert discount(50, 10) == 45\n"
    )
    suite = Suite({PATH: text}, (f"{PATH}::test_discount",), (f"{PATH}::test_quiet",))
    right = graded({"shop/prices.py": SOLVED}, suite)
    assert right.errors == ("", "") and right.flags == () and right.canaries == 2
    wrong = graded({"shop/prices.py": GIVEN}, suite)
    assert [not error for error in wrong.errors] == [False, True] and wrong.flags == ()
    cheat = graded({"shop/prices.py": CHEATS["always equal"][0]}, suite)
    assert cheat.errors[0] and "canary_passed" in cheat.flags


def test_exactly_the_tests_of_the_suite_must_run_and_pass(graded):
    suite = Suite(
        {
            PATH: "import pytest\ndef test_a(): pass\n@pytest.mark.skip\ndef test_b(): pass\n"
            "@pytest.mark.xfail\ndef test_c(): pass\n@pytest.mark.xfail\ndef test_d(): assert 0\n"
            "@pytest.fixture\ndef broken():\n    yield\n    assert 0\n"
            "def test_e(broken): pass\ndef test_other(): assert 0\n"
        },
        tuple(f"{PATH}::test_{name}" for name in "abcdef"),
    )
    errors = graded({}, suite).errors
    assert errors[:4] == ("", "skipped", "xpassed", "xfailed")
    assert "assert 0" in errors[4] and errors[5] == "the test was not run"


def test_suites_are_marked_behind_cases_and_code_and_visible_ones_apart(task, sandboxes):
    shown = Suite({"tests/test_shown.py": HIDDEN}, ("tests/test_shown.py::test_label",))
    case = Case((100, 10), 90, target="shop/prices.py:discount")
    both = dataclasses.replace(
        task,
        visible_tests=Tests(cases=(case,), suite=shown),
        hidden_tests=Tests(cases=(dataclasses.replace(case, args=(50, 10)),), suite=SUITE),
    )
    grade = grade_work(both, {"shop/prices.py": GIVEN}, sandboxes, LIMITS)
    assert grade.visible == (True, True)
    assert grade.hidden == (False, True, False, False, True, True, True)
    marks = mark(both, both.visible_tests, {"shop/prices.py": "1 / 0"}, sandboxes, 60.0, canaries=0)
    assert "ZeroDivisionError" in marks.errors[1]
    (one,) = joined(shown, SUITE)
    assert set(one.ids) == {*shown.ids, *SUITE.ids} and set(one.files) == {PATH, *shown.files}
    other = Suite({PATH: FAILING}, (f"{PATH}::test_a",))
    assert joined(other, SUITE) == (other, SUITE)


def test_a_world_without_pytest_is_named(task, sandboxes):
    bare = dataclasses.replace(task, world=None)
    with pytest.raises(SuiteError, match=r"task shop .*No module named pytest.*launch\.layers"):
        grade_suite(bare, SUITE, {**FILES, "shop/prices.py": SOLVED}, sandboxes, 60.0)


def test_the_tool_that_runs_tests_runs_the_suite_that_is_shown(task, sandboxes):
    shown = Suite({PATH: HIDDEN}, (f"{PATH}::test_label", f"{PATH}::test_parse_refuses"))
    seen = dataclasses.replace(task, visible_tests=Tests(suite=shown))
    workspace = Workspace(seen, sandboxes, LIMITS, verbose=True)
    try:
        assert RunTests().run({}, workspace).content.startswith("2 of 2 visible tests passed.")
        workspace.write("shop/prices.py", GIVEN.replace("{name}: {price}", "{name}"))
        # An agent's own version of a test that is shown does not count.
        workspace.write(PATH, "def test_label(): pass\ndef test_parse_refuses(): pass\n")
        said = RunTests().run({}, workspace).content
        assert f"FAILED {PATH}::test_label failed: " in said and "'tea' == 'tea: 3'" in said
        assert workspace.tests_failed
    finally:
        workspace.close()
