"""What is made of a suite before it runs: canaries that fail for certain, values that can be
checked elsewhere, and work that leaves tests alone. Nothing here needs a sandbox.
"""

from __future__ import annotations

import inspect
import random
import re
import tomllib

import pytest

from rl_code.environment.sandbox.pool import File
from rl_code.environment.suites import applied as applied_module
from rl_code.environment.suites.alike import Look, natural
from rl_code.environment.suites.applied import Base, applied, laid_over
from rl_code.environment.suites.canaries import Drawn, draw, draw_alone, functions_in, guarded
from rl_code.environment.suites.literals import other_values
from rl_code.environment.suites.project import project
from rl_code.environment.suites.source import SuiteFile
from rl_code.environment.suites.values import gives_another_value, values
from rl_code.types import Suite, Task, Tests

PATH = "tests/test_a.py"
FILE = '''
import unittest
import pytest
from pytest import raises

def f(x):
    if x is None:
        raise ValueError("nothing")
    return x * 2

def test_number(): assert f(2) == 4  # a comment

def test_float():
    assert 0.5 == f(0.25)

def test_text():
    """Words."""
    assert f("aé") == "aéaé"
    assert f("") == ""

def test_bytes():
    assert f(b"a") == b"aa"

def test_nested():
    assert {"a": [f(1), -f(2)]} == {"a": [2, -4]}

def test_list():
    assert f([1]) == [
        1,
        1,
    ]

def test_empty():
    assert f([]) == []

def test_truth():
    with open("/dev/null") as file:
        assert file.closed is False
    assert not f(0)

def test_parentheses():
    assert not (
        f(1) == 3
    )

def test_parentheses_around():
    assert (f(1) ==
            2)

def test_bare():
    assert f(1)

def test_flipped():
    assert f(1) != 3
    assert f(1) in (1, 2)

def test_near():
    assert f(0.1) == pytest.approx(0.2)

def test_raises():
    with raises(ValueError, match="noth"):
        f(None)

@pytest.mark.parametrize("x", [1, 2])
def test_many(x):
    y = f(x)
    assert y == 2 * x
    assert f(5) == 10

class TestMethods:
    def test_method(self):
        assert f(8) == 16

class Old(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(f(9), 18)
        self.assertIn(f(1), [2])
'''
SIMPLE = (
    *("number", "float", "text", "bytes", "nested", "list", "empty", "truth", "bare", "flipped"),
    *("near", "raises", "parentheses", "parentheses_around"),
)
IDS = (
    *(f"{PATH}::test_{name}" for name in SIMPLE),
    *(f"{PATH}::test_many[{x}]" for x in (1, 2)),
    f"{PATH}::TestMethods::test_method",
    f"{PATH}::Old::test_equal",
)


def draw_all(seed: int) -> Drawn:
    return draw({PATH: FILE}, IDS, random.Random(seed), most=100)


def passes(namespace: dict, test: str) -> bool:
    """Whether a test of an executed file passes."""
    names, bracket, x = test.partition("::")[2].partition("[")
    *classes, name = names.split("::")
    if classes and classes[0] == "Old":
        function = getattr(namespace["Old"](name), name)
    else:
        function = getattr(namespace[classes[0]](), name) if classes else namespace[name]
    takes = inspect.signature(function).parameters
    try:
        function(*([int(x.rstrip("]"))] if bracket and takes else []))
    except (AssertionError, ValueError, pytest.fail.Exception):
        return False
    return True


@pytest.mark.quick(first=15)
@pytest.mark.parametrize("seed", range(40))
def test_real_tests_pass_and_canaries_fail(seed):
    drawn = draw_all(seed)
    assert sorted(drawn.tests.values()) == sorted(IDS)
    assert set(drawn.canaries.values()) == set(IDS) and not set(drawn.canaries) & set(drawn.tests)
    namespace: dict = {"__name__": "tests"}
    exec(drawn.files[PATH], namespace)
    assert all(passes(namespace, test) for test in drawn.tests), drawn.files[PATH]
    assert not any(passes(namespace, test) for test in drawn.canaries), drawn.files[PATH]


def test_a_draw_says_neither_by_name_nor_by_place_which_test_is_real():
    drawn = [draw({PATH: FILE}, IDS, random.Random(seed)) for seed in range(30)]
    assert all(len(one.kinds) == 8 for one in drawn)
    kept = [one == own for draws in drawn for one, own in draws.canaries.items()]
    assert 0.35 < sum(kept) / len(kept) < 0.65
    first = [
        draws.files[PATH].index(name(canary)) < draws.files[PATH].index(name(real))
        for draws in drawn
        for canary, own in draws.canaries.items()
        for real in (one for one, other in draws.tests.items() if other == own)
    ]
    assert 0.35 < sum(first) / len(first) < 0.65
    # what is told is changed only where nothing else can be
    known = guarded({PATH: FILE}, IDS)
    copied = [set(one.canaries.values()) for one in drawn]
    assert sum(len(own & known) for own in copied) > 0.9 * len(drawn) * min(8, len(known))
    most = {kind for seed in range(9) for kind in draw_all(seed).kinds}
    assert most == {"number", "string", "truth", "length", "exception"}


def others(literal: str, seed: int, before: str = "") -> list[str]:
    """Texts that a literal may be replaced by in a canary, behind other lines of its test."""
    source = SuiteFile(f"{before}x = {literal}\n")
    node = source.tree.body[-1]
    start = source.span(node)[0]
    look = Look(source.data.decode(), source.tokens)
    found = other_values(source, node.value, random.Random(seed), look)
    edited = [
        source.data[start : site.start] + text.encode() + source.data[site.end :]
        for site in found
        for text in (site.others[: site.alike] if before else site.others)
    ]
    return [text.decode()[4:-1] for text in edited]


LITERALS = (
    *("0", "7", "10", "0.5", "12.0", "-3", "''", "'x'", "'A7'", "b'a'", "True", "(1, 'a')"),
    *("[]", "[3]", "['x']", "[1, 2]", "[[1], [2, 3]]", "['ab', 'c']", "{}", "{1: 2}", "'a{b}'"),
)


@pytest.mark.parametrize("literal", LITERALS)
def test_another_value_is_of_the_same_type_and_never_the_same_value(literal):
    reached = {text for seed in range(20) for text in others(literal, seed)}
    assert reached and literal not in reached
    value = eval(literal)
    assert all(eval(text) != value and type(eval(text)) is type(value) for text in reached)


@pytest.mark.parametrize("literal", ["0x1f", "1_000", "1e-3", "'\\n'", "None", "f'a'", "{f()}"])
def test_a_literal_written_in_another_way_than_its_change_would_be_is_left_alone(literal):
    assert not any(others(literal, seed) for seed in range(40))


@pytest.mark.parametrize(
    ("literal", "before", "shape"),
    [
        ("4300", "", r"[1-9][1-9]00"),
        ("0.25", "", r"0\.\d[1-9]"),
        ("'KEPT'", "", r"'[A-Z]{2,6}'"),
        ("'Kept'", "", r"'[A-Z][a-z]{1,5}'"),
        # what comes again in the test stands among others that do
        ("'kept'", "y = 'kept', 'lost', 'found'\n", r"'(lost|found)'"),
        ("31", "y = 31, 47, 58\n", r"47|58"),
        # a sum or a difference among others
        ("90", "y = 31, 59\n", r"28|1829"),
    ],
)
def test_another_value_is_written_and_comes_again_as_the_real_one(literal, before, shape):
    found = {text for seed in range(30) for text in others(literal, seed, before or "y\n")}
    assert found and all(re.fullmatch(shape, text) for text in found), found


@pytest.mark.parametrize(("literal", "order"), [("473", float), ("'kept'", natural)])
def test_the_place_of_the_real_value_among_the_others_is_any(literal, order):
    ranks = []
    for seed in range(150):
        found = [text.strip("'") for text in others(literal, seed, "y\n")[:4]]
        ranks.append(sum(order(text) < order(literal.strip("'")) for text in found))
    shares = [ranks.count(rank) / len(ranks) for rank in range(5)]
    assert all(0.1 < share < 0.32 for share in shares), shares


def name(test: str) -> str:
    return f"def {test.split('::')[-1].partition('[')[0]}("


def groups(drawn: Drawn) -> dict[str, list[str]]:
    """Id of a test -> the texts of its copies without their names, the real one first."""
    found: dict[str, list[str]] = {}
    for file in drawn.files.values():
        source = SuiteFile(file)
        for copies in (drawn.tests, drawn.canaries):
            for one, own in copies.items():
                *classes, last = one.partition("::")[2].partition("[")[0].split("::")
                node = source.function((*classes, last))
                assert node is not None
                start, end = source.lines(node)
                text = source.data[start:end].decode().replace(f"def {last}(", "def (")
                found.setdefault(own, []).append(text)
    return found


def test_a_test_that_decides_stands_among_so_many_canaries_that_a_guess_is_mostly_wrong():
    sizes = set()
    for seed in range(30):
        drawn = draw({PATH: FILE}, IDS, random.Random(seed), 1, [f"{PATH}::test_number"])
        copies = groups(drawn)[f"{PATH}::test_number"]
        sizes.add(len(copies))
        assert len(set(copies)) == len(copies) and len(drawn.kinds) == 1
        # no copy stands nearer to the others than the rest
        differing = {
            sum(a != b for a, b in zip(one, other, strict=True))
            for one in copies
            for other in copies
            if one != other
        }
        assert differing == {1}
    assert sizes == {4, 5, 6}


TRUTHS = """
def test_bare():
    assert f(1)
def test_not():
    assert not f(1)
def test_in():
    assert f(1) in (1, 2)
def test_not_in():
    assert f(1) not in (1, 2)
def test_none():
    assert f(1) is None
def test_not_none():
    assert f(1) is not None
def test_unequal():
    assert f(1) != g(2), "why"
def test_long():
    assert f(1) and (g(2) or
        g(3))
class Old(TestCase):
    def test_true(self):
        self.assertTrue(f(1), "why")
    def test_false(self):
        self.assertFalse(f(1))
    def test_is_not_none(self):
        self.assertIsNotNone(f(1))
    def test_is_not_in(self):
        self.assertNotIn(f(1), (1, 2))
"""


def test_the_form_of_a_truth_value_does_not_tell_a_canary_from_its_original():
    names = [line.split()[1].partition("(")[0] for line in TRUTHS.splitlines() if "def " in line]
    ids = [f"{PATH}::Old::{name}" if at > 7 else f"{PATH}::{name}" for at, name in enumerate(names)]
    asks = []
    for seed in range(40):
        drawn = draw({PATH: TRUTHS}, ids, random.Random(seed), most=100)
        found = groups(drawn)
        assert len(found) == len(ids) == 12
        for real, canary in found.values():
            # both say the same, but for the value that they ask for
            assert real.replace("False", "True") == canary.replace("False", "True")
            assert real.count("False") + canary.count("False") == 1
            asks.append("False" in real)
    assert 0.4 < sum(asks) / len(asks) < 0.6
    alike = {"test_bare": "test_not", "test_in": "test_not_in", "test_none": "test_not_none"}
    texts = {name: set() for name in (*alike, *alike.values())}
    for seed in range(40):
        drawn = draw({PATH: TRUTHS}, ids[:6], random.Random(seed), most=100)
        for own, both in groups(drawn).items():
            texts[own.partition("::")[2]] |= set(both)
    # nor does it tell how the test itself asked
    assert all(texts[one] == texts[other] and len(texts[one]) == 4 for one, other in alike.items())


@pytest.mark.parametrize("seed", range(10))
def test_a_test_alone_is_its_own_canary_with_a_text_that_was_not_used(seed):
    rng = random.Random(seed)
    own = f"{PATH}::test_number"
    first = draw({PATH: FILE}, IDS, rng, 1, [own])
    second = draw_alone({PATH: FILE}, IDS, rng, [own], first.texts)
    assert second.canaries == {own: own}
    assert second.tests == {one: one for one in IDS if one != own}
    (text,) = second.texts
    assert text not in first.texts and text.decode() in second.files[PATH]
    namespace: dict = {"__name__": "tests"}
    exec(second.files[PATH], namespace)
    assert not passes(namespace, own)
    assert all(passes(namespace, one) for one in second.tests)


def test_tests_that_only_the_right_value_tells_from_a_canary_are_guarded():
    found = guarded({PATH: FILE}, IDS)
    told = {"flipped", "bare", "truth", "parentheses", "empty", "raises"}
    assert not {f"{PATH}::test_{name}" for name in told} & found
    # a small number is the likeliest of all that may stand there, another one is not
    assert {f"{PATH}::test_{name}" for name in ("text", "bytes")} <= found
    assert guarded({PATH: NO_CANARY}, [f"{PATH}::test_loop"]) == set()


NO_CANARY = """
import pytest, unittest.mock
def test_returns():
    return
    assert 1 == 1
def test_loop():
    for x in []:
        assert x == 1
def test_condition(x=0):
    if x:
        assert x == 1
def test_rounds():
    for x in f():
        assert x == 1
def test_leaves():
    for x in (1, 2):
        if x == f(): break
        assert x == 1
def test_handles():
    try:
        assert f() == 1
    except AssertionError:
        pass
def test_works_behind():
    assert f() == 1
    clean_up()
@pytest.mark.parametrize("expectation", [pytest.raises(ValueError)])
def test_expects_what_it_is_told(expectation):
    with expectation:
        assert f() == 1
def test_two_contexts():
    with open("a"), pytest.raises(ValueError):
        assert f() == 1
@pytest.mark.xfail
def test_marked():
    assert f() == 1
@unittest.mock.patch("a.b")
def test_patched(m):
    assert f() == 1
async def test_later():
    assert f() == 1
class Base:
    def test_inherited(self):
        assert f() == 1
class TestBelow(Base): pass
"""


def test_what_need_not_fail_has_no_canary():
    names = [
        line.split()[1].partition("(")[0] for line in NO_CANARY.splitlines() if "def test" in line
    ]
    ids = [f"{PATH}::{one}" for one in names if one not in ("test_inherited", "def")]
    ids += [
        f"{PATH}::TestBelow::test_inherited",
        f"{PATH}::Base::test_inherited",
        f"{PATH}::test_later",
    ]
    drawn = draw({PATH: NO_CANARY}, list(dict.fromkeys(ids)), random.Random(0), most=100)
    assert drawn.canaries == {} and drawn.files == {}
    assert draw({PATH: "def ("}, ids[:1], random.Random(0)).canaries == {}
    assert draw({}, ids[:1], random.Random(0)).canaries == {}


MANY_FORMS = """
import numpy as np
import pytest
needs_much = pytest.mark.skipif(False, reason="no")
ROWS = (1, 2)
def up(x):
    return x.upper()
def told():
    raise KeyError("no such file of tasks")
def test_all_of_several():
    assert up("a") is not None and up("kept") == "KEPT"
def test_part():
    assert [up("lost"), up("a")] == ["LOST", up("a")]
def test_beginning():
    assert "three four".startswith("thr")
def test_phrase():
    assert "file of tasks" in up("a") + " no file of tasks"
def test_message():
    with pytest.raises(KeyError, match="such file of"):
        told()
def test_assigned():
    want = [1, "FOUND"]
    got = [1, up("found")]
    assert got == want
def test_loop():
    for at, row in enumerate(ROWS):
        got = up("round")
        assert row > at and got == "ROUND"
def test_inner():
    def inner():
        return up("inner")
    try:
        assert inner() == "INNER"
    finally:
        up("b")
@needs_much
def test_marked():
    assert up("mark") == "MARK"
def test_arrays():
    np.testing.assert_allclose(np.full(1, 1719.0) / 3, [573], rtol=1e-6)
"""


@pytest.mark.quick(first=3)
@pytest.mark.parametrize("seed", range(8))
def test_other_forms_of_assertions_have_canaries_that_nothing_tells(seed):
    ids = functions_in(PATH, MANY_FORMS)
    assert len(ids) == 10 and guarded({PATH: MANY_FORMS}, ids) == set(ids)
    drawn = draw({PATH: MANY_FORMS}, ids, random.Random(seed), most=100, first=ids)
    assert set(drawn.canaries.values()) == set(ids)
    namespace: dict = {"__name__": "tests"}
    exec(drawn.files[PATH], namespace)
    assert all(passes(namespace, test) for test in drawn.tests), drawn.files[PATH]
    assert not any(passes(namespace, test) for test in drawn.canaries), drawn.files[PATH]


@pytest.mark.long
def test_what_is_guarded_does_not_depend_on_the_order_of_tests():
    ids = functions_in(PATH, MANY_FORMS)
    for seed in range(40):
        random.Random(seed).shuffle(ids)
        assert guarded({PATH: MANY_FORMS}, ids) == set(ids)


@pytest.mark.parametrize(
    "assertion",
    [
        'assert "task" in said()',  # one word, which a text may hold beside another
        'assert "no such task" not in said()',
        "np.testing.assert_allclose(said(), 1.5, rtol=0.5)",
        "np.testing.assert_allclose(said(), 1.5, 0.5)",
        "assert said() > 3",
        "assert said() == {3, other()}",
        "assert said() == [*other(), 3]",
        "assert said() == Row(3)",
    ],
)
def test_what_honest_code_may_pass_as_well_is_no_canary(assertion):
    text = f"def test_one():\n    {assertion}\n"
    assert guarded({PATH: text}, [f"{PATH}::test_one"]) == set()


VALUES = '''
from shop.prices import discount, parse as read
import shop.prices as prices
def test_plain():
    """One."""
    assert discount(100, percent=10) == 90
    assert prices.label("a") == "a"
def test_refuses():
    with pytest.raises(ValueError):
        read("x")
def test_fixture(tmp_path):
    assert discount(1, 2) == 3
def test_more():
    x = 5
    assert discount(x, 2) == 3
'''


PARAMETRIZED = """
import pytest
from shop.prices import discount
@pytest.mark.parametrize("price, left", [(100, 90), (10, 9)])
def test_pairs(price, left):
    assert discount(price, percent=10) == left
@pytest.mark.parametrize(("name",), [("a",), ("b",)])
class TestOthers:
    def test_class(self, name):
        assert discount(name) == name
@pytest.mark.parametrize("price", (0, -1))
def test_one(price):
    with pytest.raises(ValueError):
        discount(price)
@pytest.mark.parametrize("price", [0, made()])
def test_made(price):
    assert discount(price) == 0
@pytest.mark.parametrize("price", [0])
def test_fixture(price, tmp_path):
    assert discount(price) == 0
"""


def test_rows_of_plain_values_are_values_each():
    names = ("pairs[100-90]", "pairs[10-9]", "one[0]", "one[-1]", "made[0]", "fixture[0]")
    ids = [f"{PATH}::test_{name}" for name in names]
    classes = [f"{PATH}::TestOthers::test_class[{name}]" for name in "ab"]
    found = values({PATH: PARAMETRIZED}, [*ids, *classes], {"shop/prices.py"}, [])
    assert [(one.statement.replace("\n", " ")[:44], one.tests) for one in found] == [
        ("assert discount(100, percent=10) == 90", (ids[0],)),
        ("assert discount(10, percent=10) == 9", (ids[1],)),
        ("try:     discount(0) except ValueError:     ", (ids[2],)),
        ("try:     discount(-1) except ValueError:    ", (ids[3],)),
    ]
    # ids say which rows a suite has
    some = values({PATH: PARAMETRIZED}, ids[1:2], {"shop/prices.py"}, [])
    assert [one.tests for one in some] == [(ids[1],)]


def test_modules_below_src_are_looked_for_as_well():
    ids = [f"{PATH}::test_plain"]
    found = values({PATH: VALUES}, ids, {"src/shop/prices.py"}, [])
    assert [one.path for one in found] == ["src/shop/prices.py"] * 2
    # which of two is imported depends on settings
    both = {"src/shop/prices.py", "shop/prices.py"}
    assert values({PATH: VALUES}, ids, both, []) == []


def test_assertions_of_plain_calls_are_values():
    ids = [f"{PATH}::test_{one}" for one in ("plain", "refuses", "fixture", "more")]
    paths = {"shop/prices.py", "shop/__init__.py"}
    found = values({PATH: VALUES}, ids, paths, [])
    assert [(one.entry_point, one.statement.splitlines()[0]) for one in found] == [
        ("discount", "assert discount(100, percent=10) == 90"),
        ("label", "assert label('a') == 'a'"),
        ("parse", "try:"),
    ]
    assert {one.path for one in found} == {"shop/prices.py"}
    assert values({PATH: VALUES}, ids, set(), []) == []
    assert values({PATH: VALUES}, ids, paths, ["@pytest.fixture(autouse=True)\n"]) == []
    assert values({PATH: VALUES + "\nprices.TAX = set_up()\n"}, ids, paths, []) == []
    assert gives_another_value("AssertionError (f returned 7)")
    assert not gives_another_value("TypeError: f returned what tests cannot compare (f returned 1)")


BASE = '[project]\nname = "a"\n[tool.pytest.ini_options]\naddopts = "-q"\n[tool.x]\ny = 1\n'


@pytest.mark.parametrize(
    ("own", "kept"),
    [
        (
            '[project]\nname = "b"\n[tool.pytest.ini_options]\naddopts = "-x"\n[build]\nz = 2\n',
            True,
        ),
        ('[project]\nname = "b"\n[build]\nz = 2\n', True),
        (BASE.replace('"a"', '"b"') + "[build]\nz = 2\n", True),
        ('tool.x.y = 2\n[project]\nname = "b"\n', False),
        ('[project]\nname = """\n[tool.x]\n"""\n', False),
        ("no toml", False),
    ],
)
def test_tables_of_tools_stay_as_they_were(own, kept):
    merged = tomllib.loads(project(BASE, own))
    assert merged["tool"] == tomllib.loads(BASE)["tool"]
    assert (merged != tomllib.loads(BASE)) == kept
    assert not kept or (merged["project"] == {"name": "b"} and merged["build"] == {"z": 2})


@pytest.mark.parametrize(
    "own",
    [".".join("a" * 24_000) + " = 1\n", "x = " + "[" * 2000, "x = 1\n" * 50_000],
    ids=["dots", "nested", "long"],
)
def test_what_an_agent_writes_into_its_project_file_is_read_within_bounds(own, monkeypatch):
    monkeypatch.setattr(applied_module, "_PROJECTS_CPU_S", 0.1)
    files = {"a.py": "1\n", "pyproject.toml": BASE}
    task = Task("t", (), files, "", "", Tests(), Tests(suite=Suite({}, ("test_a.py::test_b",))))
    many = {f"{i}/pyproject.toml": own for i in range(4)}
    work = {"a.py": "2\n", "pyproject.toml": own, **many}
    found = applied(task, task.hidden_tests.suite, work, Base(task, None))
    assert found == {"a.py": "2\n", "pyproject.toml": BASE, **dict.fromkeys(many, "")}
    tidy = BASE.replace('"a"', '"b"')
    found = applied(task, task.hidden_tests.suite, {"pyproject.toml": tidy}, Base(task, None))
    assert found["pyproject.toml"] == tidy


@pytest.mark.parametrize(
    ("settings", "stands_in"),
    [
        ({}, False),
        ({"pytest.ini": "[pytest]\npythonpath =\n    ./lib\n    more\n"}, True),
        ({"pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["more", "lib"]\n'}, True),
        ({"conftest.py": 'import sys\nsys.path.insert(0, "./lib")\n'}, True),
        ({"pytest.ini": "[pytest]\npythonpath = other\n"}, False),
    ],
)
def test_modules_that_would_stand_in_for_pythons_are_left_out_wherever_python_looks(
    settings, stands_in
):
    files = {**settings, "lib/shop.py": "", "lib/queue.py": "", "lib/shop/json.py": ""}
    suite = Suite({PATH: "def test_a(): assert f() == 1\n"}, (f"{PATH}::test_a",))
    fields = dict(messages=(), path="", entry_point="", visible_tests=Tests())
    solved = {"lib/token.py": ""}
    task = Task(id="a", files=files, hidden_tests=Tests(suite=suite), reference=solved, **fields)
    new = ("lib/json.py", "lib/types/__init__.py", "lib/token.py", "lib/shop/random.py", "lib/b.py")
    work = {**files, **dict.fromkeys(new, "1"), "lib/queue.py": "2"}
    found = applied(task, suite, work, Base(task, None))
    gone = {"lib/json.py", "lib/types/__init__.py"} if stands_in else set()
    assert set(new) - found.keys() == gone and found["lib/queue.py"] == "2"


def test_only_what_is_neither_test_nor_configuration_is_applied():
    suite = Suite({"tests/test_a.py": "pass\n", "tests/old.py": None}, ("tests/test_a.py::test_b",))
    files = {"a.py": "1\n", "tests/conftest.py": "2\n", "tests/old.py": "3\n", "types.py": "4\n"}
    task = Task("t", (), files, "", "", Tests(), Tests(suite=suite), {"test_solution.py": "5\n"})
    work = {
        **{"a.py": "6\n", "new.py": "7\n", "types.py": "8\n", "test_solution.py": "9\n"},
        **{"json.py": "x", "os/__init__.py": "x", "data/json.py": "10\n", "json/data.txt": "11\n"},
        **{
            "tests/conftest.py": "x",
            "tests/test_a.py": "x",
            "sub/setup.cfg": "x",
            "b_test.py": "x",
        },
        **{"sub/conftest/__init__.py": "x", ".git/config": "x", "a.pth": "x", "pytest.py": "x"},
        **{"re.py": File(b"a.py", kind="link"), "pluggy": File(b"sub", kind="link")},
    }
    found = applied(task, suite, work, Base(task, None))
    assert found == {
        **{"a.py": "6\n", "new.py": "7\n", "types.py": "8\n", "test_solution.py": "9\n"},
        **{"tests/conftest.py": "2\n", "tests/old.py": "3\n", "data/json.py": "10\n"},
        "json/data.txt": "11\n",
    }
    laid = laid_over(task, found, suite.files.items())
    assert "tests/old.py" not in laid and laid["tests/test_a.py"] == "pass\n"
