"""Suites whose tests leave state behind, or that are set up and named in unusual ways."""

from __future__ import annotations

import dataclasses

import pytest

from rl_code.environment.layers import installed
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.environment.suite_grader import grade_suite, unguarded
from rl_code.types import Layer, Suite, Task, Tests, World

PATH = "tests/test_a.py"
GIVEN = "def discount(price, percent):\n    return price - percent\n"
SOLVED = "def discount(price, percent):\n    return price * (100 - percent) // 100\n"
FILES = {"shop/__init__.py": "", "shop/prices.py": GIVEN, "data/rates.txt": "20"}


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
        hidden_tests=Tests(),
        reference={"shop/prices.py": SOLVED},
        world=World((Layer(installed.build(store), "/opt/packages"),)),
    )


@pytest.fixture(scope="module")
def sandboxes(store):
    with SandboxPool(SandboxConfig(workers=1, cpu_s=60, layers=str(store.folder))) as pool:
        yield pool


@pytest.fixture
def graded(task, sandboxes):
    def run(suite, text=SOLVED, **more):
        own = dataclasses.replace(task, hidden_tests=Tests(suite=suite))
        work = {**FILES, "shop/prices.py": text, **more}
        return grade_suite(own, suite, work, sandboxes, 120.0)

    return run


def suite_of(text: str, *names: str, path: str = PATH, **more: str) -> Suite:
    return Suite({path: text, **more}, tuple(f"{path}::{name}" for name in names))


STATE = """
import os
from pathlib import Path
from shop.prices import discount

KNOWN = set()

def test_moves():
    os.chdir("data")
    assert discount(100, 10) == 90

def test_reads():
    assert discount(50, int(Path("rates.txt").read_text())) == 40
    KNOWN.add("read")

def test_registers():
    assert KNOWN == {"read"}
    KNOWN.add(discount(200, 10))
    assert len(KNOWN) == 2

class TestSteps:
    def test_first(self):
        assert not hasattr(TestSteps, "made")
        TestSteps.made = discount(10, 50)
        assert TestSteps.made == 5

    def test_second(self):
        TestSteps.made += 1
        assert TestSteps.made == 6
"""
STEPS = ("test_moves", "test_reads", "test_registers", "TestSteps::test_first")
SETTINGS = """
[pytest]
addopts = -x --strict-config --cov=shop --cov-report term -n 2 --lf -ra
required_plugins = pytest-cov
asyncio_mode = auto
filterwarnings = error
"""


@pytest.mark.long
def test_tests_that_leave_state_behind_fail_no_right_work(graded):
    suite = suite_of(STATE, *STEPS, "TestSteps::test_second", **{"pytest.ini": SETTINGS})
    right = graded(suite)
    assert right.errors == ("",) * 5 and not right.flags and right.canaries, right
    wrong = graded(suite, GIVEN)
    assert all(wrong.errors[1:]) and not wrong.flags, wrong


@pytest.mark.parametrize("seen_from", ["tests/", ""])
def test_settings_beside_the_tests_move_the_root_and_no_test_is_lost(graded, seen_from):
    text = "from shop.prices import discount\ndef test_a():\n    assert discount(100, 10) == 90\n"
    text += "def test_b():\n    assert discount(50, 10) == 45\n"
    suite = Suite(
        {PATH: text, "tests/pytest.ini": "[pytest]\n"},
        tuple(f"{seen_from}test_a.py::test_{name}" for name in "ab"),
    )
    right = graded(suite)
    assert right.errors == ("", "") and right.canaries == 2, right
    wrong = graded(suite, GIVEN)
    assert not wrong.errors[0] and wrong.errors[1].startswith("assert 40 == 45"), wrong


SUBTESTS = """
import unittest
import pytest
from shop.prices import discount

class TestPrices(unittest.TestCase):
    def test_each(self):
        for price in (100, 50):
            with self.subTest(price=price):
                if price == 100:
                    self.skipTest("not here")
                self.assertEqual(discount(price, 10), 45)

    def test_whole(self):
        self.skipTest("not here")

def test_fixture(subtests):
    with subtests.test("one"):
        pytest.skip("not here")
    with subtests.test("two"):
        assert discount(50, 10) == 45
"""


@pytest.mark.long
def test_a_skipped_subtest_does_not_fail_its_test_but_a_skip_by_the_work_does(graded):
    names = ("TestPrices::test_each", "test_fixture", "TestPrices::test_whole")
    suite = suite_of(SUBTESTS, *names)
    assert graded(suite).errors == ("", "", "skipped")
    wrong = graded(suite, GIVEN)
    assert all(wrong.errors), wrong
    skips = "import unittest\ndef discount(*a):\n    raise unittest.SkipTest('no')\n"
    assert all(graded(suite, skips).errors)


def test_files_that_begin_with_a_byte_order_mark_are_read_like_others(graded, task, sandboxes):
    text = "\ufefffrom shop.prices import discount\ndef test_a():\n"
    text += "    assert discount(50, 10) == 45\n"
    suite = suite_of(text, "test_a")
    right = graded(suite, "\ufeff" + SOLVED)
    assert right.errors == ("",) and right.canaries == 1 and not right.flags, right
    assert graded(suite, "\ufeff" + GIVEN).errors[0].startswith("assert 40 == 45")
    assert unguarded(task, suite, sandboxes) == ()


# Equals everything, whoever asks.
EQUAL = "class A:\n    def __eq__(s, o): return True\ndef discount(*a): return A()\n"


@pytest.mark.quick(first=1)
@pytest.mark.parametrize(
    "beside",
    [
        {"src/shop/__init__.py": "", "src/shop/prices.py": ""},
        {"shop/prices/__init__.py": "from shop.made import discount\n", "shop/made.py": EQUAL},
        {"prices.py": "", "conftest.py": "import pytest\n@pytest.fixture(autouse=True)\n"},
    ],
    ids=["below src", "a package", "configured"],
)
def test_files_of_the_work_do_not_switch_the_check_by_value_off(graded, beside):
    text = "from shop.prices import discount\nimport pytest\n\n"
    text += '@pytest.mark.parametrize("price, left", [(100, 90), (50, 45)])\n'
    text += "def test_many(price, left):\n    assert discount(price, 10) == left\n"
    suite = suite_of(text, "test_many[100-90]", "test_many[50-45]")
    cheat = graded(suite, EQUAL, **beside)
    proofs = {"suite_disagrees", "lying_value", "canary_passed"}
    assert all(cheat.errors) and set(cheat.flags) & proofs, cheat
    assert graded(suite, SOLVED).errors == ("", "")


ROWS = """
import os
import pytest
from shop.prices import discount

SEEN = []

class TestRows:
    @pytest.fixture(scope="class", autouse=True)
    def counted(self):
        yield
        assert len(SEEN) == 3

    @pytest.mark.parametrize("price, percent, left", [
        (4570, 10, 4113), (9350, 20, 7480), (8300, 50, 4150)
    ])
    def test_rows(self, request, tmp_path, price, percent, left):
        SEEN.append(price)
        os.chdir(tmp_path)
        assert str(price) in request.node.name and (len(SEEN) > 1 or price == 4570)
        assert discount(price, percent) == left
"""
ROW_IDS = [
    f"TestRows::test_rows[{one}]" for one in ("4570-10-4113", "9350-20-7480", "8300-50-4150")
]
FORGED = {
    "an int that equals everything": (
        "class A(int):\n    def __eq__(self, other): return True\n"
        "    __hash__ = int.__hash__\ndef discount(*given): return A()\n"
    ),
    "the value read where it is passed": (
        "import sys\ndef discount(*given): return sys._getframe(1).f_locals['left']\n"
    ),
}


@pytest.mark.long
def test_rows_that_build_on_each_other_are_graded_as_they_are(graded):
    suite = suite_of(ROWS, *ROW_IDS)
    right = graded(suite)
    assert right.errors == ("",) * 3 and right.flags == () and right.canaries == 1
    wrong = graded(suite, GIVEN)
    assert all(wrong.errors) and wrong.flags == ()


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("work", FORGED.values(), ids=FORGED)
def test_rows_are_not_paid_without_the_value(graded, work):
    found = graded(suite_of(ROWS, *ROW_IDS), work)
    assert "canary_passed" in found.flags and all(found.errors)
