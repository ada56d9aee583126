"""Ids of tests as unittest prints them, put as pytest writes them.

    test_lookup (lookup.tests.LookupTests)              ->  tests/lookup/tests.py::
    test_lookup (lookup.tests.LookupTests.test_lookup)        LookupTests::test_lookup

The second is that of Python 3.11 and later. Rows of SWE-bench have them where a repository has a
runner of its own, as Django does. The module is looked for in the repository and in its folder
``tests``, from which such runners import.

A test with a docstring is printed on two lines, and the rows may hold the second one: the first
line of the docstring. It names the one test that has it, in the files of tests and in the modules
that other ids of the row name.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from rl_code.tasks.source import NoTask
from rl_code.text import python_source

_ID = re.compile(r"(\w+) \((\w+(?:\.\w+)+)\)")
# Where runners import modules from, as prefixes of paths.
_ROOTS = ("", "tests/")
# Characters of an id that an error repeats.
_WIDTH = 80


class ForeignId(NoTask):
    """An id by which pytest cannot be asked for a test; the message says why."""

    reason = "names tests by ids that pytest does not have"


class UnittestIds:
    """Finds pytest's ids in one version of a repository.

    text_of: the text of a file by its path; None where there is none. files: path -> text of the
    files of tests. ids: all ids of the row.
    """

    def __init__(
        self,
        text_of: Callable[[str], str | None],
        files: Mapping[str, str | None],
        ids: Iterable[str],
    ):
        self._text_of = functools.cache(text_of)
        self._ids = ids
        self._tests = files
        # A row has hundreds of ids of a few modules.
        self._files = functools.cache(self._find_files)

    def find(self, id: str) -> str:
        """The id as pytest writes it. Raises ForeignId."""
        shown = repr(id[:_WIDTH])
        matched = _ID.fullmatch(id)
        if matched is None:
            described = self._described.get(id.strip(), [])
            if len(described) == 1:
                return described[0]
            raise ForeignId(
                f"{shown} is a description of a test and not its id: unittest prints the first "
                f"line of a docstring, which {len(described)} tests have"
            )
        name, place = matched.groups()
        module, _, owner = place.removesuffix(f".{name}").rpartition(".")
        if not name.startswith("test"):
            raise ForeignId(f"{shown} is a step around tests and no test")
        files = self._files(module)
        if not files:
            paths = " nor ".join(_paths(module))
            raise ForeignId(f"{shown}: the repository has neither {paths}")
        holding = [path for path, classes in files.items() if owner in classes]
        if len(holding) != 1:
            which = " and ".join(holding or files)
            count = "both have" if holding else "has no"
            raise ForeignId(f"{shown}: {which} {count} class {owner}")
        return f"{holding[0]}::{owner}::{name}"

    @functools.cached_property
    def _described(self) -> dict[str, list[str]]:
        """First line of a docstring -> ids of the tests that have it."""
        found: dict[str, list[str]] = {}
        named = [matched[2] for matched in map(_ID.fullmatch, self._ids) if matched]
        modules = [".".join(place.split(".")[:count]) for place in named for count in (-1, -2)]
        paths = [*self._tests, *(path for module in modules for path in _paths(module))]
        for path in dict.fromkeys(paths):
            for line, name in _docstrings(self._text_of(path) or ""):
                found.setdefault(line, []).append(f"{path}::{name}")
        return found

    def _find_files(self, module: str) -> dict[str, set[str]]:
        """The files that may be a module, path -> names of the classes in it."""
        texts = {path: self._text_of(path) for path in _paths(module)}
        return {path: _classes(text) for path, text in texts.items() if text is not None}


def _paths(module: str) -> list[str]:
    return [f"{root}{module.replace('.', '/')}.py" for root in _ROOTS]


def _docstrings(text: str) -> Iterator[tuple[str, str]]:
    """First line of the docstring of each test of a module, and the test's class and name."""
    try:
        tree = python_source.parse(text)
    except SyntaxError:
        return
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                line, _, _ = (ast.get_docstring(node, clean=False) or "").strip().partition("\n")
                if line.strip():
                    yield line.strip(), f"{owner.name}::{node.name}"


def _classes(text: str) -> set[str]:
    """Names of the classes of a module; none for what is no Python."""
    try:
        nodes = ast.walk(python_source.parse(text))
        return {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    except SyntaxError:
        return set()
