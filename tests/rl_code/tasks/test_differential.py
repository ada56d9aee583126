"""Differential cases say what the reference does, only where it does the same every time, and catch
wrong solutions.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from rl_code.environment.grader import grade
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.tasks import mbpp
from rl_code.tasks.differential import (
    DifferentialConfig,
    choose,
    mutations,
    reference_cases,
    strengthen,
    within_domain,
)
from rl_code.tasks.domain import expects, neighbours
from rl_code.tasks.evalplus import EvalPlus
from rl_code.tasks.perturb import perturb
from rl_code.types import Case, Task, Tests

CONFIG = DifferentialConfig(cases=12, timeout_s=5.0, workers=2)
ABUNDANT = """def is_abundant(n):
    return sum(d for d in range(1, n) if n % d == 0) > n
"""
PARITY = "def is_abundant(n):\n    return n % 2 == 0\n"


@pytest.fixture(scope="module")
def pool():
    config = SandboxConfig(
        workers=1, memory_mb=512, processes=16, workspace_mb=8, cpu_s=10, output_bytes=1 << 16
    )
    with SandboxPool(config) as pool:
        yield pool


def task(code: str, entry_point: str = "f", *cases: tuple, **meta) -> Task:
    tests = Tests(cases=tuple(Case(args, expected, 0.0) for args, expected in cases))
    return Task(
        "t",
        (),
        {},
        "solution.py",
        entry_point,
        Tests(),
        tests,
        {"solution.py": code},
        meta=meta,
    )


def abundant() -> Task:
    return task(ABUNDANT, "is_abundant", ((12,), True), ((15,), False), ((13,), False))


def passes(solution: str, of: Task, pool: SandboxPool) -> bool:
    return all(
        grade(of.path, of.entry_point, of.hidden_tests, {of.path: solution}, pool, 5.0).passed
    )


def test_a_wrong_solution_that_passes_the_asserts_fails_the_strengthened_tests(pool, tmp_path):
    (strong,) = strengthen([abundant()], mutations, CONFIG, pool, tmp_path / "cache.json").tasks
    assert passes(PARITY, abundant(), pool) and passes(ABUNDANT, strong, pool)
    assert not passes(PARITY, strong, pool)
    assert len(strong.hidden_tests) == 3 + CONFIG.cases
    assert strong.hidden_tests.cases[:3] == abundant().hidden_tests.cases


def test_references_that_fail_their_own_tests_are_left_out_and_named(pool, tmp_path):
    wrong = dataclasses.replace(
        task("def f(x):\n    return x", "f", ((1,), 1), ((2,), 3)), id="wrong"
    )
    broken = dataclasses.replace(task("def f(x)", "f", ((1,), 1)), id="broken")
    code = dataclasses.replace(
        task("def f(x):\n    return x", "f"),
        id="code",
        hidden_tests=Tests(code=("assert f(1) == undefined",)),
    )
    result = strengthen(
        [wrong, abundant(), broken, code], mutations, CONFIG, pool, tmp_path / "cache.json"
    )
    assert [t.id for t in result.tasks] == ["t"]
    assert result.failed.keys() == {"wrong", "broken", "code"}
    assert result.failed["wrong"].startswith("test 2 of 2")
    assert "NameError" in result.failed["code"]


INPUTS = [(n,) for n in range(6)]


@pytest.mark.parametrize(
    ("name", "body", "kept"),
    [
        ("plain", "return [n, (n, 'a'), {n: None}, {n}]", INPUTS),
        ("error", "return 6 // n", INPUTS[1:]),
        ("exit", "import sys; n < 3 or sys.exit(0); return n", INPUTS[:3]),
        ("chance", "import random; return random.random()", []),
        ("object", "return object() if n == 2 else n", [*INPUTS[:2], *INPUTS[3:]]),
        ("generator", "return (x for x in [n])", []),
        ("infinity", "return float('inf') if n == 1 else n", [INPUTS[0], *INPUTS[2:]]),
        ("long", "return 'x' * 10000 if n == 1 else 'x'", [INPUTS[0], *INPUTS[2:]]),
        ("set order", "return list(set(str(i * 7) for i in range(n)))", INPUTS[:2]),
        (
            "set operation order",
            "return list(set(range(n * 8)) & set(range(0, 99, 8)))",
            INPUTS[:2],
        ),
        ("set display order", "return list({str(i) for i in range(n)} - {'x'})", INPUTS[:2]),
        ("tie", "return max(['a', 'bb', 'c' * n], key=len)", [INPUTS[i] for i in (0, 1, 3, 4, 5)]),
        (
            "a list changed while it is walked",
            "x = [1, 2, 2, 3][:n]\n    for y in x:\n        if y == 2: x.remove(y)\n    return x",
            INPUTS[:3],
        ),
        (
            "sorted set",
            "return sorted(set(str(i * 7) for i in range(n)) & {'0', '7', '14'})",
            INPUTS,
        ),
    ],
)
def test_only_plain_answers_given_every_time_become_cases(pool, name, body, kept):
    code = f"def f(n):\n    {body}\n"
    found = reference_cases(task(code), INPUTS, pool, 5.0)
    assert [case.args for case in found] == kept
    namespace: dict = {}
    exec(code, namespace)
    assert all(case.expected == namespace["f"](*case.args) for case in found)


@pytest.mark.long
def test_an_input_that_hangs_costs_only_itself(pool):
    code = "def f(n):\n    while n == 2:\n        pass\n    return n\n"
    assert [case.args for case in reference_cases(task(code), INPUTS, pool, 2.0)] == [
        *INPUTS[:2],
        *INPUTS[3:],
    ]


def test_floats_get_a_tolerance_and_the_tasks_own_is_kept(pool):
    code = "def f(n):\n    return n / 3 if n % 2 else n\n"
    assert [case.tolerance for case in reference_cases(task(code), INPUTS[:2], pool, 5.0)] == [
        0.0,
        1e-6,
    ]
    assert [
        case.tolerance for case in reference_cases(task(code, tolerance=0.5), INPUTS[:2], pool, 5.0)
    ] == [0.5, 0.5]


def test_the_cache_is_used_for_the_same_task_only(pool, tmp_path):
    cache = tmp_path / "folder" / "cache.json"
    first = strengthen([abundant()], mutations, CONFIG, pool, cache)
    # runs nothing: there is no sandbox
    assert strengthen([abundant()], mutations, CONFIG, None, cache) == first
    changed = dataclasses.replace(abundant(), reference={"solution.py": PARITY})
    result = strengthen([changed], mutations, CONFIG, pool, cache)
    assert all(
        case.expected == (case.args[0] % 2 == 0) for case in result.tasks[0].hidden_tests.cases
    )
    cache.write_text("{")
    with pytest.raises(ValueError, match=r"cache\.json: not a cache"):
        strengthen([abundant()], mutations, CONFIG, pool, cache)


def test_chosen_cases_show_every_expected_value():
    cases = [Case((i,), i >= 18) for i in range(20)]
    chosen = choose(cases, 6)
    assert [case.expected for case in chosen].count(True) == 2 and len(chosen) == 6
    assert choose(cases[:3], 6) == cases[:3]


def test_perturbed_code_computes_the_same():
    code = """from __future__ import annotations
def f(a, b):
    c = {*a} | set(b)
    d = c.copy()
    d.add(99)
    d -= {1}
    return c == set(a) | set(b), sorted(d), len(frozenset(c) ^ d), {x for x in c if x in d} <= c, isinstance(c, set)
"""
    plain: dict = {}
    other: dict = {}
    exec(code, plain)
    exec(perturb(code), other)
    arguments = ([1, 2, "x"][:2], [2, 5, 8])
    assert plain["f"](*arguments) == other["f"](*arguments)


def test_evalplus_files_get_their_expected_values_from_the_reference(pool, tmp_path):
    rows = [
        {
            "task_id": "X/0",
            "prompt": 'def half(x):\n    """ Half. """\n',
            "entry_point": "half",
            "canonical_solution": "    return x / 2\n",
            "base_input": [[1]],
            "plus_input": [[3], ["a"]],
            "atol": 0.01,
        },
        {
            "task_id": "X/1",
            "prompt": 'def fail(x):\n    """ Fails. """\n',
            "entry_point": "fail",
            "canonical_solution": "    return x.y\n",
            "base_input": [[1]],
            "plus_input": [],
            "atol": 0,
        },
    ]
    path = tmp_path / "plus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = EvalPlus(str(path), dataclasses.replace(CONFIG, cases=0), form="raw")
    (task,) = source.load(pool, tmp_path)
    assert task.hidden_tests == Tests(cases=(Case((1,), 0.5, 0.01), Case((3,), 1.5, 0.01)))
    assert passes("def half(x):\n    return x * 0.501\n", task, pool)
    assert not passes("def half(x):\n    return x * 0.51\n", task, pool)


@pytest.mark.skipif(
    "RL_CODE_DATA" not in os.environ, reason="RL_CODE_DATA, the folder with mbpp.jsonl, is not set"
)
def test_is_abundant_of_mbpp_is_no_longer_fooled_by_parity(pool, tmp_path):
    tasks = mbpp.load(str(Path(os.environ["RL_CODE_DATA"]) / "mbpp.jsonl"))
    task = next(t for t in tasks if t.entry_point == "is_abundant")
    assert passes(PARITY, task, pool)
    (strong,) = strengthen([task], mutations, CONFIG, pool, tmp_path / "cache.json").tasks
    assert not passes(PARITY, strong, pool)


CLAMP = """def clamp(x, low):
    if x < 0:
        return "bad input"
    return max(x, low)
"""


def test_a_branch_that_no_assert_takes_gives_no_case(pool):
    of = task(CLAMP, "clamp", ((3, 5), 5), ((7, 2), 7))
    asked = [Case((-1, 4), "bad input"), Case((4, 4), 4), Case((0, 0), 0), Case((6, 9), 9)]
    assert [case.args for case in within_domain(of, asked, pool, 5.0)] == [(4, 4), (6, 9)]
    inside = task("def f(x):\n    return 1 if x > 2 and x % 2 else 2\n", "f", ((5,), 1), ((1,), 2))
    cases = [Case((7,), 1), Case((0,), 2), Case((4,), 2)]
    assert [case.args for case in within_domain(inside, cases, pool, 5.0)] == [(7,), (0,)]


@pytest.mark.parametrize(
    ("known", "value", "expected"),
    [
        ([1, 5], 9, True),
        ([1, 5], -1, False),
        ([1, 5], 0, False),
        ([1, 5], None, False),
        ([1, 2.5], 3, True),
        ([True, False], True, True),
        (["Valid", "Invalid", "Valid"], "Unknown", False),
        (["Valid", "Invalid", "Valid"], "Invalid", True),
        (["ab", "cd"], "ef", True),
        (["ab", "cd"], "", False),
        ([[1], [2, 3]], [7, 8, 9], True),
        ([[1], [2, 3]], [], False),
        ([[1], [2, 3]], [[1]], False),
        ([{"a": 1}], {"b": 2}, True),
        ([{"a": 1}], {"b": "c"}, False),
    ],
)
def test_an_answer_of_a_kind_that_no_assert_expects_gives_no_case(known, value, expected):
    assert expects(known, value) is expected


def test_inputs_on_which_similar_tasks_disagree_give_no_case(pool, tmp_path):
    described = {"description": "Write a function to find the largest element of the given list."}
    asserts = ((([1, 7],), 7), (([4, 2, 9],), 9))
    largest = task("def f(x):\n    return max(x)\n", "f", *asserts, **described)
    last = task("def g(y):\n    return y[-1]\n", "g", **described)
    wrong = task("def h(y):\n    return 0\n", "h", **described)
    others = [dataclasses.replace(t, id=t.entry_point) for t in (last, wrong)]
    assert {t.id for t in neighbours(largest, others)} == {"g", "h"}

    def run(near):
        cache = tmp_path / f"{len(near)}.json"
        return strengthen([largest], mutations, CONFIG, pool, cache, near)

    # the last element passes the asserts, nought does not: only the first has a say
    alone, disputed = run([]), run(others)
    assert alone.dropped["disputed"] == 0 < disputed.dropped["disputed"]
    cases = disputed.tasks[0].hidden_tests.cases[2:]
    assert cases and all(case.expected == max(case.args[0]) == case.args[0][-1] for case in cases)
    assert f"{disputed.added['t']} differential tests" in disputed.summary()
