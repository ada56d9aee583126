"""Parts of test files: the functions that a task shows or hides, and what those need.

A test function is taken out as text, so what stays is as its authors wrote it. Tables and helpers
that no test uses any more go, too: what hidden tests expect may stand there.
"""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Iterator

from rl_code.text import python_source
from rl_code.text.lines import split_lines

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_BUILTIN = frozenset(dir(builtins))


def first_line(node: ast.AST) -> int:
    """The first line of a definition, which is that of its first decorator."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])  # ty: ignore[missing-attribute]


# Trees are read only.
parse = functools.lru_cache(64)(python_source.parse)


@functools.lru_cache(512)
def part(text: str, kept: frozenset[int]) -> str:
    """The test file with only those test functions whose first lines are ``kept``."""
    lines = split_lines(text, keepends=True)
    tree = parse(text)
    gone = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS)
        and node.name.startswith("test")
        and first_line(node) not in kept
    ]
    inner = {id(node) for function in gone for node in ast.walk(function) if node is not function}
    gone = [node for node in gone if id(node) not in inner]
    removed = {id(node) for node in gone}
    removed |= {id(node) for node in _unused(tree, removed)}
    for body in _bodies(tree):
        out = [node for node in body if id(node) in removed]
        for node in out:
            begin = first_line(node)
            indent = lines[begin - 1][: node.col_offset] if len(out) == len(body) else ""
            first = f"{indent}pass\n" if indent and node is out[0] else ""
            lines[begin - 1 : node.end_lineno] = [first] + [""] * (node.end_lineno - begin)
    return _no_gaps("".join(lines))


def shared_tables(text: str, one: frozenset[int], other: frozenset[int]) -> set[str]:
    """Names of data at the top of a file that test functions of both kinds use."""
    return _tables(text, one) & _tables(text, other)


@functools.lru_cache(64)
def bodies(text: str) -> dict[int, str]:
    """Dumped bodies of test functions, without their names, by the first line of each."""
    found = {}
    for node in ast.walk(parse(text)):
        if isinstance(node, _FUNCTIONS):
            found[first_line(node)] = "\n".join(ast.dump(statement) for statement in node.body)
    return found


def _tables(text: str, kept: frozenset[int]) -> set[str]:
    """Names of containers at the top of the part of a file that has these test functions."""
    tree = parse(part(text, kept))
    found: set[str] = set()
    for node in tree.body:
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
            value, ast.List | ast.Tuple | ast.Dict | ast.Set | ast.ListComp | ast.DictComp
        ):
            found |= _defined(node)
    return found


def _bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list) and body:
                yield body


def _unused(tree: ast.Module, removed: set[int]) -> list[ast.stmt]:
    """Definitions and assignments at the top of a file that nothing that stays uses."""
    waiting = [node for node in tree.body if id(node) not in removed]
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    used: set[str] = set()
    while True:
        taken = [
            node
            for node in waiting
            if not _optional(node, removed, classes) or _defined(node) & used
        ]
        if not taken:
            return waiting
        waiting = [node for node in waiting if node not in taken]
        for node in taken:
            used |= _names(node, removed)


def _optional(node: ast.stmt, removed: set[int], classes: set[str]) -> bool:
    """True if a statement at the top of a file is of use only to statements that name it.

    classes: of the file. One that inherits from another one of them runs the tests of that; what it
    inherits from elsewhere is no test of the file.
    """
    if isinstance(node, ast.ClassDef):
        inherits = any(isinstance(base, ast.Name) and base.id in classes for base in node.bases)
        return not inherits and not any(
            isinstance(one, _FUNCTIONS) and one.name.startswith("test") and id(one) not in removed
            for one in ast.walk(node)
        )
    if isinstance(node, _FUNCTIONS):
        automatic = any("autouse" in ast.unparse(one) for one in node.decorator_list)
        return not automatic and not node.name.startswith(("test", "setup", "teardown", "pytest_"))
    if isinstance(node, ast.Assign | ast.AnnAssign):
        names = _defined(node)
        return bool(names) and not any(name.startswith(("pytest", "__")) for name in names)
    return False


def _defined(node: ast.stmt) -> set[str]:
    """The names that a definition or an assignment to plain names gives."""
    if isinstance(node, _DEFINITIONS):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names: set[str] = set()
    for target in targets:
        for one in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            if not isinstance(one, ast.Name):
                return set()
            names.add(one.id)
    return names


def _names(node: ast.AST, removed: set[int]) -> set[str]:
    """All that a statement names: variables, fixtures (parameters), and fixtures in strings."""
    found: set[str] = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if id(node) in removed:
            continue
        match node:
            case ast.Name(id=name) | ast.arg(arg=name):
                found.add(name)
            case ast.Constant(value=str(text)) if text.isidentifier():
                found.add(text)
        waiting += ast.iter_child_nodes(node)
    return found - _BUILTIN


def _no_gaps(text: str) -> str:
    """The text with at most two blank lines in a row."""
    lines: list[str] = []
    for line in split_lines(text, keepends=True):
        if line.strip() or any(one.strip() for one in lines[-2:]):
            lines.append(line)
    return "".join(lines).rstrip("\n") + "\n"
