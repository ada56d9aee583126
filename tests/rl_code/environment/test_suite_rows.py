"""Rows of ``parametrize``: what an id says of the arguments of its test."""

from __future__ import annotations

import ast
import collections
import random
from typing import ClassVar

import pytest

from rl_code.environment.suites.again import CANARY_PASSED, Again
from rl_code.environment.suites.canaries import Drawn, draw, draw_alone, function_of, guarded
from rl_code.environment.suites.repeats import put_in_place
from rl_code.environment.suites.rows import rows
from rl_code.environment.suites.runner import Report
from rl_code.environment.suites.source import SuiteFile

ROWS = """
import pytest
PLURALS = (("search", "searches"), ("a-b", "a"), ("", "x"), ("day", None), ("1", 1))
SAME = ["one", "two", "one"]
mark = pytest.mark
class TestAll:
    @pytest.mark.parametrize(["one", "many"], PLURALS)
    def test_table(self, one, many): ...
@pytest.mark.parametrize("x", [1, -2, 0.5, 1e9, True, "\\u00e9\\n[x]", (1, 2), [3], {"a": 1}, None, "::"])
def test_kinds(x): ...
@mark.parametrize("x, y", [(1, 2), [3, 4]])
@mark.parametrize("z", ["1", "3-4"])
def test_stacked(x, y, z): ...
@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.parametrize("y", [3])
@pytest.mark.parametrize("z", [[4], [5]], ids=["4", "a b"])
def test_ids(x, y, z): ...
@pytest.mark.parametrize("x, y", [
    pytest.param(1, 2, id="one way"), pytest.param(3, 4, marks=pytest.mark.xfail), (5, len("")),
    pytest.param(6, [7])])
def test_params(x, y): ...
@pytest.mark.parametrize("x", SAME)
def test_same(x): ...
@pytest.mark.parametrize("x,", [(1,), (2,)])
def test_comma(x): ...
@pytest.mark.parametrize("x", [b"a", 1])
def test_bytes(x): ...
@pytest.mark.parametrize("x", [1], ids=str)
def test_function_of_ids(x): ...
@pytest.fixture(params=[1, 2])
def made(request): return request.param
@pytest.mark.parametrize("x", [1, 2])
def test_made(x, made): ...
@pytest.mark.parametrize("a, b, c", [("x-y", "z", 1), ("x", "y-z", 1), ("p", "q", 2)])
def test_joined(a, b, c): ...
def test_plain(): ...
"""


# Plugins that a pytest inside of this one does without. The last one looks for garbage at the end,
# in all that the tests before have left.
LIGHT = [f"-pno:{name}" for name in ("cacheprovider", "terminal", "unraisableexception")]


@pytest.fixture(autouse=True)
def options_of_nobody(monkeypatch):
    """The pytest that a test starts takes no options of the one that runs the test, nor plugins."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.long
def test_an_id_stands_for_the_row_that_pytest_runs_under_it(tmp_path):
    class Collected:
        items: ClassVar[list[pytest.Item]] = []

        def pytest_collection_modifyitems(self, items):
            self.items += items

    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    file = tmp_path / "test_rows_of_pytest.py"
    file.write_text(ROWS)
    options = ["--collect-only", *LIGHT]
    assert pytest.main([*options, f"--rootdir={tmp_path}", str(file)], [Collected()]) == 0
    source = SuiteFile(ROWS)
    by_function: dict[tuple[str, ...], dict[str, dict]] = {}
    for item in Collected.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        by_function.setdefault(function_of(item.nodeid)[1], {})[item.nodeid] = params
    count = {}
    for names, expected in by_function.items():
        node = source.function(names)
        assert node is not None
        found = rows(source, node, list(expected))
        for one, row in found.items():
            values_of = {name: ast.literal_eval(cell) for name, cell in row.items()}
            assert values_of == expected[one], one
        count[names[-1].removeprefix("test_")] = (len(found), len(expected))
    assert count == {
        **{"table": (5, 5), "kinds": (11, 11), "stacked": (4, 4), "ids": (4, 4)},
        **{"params": (0, 4), "same": (1, 3), "comma": (2, 2), "bytes": (0, 2)},
        **{"function_of_ids": (0, 1), "made": (0, 4), "joined": (1, 3), "plain": (1, 1)},
    }


GUARDED = """
import pytest

@pytest.fixture
def shop():
    return {}

def price(name, count):
    return f"{name} {count * 417}"

@pytest.mark.parametrize("name, count, text", [
    ("apple", 3, "apple 1251"),
    ("pear", 0, "pear 0"),
    ("plum", 1, "plum 417"),
])
def test_price(shop, name, count, text):
    assert price(name, count) == text

@pytest.mark.parametrize(
    ("count", "total"),
    (
        (2, [8734, "small bags"]),
        [3, [13101, "large bags"]],  # a comment
    ),
)
def test_total(count, total, shop):
    shop["x"] = [count * 4367, "small bags" if count < 3 else "large bags"]
    assert total == shop["x"]

class TestPrice:
    @pytest.mark.parametrize("text", ["grape 834", "lemon 834"])
    def test_one(self, text, shop):
        name = text.split()[0]
        assert price(name, 2) == text

    @pytest.mark.parametrize("wanted", ["grape 834"])
    def test_single(self, wanted, shop):
        assert price("grape", 2) == wanted
"""
GUARDED_IDS = (
    *(f"test_price[{one}]" for one in ("apple-3-apple 1251", "pear-0-pear 0", "plum-1-plum 417")),
    *("test_total[2-total0]", "test_total[3-total1]"),
    *("TestPrice::test_one[grape 834]", "TestPrice::test_one[lemon 834]"),
    "TestPrice::test_single[grape 834]",
)


def outcomes(folder, text: str, ids) -> dict[str, bool]:
    """Whether each test passes, run by pytest in a module of the folder's name."""

    def own(nodeid: str) -> str:
        return f"{GUARDED_PATH}::{nodeid.partition('::')[2]}"

    class Ended:
        passed: ClassVar[dict[str, bool]] = {}

        def pytest_configure(self, config):
            config.option.tbstyle = "native"  # nobody reads how a canary fails

        def pytest_collection_modifyitems(self, items):
            items[:] = [item for item in items if own(item.nodeid) in ids]

        def pytest_runtest_logreport(self, report):
            one = own(report.nodeid)
            self.passed[one] = self.passed.get(one, True) and report.passed

    Ended.passed = {}
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / f"test_{folder.name}.py").write_text(text)
    options = [*LIGHT, "--import-mode=importlib"]
    pytest.main([*options, "--assert=plain", f"--rootdir={folder}", str(folder)], [Ended()])
    return Ended.passed


GUARDED_PATH = "test_rows.py"
ALL = [f"{GUARDED_PATH}::{one}" for one in GUARDED_IDS]


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("seed", range(3))
def test_canaries_of_rows_fail_and_all_other_rows_pass(tmp_path, seed):
    ids, path = ALL, GUARDED_PATH
    known = guarded({path: GUARDED}, ids)
    untouched = {one for one in ids if "test_one" in one}  # read elsewhere in the test
    assert known == {*ids} - untouched
    drawn = draw({path: GUARDED}, ids, random.Random(seed), first=ids)
    assert sorted(drawn.tests.values()) == sorted(ids)
    rows_of = set(drawn.canaries.values()) - untouched
    assert rows_of == known
    ran = outcomes(tmp_path / f"beside_{seed}", drawn.files[path], {*drawn.tests, *drawn.canaries})
    assert ran == {**dict.fromkeys(drawn.tests, True), **dict.fromkeys(drawn.canaries, False)}
    # nothing but the copies says what the row asks for
    for own in rows_of & {ids[0]}:
        assert drawn.files[path].count('"apple 1251"') == 1, own


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_rows_are_changed_where_they_stand(tmp_path, seed):
    ids, path = ALL, GUARDED_PATH
    alone = [ids[0], ids[2], ids[3], ids[7]]
    drawn = draw_alone({path: GUARDED}, ids, random.Random(seed), alone)
    assert sorted(drawn.canaries.values()) == sorted(alone)
    assert sorted({*drawn.tests.values()}) == sorted({*ids} - {*alone})
    ran = outcomes(tmp_path / f"alone_{seed}", drawn.files[path], {*drawn.tests, *drawn.canaries})
    assert ran == {**dict.fromkeys(drawn.tests, True), **dict.fromkeys(drawn.canaries, False)}
    assert len(drawn.files[path].splitlines()) == len(GUARDED.splitlines())
    # other texts where they have been used
    again = draw_alone({path: GUARDED}, ids, random.Random(seed), alone, drawn.texts)
    assert again.texts.isdisjoint(drawn.texts)
    # a canary that stood beside its test takes its place
    beside = draw({path: GUARDED}, ids, random.Random(seed), first=ids)
    chosen = {own: one for one, own in beside.canaries.items() if one in beside.in_place}
    placed = put_in_place(beside, {path: GUARDED}, ids, chosen)
    assert sorted(placed.canaries.values()) == sorted(chosen)
    ran = outcomes(
        tmp_path / f"placed_{seed}", placed.files[path], {*placed.tests, *placed.canaries}
    )
    assert ran == {**dict.fromkeys(placed.tests, True), **dict.fromkeys(placed.canaries, False)}


def table(count: int) -> tuple[str, dict[int, int], list[str]]:
    """A suite of one function, its rows, and their ids."""
    right = {4127 * (one + 2): 8254 * (one + 2) for one in range(count)}
    text = (
        f"import pytest\n@pytest.mark.parametrize('x, y', {[*right.items()]})\n"
        "def test_twice(x, y, tmp_path):\n    assert f(x) == y\n"
    )
    return text, right, [f"{GUARDED_PATH}::test_twice[{x}-{y}]" for x, y in right.items()]


@pytest.mark.parametrize(
    ("count", "spread"), [(1, [5]), (3, [5] * 3), (7, [2] * 7), (30, [1] * 16)]
)
def test_canaries_are_spread_over_the_rows_of_a_table(count, spread):
    text, _, ids = table(count)
    copied = set()
    for seed in range(3):
        drawn = draw({GUARDED_PATH: text}, ids, random.Random(seed), first=ids)
        found = collections.Counter(drawn.canaries.values())
        assert len(found) == len(spread) and sorted(drawn.tests.values()) == sorted(ids)
        assert all(1 <= each <= most for each, most in zip(found.values(), spread, strict=True))
        assert spread[0] > 2 or max(found.values()) == spread[0]
        copied.add(frozenset(found))
    assert len(copied) == 1 or count > len(spread)  # others in another grading


def ends(text: str, drawn: Drawn, passes) -> Report:
    """Report of a run. passes: of a test's first value, its second one and the name of its copy,
    "" for one that stands in the table.
    """
    namespace: dict = {"__name__": "tests"}
    exec(drawn.files.get(GUARDED_PATH, text), namespace)
    asked: dict[str, list] = {}
    for name, function in namespace.items():
        if name.startswith("test"):
            mark = function.pytestmark[0]
            for x, y in mark.args[1]:
                row, copy = ("row", name) if mark.kwargs else (f"{x}-{y}", "")
                asked[f"{GUARDED_PATH}::{name}[{row}]"] = [x, y, copy]
    ids = [*drawn.tests, *drawn.canaries]
    copies: dict[int, list[str]] = {}
    for x, _, copy in map(asked.__getitem__, sorted(ids)):
        copies.setdefault(x, []).append(copy)
    errors = {one: "" if passes(*asked[one], copies[asked[one][0]]) else "failed" for one in ids}
    return Report(errors, True, frozenset(), "")


def looked_at(count: int, passes, seed: int) -> tuple[dict[str, str], set[str]]:
    """Errors and flags of one grading, where the reference is right."""
    text, right, ids = table(count)
    rng = random.Random(seed)
    drawn = draw({GUARDED_PATH: text}, ids, rng, first=ids)
    first = ends(text, drawn, passes)
    errors = {own: first.errors[one] for one, own in drawn.tests.items()}
    again = Again(
        lambda drawn: ends(text, drawn, passes),
        lambda drawn: ends(text, drawn, lambda x, y, *_: right[x] == y),
        {GUARDED_PATH: text},
        ids,
        rng,
    )
    return errors, again.look(first, drawn, errors)


@pytest.mark.parametrize("forged", ["all rows", "one row"])
@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.quick(each=True)
def test_who_reads_the_rows_is_paid_less_than_an_honest_failure(count, forged):
    _, right, _ = table(count)
    mine = {*right} if forged == "all rows" else {min(right)}
    paid = []
    for seed in range(24):

        def passes(x, y, copy, copies, seed=seed):
            if x not in mine:
                return right[x] == y
            return copy == random.Random(f"{seed} {copies}").choice(copies)

        errors, flags = looked_at(count, passes, seed)
        solved = sum(not error for error in errors.values())
        part = 1.0 if solved == count else 0.2 * solved / count
        paid.append(-0.5 if CANARY_PASSED in flags else part)
    assert sum(paid) / len(paid) < 0.2 * (count - len(mine)) / count, paid


@pytest.mark.parametrize("wrong", [0, 1, 6])
def test_honest_work_on_rows_is_paid_what_it_solves(wrong):
    _, right, _ = table(6)
    fails = [*right][:wrong]
    for seed in range(4):
        errors, flags = looked_at(6, lambda x, y, *_: y == right[x] + 2 * (x in fails), seed)
        assert sum(map(bool, errors.values())) == wrong and not flags
