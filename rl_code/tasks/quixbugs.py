"""QuixBugs (Lin et al. 2017): one-line bugs in classic algorithms, from a checkout.

    python_programs/<name>.py           broken, with a docstring
    correct_python_programs/<name>.py   the reference
    json_testcases/<name>.json          a line [arguments, expected] for each test
    python_testcases/test_<name>.py     tests on graphs and nodes, which JSON cannot hold

Programs with tests in JSON are graded by the split grader: lists, tuples and generators of equal
items count as equal, and numbers may differ by the tolerance that the program itself is given, or
by 1e-6. Programs on nodes are graded by pytest, so they need packages.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.pytest_ids import UnknownIds, ids_of
from rl_code.tasks.row_files import TaskFileError
from rl_code.tasks.source import NoTask, SourceOfWorlds, read_text, store_of
from rl_code.tasks.worlds import NoWorld, Places
from rl_code.text.lines import split_lines
from rl_code.types import Suite, Task, Tests, World

_PROGRAMS = "python_programs"
_CORRECT = "correct_python_programs"
# What tests in JSON compare by. It runs in the trusted process of the tests.
_EQUAL = """
def same(value, expected, tolerance):
    if not isinstance(value, (str, int, float, bool, dict, type(None))):
        value = list(value)
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(same(a, b, tolerance) for a, b in zip(value, expected))
        )
    if isinstance(expected, float) and isinstance(value, (int, float)):
        return abs(value - expected) <= tolerance
    return value == expected
"""
_TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True)
class QuixBugs(SourceOfWorlds):
    """QuixBugs, which is a test split, see ``quixbugs``."""

    # The checkout.
    path: str = dataclasses.field(kw_only=True)
    # Packages of the programs on nodes; pytest must be among them.
    places: Places = Places()
    # Command that starts pytest in the workspace.
    command: tuple[str, ...] = Suite.command

    refusals = (NoTask, NoWorld, UnknownIds)

    def count(self) -> int:
        return len(self._programs())

    def builders(
        self, pool: SandboxPool | None, workdir: Path | None
    ) -> Iterator[tuple[str, Callable[[], Task]]]:
        for name in self._programs():
            yield f"quixbugs/{name}", functools.partial(self._task, name, pool)

    def _programs(self) -> list[str]:
        root = Path(self.path)
        names = sorted(path.stem for path in (root / _PROGRAMS).glob("*.py"))
        # what programs import, and tests that stand among them
        names = [name for name in names if name != "node" and not name.endswith("_test")]
        names = [name for name in names if name != "__init__"]
        if not names:
            raise TaskFileError(f"{root}: no checkout of QuixBugs: it has no {_PROGRAMS}/*.py")
        return names

    def _task(self, name: str, pool: SandboxPool | None) -> Task:
        """The task of a program. Raises NoTask, NoWorld, UnknownIds."""
        root = Path(self.path)
        broken = read_text(root / _PROGRAMS / f"{name}.py")
        correct = read_text(root / _CORRECT / f"{name}.py")
        path = f"{_PROGRAMS}/{name}.py"
        files = {path: broken}
        cases = root / "json_testcases" / f"{name}.json"
        world = None
        if cases.is_file():
            hidden = Tests(code=tuple(_statements(name, cases)))
        else:
            hidden, helpers = self._suite(root, name)
            files |= helpers
            world = self._world(store_of(pool, "quixbugs"))
        asked = (
            f"The program {path} has a bug on one line. Find it, mend it in that file, and call "
            f"submit.\n\n```python\n{broken.strip()}\n```"
        )
        return Task(
            id=f"quixbugs/{name}",
            messages=({"role": "user", "content": asked},),
            files=files,
            path=path,
            entry_point=name if cases.is_file() else "",
            visible_tests=Tests(),
            hidden_tests=hidden,
            reference={path: correct},
            meta={"source": "quixbugs", "split": "test", "description": _words(name, broken)},
            world=world,
        )

    def _world(self, store: LayerStore) -> World | None:
        layers = self.places.package_layers(store)
        if not layers:
            raise NoTask("its tests are run by pytest: name packages with it in places.packages")
        return World(layers)

    def _suite(self, root: Path, name: str) -> tuple[Tests, dict[str, str]]:
        """The tests of a program on nodes, and the files beside it that they import."""
        test = root / "python_testcases" / f"test_{name}.py"
        if not test.is_file():
            raise NoTask(f"it has neither json_testcases/{name}.json nor {test.name}")
        tests = {test.relative_to(root).as_posix(): read_text(test)}
        files: dict[str, str | None] = {**tests}
        for path in (root / "conftest.py", root / "python_testcases" / "node.py"):
            if path.is_file():
                files[path.relative_to(root).as_posix()] = read_text(path)
        helpers = {
            f"{_PROGRAMS}/{path.name}": read_text(path)
            for path in (root / _PROGRAMS).glob("*.py")
            if path.stem in ("node", "__init__")
        }
        return Tests(suite=Suite(files, ids_of(tests), (), self.command)), helpers


def _statements(name: str, path: Path) -> Iterator[str]:
    """A test for each line of a file. Raises NoTask."""
    for number, line in enumerate(split_lines(read_text(path)), start=1):
        if not line.strip():
            continue
        try:
            arguments, expected = json.loads(line)
        except (ValueError, TypeError) as error:
            raise NoTask(
                f"{path.name}, line {number}: no [arguments, expected]: {error}"
            ) from error
        arguments = arguments if isinstance(arguments, list) else [arguments]
        shown = ", ".join(map(repr, arguments))
        tolerance = _tolerance(arguments)
        yield f"{_EQUAL}\nassert same({name}({shown}), {expected!r}, {tolerance!r})"


def _tolerance(arguments: list[Any]) -> float:
    """Tolerance for a number: a small last argument, as in ``sqrt(x, epsilon)``, or the default."""
    last = arguments[-1] if arguments else None
    return last if isinstance(last, float) and 0 < last < 1 else _TOLERANCE


def _words(name: str, text: str) -> str:
    """Description of a program: its name, its docstring, and texts that stand behind it."""
    try:
        texts = [
            node.value.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ]
    except SyntaxError:
        texts = []
    return " ".join([name.replace("_", " "), *texts]).strip()
