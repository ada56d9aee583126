"""Guards of a task: which hidden tests are paid only for what they ask for, and what is left open.

Cases and statements are graded where expected values are out of reach. A test of a suite is guarded
by a canary that only the right value tells from it, or by a value (``docs/redteam.md``). Beside
them the work may change what tests rely on: files of data that they read outside the folders of
tests, and helpers of the package that assert for them.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from absl import logging

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.script_grader import script_guarded
from rl_code.environment.suite_grader import unguarded
from rl_code.environment.suites.applied import Base, Protected
from rl_code.environment.suites.canaries import function_of
from rl_code.environment.suites.sites import name_of
from rl_code.environment.suites.source import source_of
from rl_code.environment.suites.values import files_of, imports
from rl_code.store.serialization import dumps
from rl_code.tasks.cache import GUARDS, Cache
from rl_code.types import Suite, Task

# Of what is kept of a task in a workdir.
_REVISION = 1
_SHOWN = 3
_LONGEST_PATH = 300
# Names of functions that assert for a test.
_HELPER = re.compile(r"_?(assert|check|verify|expect)(_|[A-Z]|$)")
# Functions whose first argument is a path.
_OPENS = {"open", "Path", "read_text", "read_bytes", "loadtxt", "read_csv", "load"}


@dataclasses.dataclass(frozen=True)
class Guards:
    """Guards of a task's hidden tests against forged results."""

    # Number of hidden tests that must fail before the work, and number of those that are guarded.
    required: int = 0
    guarded: int = 0
    # Reason why the task can be forged without a guess; "" for a task that cannot.
    problem: str = ""


def guards_of(task: Task, pool: SandboxPool) -> Guards:
    """The guards of a task. Raises SandboxFault."""
    hidden = task.hidden_tests
    others = len(hidden.cases) + len(hidden.code)
    suite, script = hidden.suite, hidden.script
    open_tests: list[str] = []
    problems: list[str] = []
    required = others
    if suite is not None:
        open_tests += unguarded(task, suite, pool)
        required += len(suite.fail_to_pass)
        problems += exposed(task, suite, pool)
    if script is not None:
        open_tests += [] if script_guarded(task, script) else [script.program]
        required += 1
    if open_tests and len(open_tests) == required:
        problems.insert(0, f"no canary and no value for {some(open_tests)}")
    return Guards(required, required - len(open_tests), "; ".join(problems))


def exposed(task: Task, suite: Suite, pool: SandboxPool) -> list[str]:
    """List what the tests that must fail before the work rely on, and the work may change. Raises
    SandboxFault.
    """
    functions: dict[str, set[tuple[str, ...]]] = {}
    for one in suite.fail_to_pass:
        path, names = function_of(one)
        functions.setdefault(path, set()).add(names)
    data: dict[str, None] = {}
    helpers: dict[str, None] = {}
    with contextlib.closing(Base(task, pool)) as base:
        protected = Protected(task, suite, {}, base)
        own = {path for path, text in suite.files.items() if text is not None}
        paths = (base.paths() | task.files.keys()) - own
        for path, names in functions.items():
            source = source_of(suite.files.get(path) or base.text(path))
            if source is None:
                continue
            nodes = [node for one in names if (node := source.function(one)) is not None]
            for read in _data(source.tree, paths):
                if read not in protected:
                    data[read] = None
            for name, module in _helpers(source.tree, nodes, paths):
                if module not in protected:
                    helpers[f"{name} of {module}"] = None
    read, asserting = some([*data]), some([*helpers])
    return [
        *([f"its tests read {read}, which the work may change"] if data else []),
        *([f"its tests assert by {asserting}, which the work may change"] if helpers else []),
    ]


def _data(tree: ast.Module, paths: Collection[str]) -> Iterator[str]:
    """Files of the repository, modules left out, whose paths a file of tests names."""
    files = [path for path in paths if not path.endswith(".py")]
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(_, ast.Div(), ast.Constant(str(last))):
                named = posixpath.join(*_joined(node.left), last)
                if "/" not in named or named.startswith("/"):
                    continue
            case ast.Call(function, [ast.Constant(str()), *_] as parts) if (
                name_of(function) in _OPENS
            ):
                named = posixpath.join(*_texts(parts[:1]))
            case ast.Call(function, parts) if name_of(function) == "join":
                named = posixpath.join("", *_texts(parts))
            case ast.Constant(str(text)) if "/" in text:
                named = text
            case _:
                continue
        named = posixpath.normpath(named).lstrip("./") if len(named) < _LONGEST_PATH else ""
        yield from (path for path in files if named and (path == named or _ends(path, named)))


def _ends(path: str, named: str) -> bool:
    """True if a path ends in another path, which has at least two parts."""
    return "/" in named and path.endswith(f"/{named}")


def _joined(node: ast.expr) -> list[str]:
    """The texts at the end of a path that is made by ``/``."""
    match node:
        case ast.BinOp(left, ast.Div(), ast.Constant(str(last))):
            return [*_joined(left), last]
        case ast.Constant(str(last)):
            return [last]
        case ast.Name(name) if name.startswith("tmp"):  # what a test makes itself
            return ["/"]
    return [""]


def _texts(parts: Iterable[ast.expr]) -> list[str]:
    return [one.value for one in parts if isinstance(one, ast.Constant) and type(one.value) is str]


def _helpers(
    tree: ast.Module, functions: Iterable[ast.FunctionDef], paths: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Functions of the repository that assert for tests, and the files of their modules."""
    bound = imports(ast.walk(tree))
    for function in functions:
        for node in ast.walk(function):
            match node:
                case ast.Expr(ast.Call(ast.Name(name))):
                    known = bound.get(name)
                case ast.Expr(ast.Call(ast.Attribute(outer, name))):
                    known = bound.get(ast.unparse(outer))
                case _:
                    continue
            if known and _HELPER.match(name):
                # what is imported may be a module itself
                places = [*files_of(".".join(filter(None, known))), *files_of(known[0])]
                if file := next((place for place in places if place in paths), ""):
                    yield name, file


def some(names: Sequence[str]) -> str:
    """The first names of many."""
    shown = ", ".join(name[:100] for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def kept(tasks: Iterable[Task], pool: SandboxPool, workdir: Path) -> Iterator[Task]:
    """The tasks that cannot be forged without a guess, as they come; the others are counted in the
    log. Raises SandboxFault.

    workdir: the folder that keeps why, since each look takes a sandbox.
    """
    cache: Cache | None = None
    left: list[str] = []
    seen = 0
    for task in tasks:
        seen += 1
        if task.hidden_tests.suite is not None or task.hidden_tests.script is not None:
            cache = cache or Cache(workdir / GUARDS)
            key = hashlib.sha256(dumps((_REVISION, task))).hexdigest()
            problem = cache.get(key)
            if problem is None:
                problem = guards_of(task, pool).problem
                cache.put({key: problem})
            if problem:
                left.append(f"{task.id} ({problem})")
                continue
        yield task
    if left:
        logging.warning(
            "left out %d of %d tasks, whose results can be forged without a guess: %s. "
            "config.train.forgeable=True trains on them",
            *(len(left), seen, some(left)),
        )
