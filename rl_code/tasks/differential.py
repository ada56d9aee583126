"""Differential tests: hidden cases whose expected values the reference solution gives, run in the
sandbox.

A proposed input becomes a case only when the reference answers it in time, with a plain value, the
same one twice: the second time in a module where sets are walked backwards, ties of ``max`` and
``min`` go the other way and random numbers are others, so that what depends on the order of a set,
on the choice among equals, on chance or on the clock is left out. References that fail the task's
own tests are found on the way.
What was found is kept in a JSON file and computed again only when the task or the settings change.
"""

from __future__ import annotations

import ast
import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_code.environment.compare import same
from rl_code.environment.grader import Grade, grade
from rl_code.environment.sandbox.pool import Sandbox, SandboxPool
from rl_code.types import Case, Task, Tests

REVISION = 4  # of this file and of the proposals; a cache written by another revision is not used
FLOAT_TOLERANCE = 1e-6
_LONGEST_VALUE = 4000  # characters of an expected value's repr
_HANGS = 2  # inputs of one task that may hang before the rest is given up
_ATTEMPTS = 2  # a call or test that times out on a busy machine gets another chance

Propose = Callable[[Task], Sequence[tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class DifferentialConfig:
    """cases: most cases added to a task; 0 adds every one. workers: tasks worked on at once.

    timeout_s: wall-clock of one batch of calls, as when a solution is graded. The reference must
    pass the task's own tests within it, and the added cases within half of it.
    """

    cases: int
    timeout_s: float
    workers: int


@dataclasses.dataclass(frozen=True)
class Strengthened:
    """tasks: those whose reference passes its own tests, with the cases added to the hidden ones.

    failed: id -> why, of the tasks left out. added: id -> number of cases added.
    """

    tasks: tuple[Task, ...]
    failed: Mapping[str, str]
    added: Mapping[str, int]


def strengthen(
    tasks: Sequence[Task],
    propose: Propose,
    config: DifferentialConfig,
    pool: SandboxPool,
    cache: Path,
) -> Strengthened:
    """Adds differential cases to the hidden tests of every task and leaves out tasks whose
    reference fails.

    propose: gives the argument tuples to try, small ones first; a task's ``meta["tolerance"]`` is
    how far numbers of its cases may be apart (0 when absent; floats always get FLOAT_TOLERANCE at
    least). cache: JSON file, made or extended.

    Raises SandboxFault when the sandbox itself fails.
    """
    known = _read_cache(cache)
    proposals = {
        task.id: [arguments for arguments in propose(task) if _literal(arguments)] for task in tasks
    }
    keys = {task.id: _key(task, proposals[task.id], config) for task in tasks}
    missing = [task for task in tasks if known.get(task.id, {}).get("key") != keys[task.id]]
    if missing:
        with concurrent.futures.ThreadPoolExecutor(config.workers) as executor:
            found = executor.map(
                lambda task: _examine(task, proposals[task.id], config, pool), missing
            )
            known |= {
                task.id: {"key": keys[task.id], **entry}
                for task, entry in zip(missing, found, strict=True)
            }
        _write_cache(cache, known)
    kept = []
    failed = {}
    added = {}
    for task in tasks:
        entry = known[task.id]
        if entry["failure"]:
            failed[task.id] = entry["failure"]
            continue
        cases = tuple(
            Case(ast.literal_eval(arguments), ast.literal_eval(expected), tolerance)
            for arguments, expected, tolerance in entry["cases"]
        )
        hidden = Tests(cases=task.hidden_tests.cases + cases, code=task.hidden_tests.code)
        if not hidden:
            failed[task.id] = "no tests: the reference answers none of the inputs"
            continue
        added[task.id] = len(cases)
        kept.append(dataclasses.replace(task, hidden_tests=hidden))
    return Strengthened(tuple(kept), failed, added)


def _examine(
    task: Task, proposals: Sequence[tuple[Any, ...]], config: DifferentialConfig, pool: SandboxPool
) -> dict:
    """What the cache keeps of one task: why its reference fails ("" when it does not), and the
    cases as literals.
    """
    own = Tests(
        cases=task.visible_tests.cases + task.hidden_tests.cases,
        code=task.visible_tests.code + task.hidden_tests.code,
    )
    if own:
        marks = _grade(task, own, pool, config.timeout_s)
        if not all(marks.passed):
            i = marks.passed.index(False)
            return {
                "failure": f"test {i + 1} of {len(own)}: {marks.errors[i] or 'wrong value'}",
                "cases": [],
            }
    cases = reference_cases(task, proposals, pool, config.timeout_s) if proposals else []
    if config.cases:
        cases = choose(cases, config.cases)
    # with time to spare, so that a busy machine does not fail a solution that is as fast as the
    # reference
    if cases:
        marks = _grade(task, Tests(cases=tuple(cases)), pool, config.timeout_s / 2)
        cases = [case for case, passed in zip(cases, marks.passed, strict=True) if passed]
    return {
        "failure": "",
        "cases": [[repr(case.args), repr(case.expected), case.tolerance] for case in cases],
    }


def reference_cases(
    task: Task, proposals: Sequence[tuple[Any, ...]], pool: SandboxPool, timeout_s: float
) -> list[Case]:
    """A case for each proposal that the reference answers in time, twice alike, with a plain value
    of modest size.
    """
    try:
        other = {**task.reference, task.path: perturb(task.reference[task.path])}
    except SyntaxError:
        return []
    with pool.open(task.reference) as sandbox:
        first = _answers(sandbox, task, proposals, timeout_s)
    again = [arguments for arguments, _ in first]
    if not again:
        return []
    with pool.open(other) as sandbox:
        second = {
            repr(arguments): value for arguments, value in _answers(sandbox, task, again, timeout_s)
        }
    missing = object()
    tolerance = task.meta.get("tolerance", 0.0)
    return [
        Case(arguments, value, max(tolerance, FLOAT_TOLERANCE) if _has_float(value) else tolerance)
        for arguments, value in first
        if same(value, second.get(repr(arguments), missing))
        and _literal(value)
        and len(repr(value)) <= _LONGEST_VALUE
    ]


def _answers(
    sandbox: Sandbox, task: Task, proposals: Sequence[tuple[Any, ...]], timeout_s: float
) -> list[tuple[tuple[Any, ...], Any]]:
    """Arguments and value of every call that returned. A call that hangs is tried again, then its
    batch goes on.
    """
    answered: list[tuple[tuple[Any, ...], Any]] = []
    left = list(proposals)
    attempts = 0
    skipped = 0
    while left and skipped < _HANGS:
        results = sandbox.call(task.path, task.entry_point, left, timeout_s=timeout_s)
        hung = next((i for i, result in enumerate(results) if result.cause == "timeout"), len(left))
        answered += [
            (args, result.value)
            for args, result in zip(left[:hung], results[:hung], strict=True)
            if result.ok
        ]
        left = left[hung:]
        attempts = 1 if hung else attempts + 1
        if left and attempts == _ATTEMPTS:
            left = left[1:]
            attempts = 0
            skipped = skipped + 1
    return answered


def _grade(task: Task, tests: Tests, pool: SandboxPool, timeout_s: float) -> Grade:
    """The reference's grade; what times out is tried again, since a busy machine may be to
    blame.
    """
    for _ in range(_ATTEMPTS):
        marks = grade(task.path, task.entry_point, tests, task.reference, pool, timeout_s)
        if "timeout" not in marks.flags:
            break
    return marks


def choose(cases: Sequence[Case], count: int) -> list[Case]:
    """Up to ``count`` cases, taken in turn from those with each expected value, rarest value
    first.
    """
    by_value: dict[str, list[Case]] = collections.defaultdict(list)
    for case in cases:
        by_value[repr(case.expected)].append(case)
    queues = sorted(by_value.values(), key=len)
    chosen: list[Case] = []
    depth = 0
    while len(chosen) < min(count, len(cases)):
        chosen += [queue[depth] for queue in queues if len(queue) > depth]
        depth += 1
    return chosen[:count]


class _Sets(ast.NodeTransformer):
    """Writes set displays and comprehensions as calls of ``set``."""

    def visit_Set(self, node: ast.Set) -> ast.AST:
        self.generic_visit(node)
        return _call_set(ast.List(node.elts, ast.Load()))

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        self.generic_visit(node)
        return _call_set(ast.ListComp(node.elt, node.generators))


def _call_set(argument: ast.expr) -> ast.Call:
    return ast.Call(ast.Name("set", ast.Load()), [argument], [])


_PERTURBED = """\
import builtins as _builtins, random as _random
_random.seed("again")
def _reordered(base):
    class Reordered(base):
        def __iter__(self):
            return _builtins.reversed(_builtins.list(base.__iter__(self)))
    def wrapped(name):
        method = getattr(base, name)
        def operation(self, *others):
            value = method(self, *others)
            return Reordered(value) if isinstance(value, base) and value is not self else value
        return operation
    for name in ("__and__", "__or__", "__sub__", "__xor__", "__rand__", "__ror__", "__rsub__", "__rxor__", "union",
                 "intersection", "difference", "symmetric_difference", "copy"):
        setattr(Reordered, name, wrapped(name))
    if base is _builtins.set:
        Reordered.pop = lambda self: (lambda x: (base.remove(self, x), x)[1])(next(iter(self)))
    return Reordered
def _last_first(function):
    def chosen(*values, **options):
        if "key" in options and _builtins.len(values) == 1:
            values = (_builtins.list(values[0])[::-1],)
        return function(*values, **options)
    return chosen
min, max = _last_first(_builtins.min), _last_first(_builtins.max)
set, frozenset = _reordered(_builtins.set), _reordered(_builtins.frozenset)
"""


def perturb(source: str) -> str:
    """The module with sets walked backwards, the last of equals as ``max`` and ``min`` by a key,
    and another seed.

    Raises SyntaxError when the source does not parse.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        tree = _Sets().visit(ast.parse(source))
    future = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    tree.body = [n for n in tree.body if n not in future]
    header = "".join(f"{ast.unparse(n)}\n" for n in future)
    return f"{header}{_PERTURBED}{ast.unparse(ast.fix_missing_locations(tree))}\n"


def _has_float(value: Any) -> bool:
    if isinstance(value, list | tuple | set):
        return any(map(_has_float, value))
    if isinstance(value, dict):
        return any(map(_has_float, value.values()))
    return isinstance(value, float | complex)


def _literal(value: Any) -> bool:
    """Whether the value's repr reads back as the very same value."""
    try:
        return same(ast.literal_eval(repr(value)), value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False


def _key(task: Task, proposals: Sequence[tuple[Any, ...]], config: DifferentialConfig) -> str:
    """Digest of all that the entry depends on."""
    parts = (
        REVISION,
        sorted(task.reference.items()),
        task.path,
        task.entry_point,
        task.visible_tests,
        task.hidden_tests,
        task.meta.get("tolerance", 0.0),
        list(proposals),
        (config.cases, config.timeout_s),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _read_cache(cache: Path) -> dict[str, dict]:
    if not cache.exists():
        return {}
    try:
        return json.loads(cache.read_text())
    except ValueError as error:
        raise ValueError(
            f"{cache}: not a cache of differential tests ({error}); delete it to have it made"
        ) from error


def _write_cache(cache: Path, entries: Mapping[str, dict]) -> None:
    """Replaces the file in one step, so that a killed run leaves the old one."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    temporary = cache.with_name(f"{cache.name}.{secrets.token_hex(8)}")
    temporary.write_text(json.dumps(entries, sort_keys=True))
    temporary.replace(cache)
