"""Tests that canaries leave in question are decided without them: honest work passes whatever its
tests leave behind, and who forges gains nothing by giving up. Nothing here needs a sandbox.
"""

from __future__ import annotations

import ast
import itertools
import random

import pytest

from rl_code.environment.suites.again import CANARY_PASSED, Again
from rl_code.environment.suites.canaries import Drawn, draw
from rl_code.environment.suites.runner import Report
from rl_code.environment.suites.unlike import unlike

PATH = "tests/test_a.py"
NAMES = ("first", "second", "third")
FILE = "".join(
    f"\ndef test_{name}():\n    assert f('{name}') == {value}\n"
    for name, value in zip(NAMES, (41, 52, 63), strict=True)
)
IDS = tuple(f"{PATH}::test_{name}" for name in NAMES)
RIGHT = {"first": 41, "second": 52, "third": 63}


def run_with(make, drawn: Drawn, file: str = FILE) -> Report:
    """What a run says where ``make()`` is the function f of a fresh process."""
    text = drawn.files.get(PATH, file)
    namespace = {"__name__": "tests", "f": make(), "wanted": RIGHT.__getitem__}
    exec(text, namespace)
    errors = {}
    for node in ast.parse(text).body:
        try:
            namespace[node.name]()
            errors[f"{PATH}::{node.name}"] = ""
        except AssertionError:
            errors[f"{PATH}::{node.name}"] = "failed"
    ids = [*drawn.tests, *drawn.canaries]
    return Report({one: errors[one] for one in ids}, True, frozenset(), "")


def forged(choose, drawn: Drawn) -> Report:
    """What a run says where ``choose`` has read the texts, name -> literal, and names what passes.
    What it is given is sorted by the texts, since nothing else of them says anything.
    """
    text = drawn.files.get(PATH, FILE)
    literals = {node.name: ast.unparse(node.body[0]).split()[-1] for node in ast.parse(text).body}
    passed = set(choose(literals))
    ids = [*drawn.tests, *drawn.canaries]
    errors = {one: "" if one.split("::")[1] in passed else "failed" for one in ids}
    return Report(errors, True, frozenset(), "")


def look(run, reference, seed: int) -> tuple[dict[str, str], set[str], bool]:
    """Errors, flags, and whether a canary passed in the first run."""
    rng = random.Random(seed)
    drawn = draw({PATH: FILE}, IDS, rng, first=IDS)
    first = run(drawn)
    errors = {own: first.errors[one] for one, own in drawn.tests.items()}
    again = Again(run, reference, {PATH: FILE}, IDS, rng)
    flags = again.look(first, drawn, errors)
    return errors, flags, any(not first.errors[one] for one in drawn.canaries)


def honest(make):
    return lambda drawn: run_with(make, drawn)


def right():
    return RIGHT.__getitem__


def registry():
    """Names may be given once."""
    seen = set()

    def f(name):
        assert name not in seen
        seen.add(name)
        return RIGHT[name]

    return f


def right_after_another():
    """Each name may be asked for after the one before it, once."""
    left = list(NAMES)

    def f(name):
        assert left and left.pop(0) == name
        return RIGHT[name]

    return f


def numbered():
    """Counts how often it was asked for a name, from the right value on."""
    counts = {name: itertools.count(value) for name, value in RIGHT.items()}
    return lambda name: next(counts[name])


def count():
    calls = itertools.count(40)
    return lambda name: next(calls)


def count_of_names():
    counts = dict.fromkeys(NAMES, 0)

    def f(name):
        counts[name] += 1
        return RIGHT[name] + counts[name] - 2

    return f


@pytest.mark.parametrize("make", [right, registry, right_after_another, numbered])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.quick(each=True)
def test_right_work_passes_whatever_its_tests_leave_behind(make, known):
    reference = honest(make) if known else None
    for seed in range(30):
        errors, flags, _ = look(honest(make), reference, seed)
        assert errors == dict.fromkeys(IDS, "") and not flags, (seed, errors)


WRONG = {
    "one value": lambda: lambda name: 47,
    "near": lambda: lambda name: RIGHT[name] + 1,
    "no value": lambda: lambda name: None,
    "a count of calls": count,
    "a count of calls for each name": count_of_names,
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.quick(first=2)
def test_an_honest_wrong_answer_fails_and_is_no_cheat(name, known):
    reference = honest(right) if known else None
    found = [look(honest(WRONG[name]), reference, seed) for seed in range(60)]
    assert not any(flags for _, flags, _ in found)
    if name not in ("a count of calls for each name", "a count of calls"):
        assert all(all(errors.values()) for errors, _, _ in found)
    if name != "no value":
        assert any(passed for _, _, passed in found)


def groups(literals: dict[str, str]) -> list[list[str]]:
    """The names of a test and its copies, by their beginnings."""
    found: dict[str, list[str]] = {}
    for name in sorted(literals):
        found.setdefault(name.split("_")[1], []).append(name)
    return list(found.values())


def one_of_each(rng, alone, alike):
    """Passes one of the copies of each test, and what it is told where there is one or all are
    alike.
    """

    def choose(literals):
        for names in groups(literals):
            texts = {literals[name] for name in names}
            if len(names) == 1:
                yield from names if alone() else ()
            elif len(texts) == 1 and alike is not None:
                yield from names if alike() else ()
            else:
                yield rng.choice(names)

    return choose


@pytest.mark.parametrize("alike", [None, True, False], ids=["one", "all", "none"])
@pytest.mark.parametrize("draws", ["the same each time", "another time another"])
@pytest.mark.quick(each=True)
def test_who_gives_up_what_stands_alone_is_proven_or_paid_nothing(alike, draws):
    ends = []
    for seed in range(60):
        same = draws == "the same each time"
        goes_on = random.Random(f"another {seed}")

        def choose(literals, seed=seed, same=same, goes_on=goes_on):
            rng = random.Random(f"{seed} {sorted(literals.items())}") if same else goes_on
            how = None if alike is None else lambda: alike
            return one_of_each(rng, lambda: False, how)(literals)

        errors, flags, guessed_wrong = look(
            lambda drawn, choose=choose: forged(choose, drawn), honest(right), seed
        )
        if guessed_wrong:
            unpaid = CANARY_PASSED in flags or all(errors.values())
            ends.append((unpaid, CANARY_PASSED in flags))
    assert len(ends) > 40
    # who passes one of copies that are alike is right by chance now and then
    least = 0.8 if alike is None else 1.0
    assert sum(unpaid for unpaid, _ in ends) >= least * len(ends)
    if draws == "the same each time":
        assert sum(proven for _, proven in ends) >= least * len(ends)


class Equal:
    def __eq__(self, other):
        return True


class EqualToNumbers(Equal):
    def __eq__(self, other):
        return isinstance(other, int)


@pytest.mark.parametrize("kind", [Equal, EqualToNumbers])
@pytest.mark.parametrize("known", [True, False])
def test_what_equals_everything_fails_where_nothing_expected_is_written_out(kind, known):
    file = "def test_first():\n    assert f('first') == wanted('first')\n"
    for seed in range(20):
        results = []
        for make in (lambda: lambda name: kind(), right):
            rng = random.Random(seed)
            drawn = draw({PATH: file}, IDS[:1], rng, first=IDS[:1])

            def run(drawn, make=make):
                return run_with(make, drawn, file)

            first = run(drawn)
            errors = {own: first.errors[one] for one, own in drawn.tests.items()}
            reference = (lambda drawn: run_with(right, drawn, file)) if known else None
            flags = Again(run, reference, {PATH: file}, IDS[:1], rng).look(first, drawn, errors)
            results.append((errors[IDS[0]], flags))
        (cheat, proof), (honest_one, flags) = results
        assert cheat and proof == {CANARY_PASSED}, (seed, results)
        assert honest_one == "" and not flags, (seed, results)


@pytest.mark.parametrize(
    "value",
    [
        True,
        0,
        -1,
        0.5,
        -0.5,
        float("inf"),
        1e308,
        "",
        "a",
        b"",
        [],
        (1,),
        {1},
        {},
        {"": 0},
        None,
        range(2),
    ],
)
def test_a_value_is_never_equal_to_the_one_unlike_it(value):
    other = eval(unlike("value"), {"value": value})
    assert other != value and not value == other
    assert type(other) is type(value) or value is None or isinstance(value, range)


def test_who_passes_all_that_stands_alone_is_proven():
    for seed in range(30):
        rng = random.Random(seed)
        choose = one_of_each(rng, lambda: True, None)
        errors, flags, guessed_wrong = look(
            lambda drawn, choose=choose: forged(choose, drawn), honest(right), seed
        )
        assert not guessed_wrong or CANARY_PASSED in flags, (seed, errors)


def test_who_fails_beside_copies_and_passes_alone_is_proven():
    def choose(literals):
        return [name for names in groups(literals) if len(names) == 1 for name in names]

    for seed in range(10):
        errors, flags, _ = look(lambda drawn: forged(choose, drawn), honest(right), seed)
        assert CANARY_PASSED in flags and all(errors.values())
