"""Ids of the tests in a file, as pytest writes them, read from its text without running it.

Found are functions ``test*``, those of classes ``Test*``, and those of subclasses of a TestCase. A
test that is skipped always is left out. Ids of parametrised tests are known only to pytest.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from rl_code.text import python_source


class UnknownIds(ValueError):
    """A file whose ids cannot be read from its text; the message says why."""


def ids_of(files: Mapping[str, str]) -> tuple[str, ...]:
    """The ids in files of tests, path -> text. Raises UnknownIds."""
    found = tuple(id for path, text in sorted(files.items()) for id in _ids(path, text))
    if not found:
        raise UnknownIds(f"{', '.join(sorted(files)) or 'no file'} holds no tests of pytest")
    repeated = [id for i, id in enumerate(found) if id in found[:i]]
    if repeated:
        raise UnknownIds(f"the test {repeated[0]} stands twice in its file")
    return found


def _ids(path: str, text: str) -> Iterator[str]:
    try:
        yield from _ids_of(path, python_source.parse(text))
    except SyntaxError as error:
        raise UnknownIds(f"{path} is no Python: {error}") from error


def _ids_of(path: str, tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if name := _test_name(node, path):
            yield f"{path}::{name}"
        elif isinstance(node, ast.ClassDef) and _collected(node) and not _skipped(node):
            for inner in node.body:
                if name := _test_name(inner, path):
                    yield f"{path}::{node.name}::{name}"


def _test_name(node: ast.stmt, path: str) -> str:
    """The name of a test that runs; "" for any other statement. Raises UnknownIds."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    if not node.name.startswith("test") or _skipped(node):
        return ""
    if any("parametrize" in python_source.unparse(decorator) for decorator in node.decorator_list):
        raise UnknownIds(f"{path}: {node.name} is parametrised, so its ids are not in the text")
    return node.name


def _collected(node: ast.ClassDef) -> bool:
    """True if pytest looks for tests in a class."""
    bases = [python_source.unparse(base) for base in node.bases]
    return node.name.startswith("Test") or any(base.endswith("TestCase") for base in bases)


def _skipped(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    names = [
        python_source.unparse(decorator).partition("(")[0] for decorator in node.decorator_list
    ]
    return any(name.rpartition(".")[2] == "skip" for name in names)
