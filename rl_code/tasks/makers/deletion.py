"""Feature deletion: a tested function, method or class is taken out, to be written again.

It is removed with its decorators and comments in it. Where the package or its tests cannot be
imported without it, it is emptied instead: signatures stay, and bodies raise NotImplementedError.
"""

from __future__ import annotations

import ast
import itertools
import textwrap
from collections.abc import Iterator

from rl_code.tasks.makers import testfiles
from rl_code.tasks.makers.candidate import Candidate, Change
from rl_code.tasks.makers.package import Package
from rl_code.tasks.makers.survey import Function, Survey
from rl_code.text.lines import split_lines

# Statements of a body, besides its docstring, from which a function is worth writing, and lines
# beyond which a function or class is too much.
_LEAST = 2
_MOST_LINES = 120
# Test functions that a class needs.
_CLASS_TESTS = 2
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def candidates(package: Package, survey: Survey) -> Iterator[tuple[Candidate, Candidate]]:
    """Yield two candidates for each definition that can be taken out: removed, and emptied."""
    for function in (*survey.functions, *survey.classes):
        text = package.sources[function.path]
        tree = testfiles.parse(text)
        body, node = _find(tree, function)
        if not _worth(function, node):
            continue
        lines = split_lines(text, keepends=True)
        told = _told(lines, node)
        kind = "class" if isinstance(node, ast.ClassDef) else "method"
        kind = kind if "." in function.qualname or kind == "class" else "function"
        removed = _removed(function, lines, node, alone=len(body) == 1)
        emptied = _emptied(function, lines, node)
        yield (
            Candidate("removed", (kind,), (function,), (removed,), told),
            Candidate("emptied", (kind,), (function,), (emptied,), told),
        )


def _find(tree: ast.Module, function: Function) -> tuple[list[ast.stmt], _Definition]:
    """The definition of a function or class, and the body that it stands in."""
    body: list[ast.stmt] = tree.body
    *outer, last = function.qualname.split(".")
    for name in outer:
        body = next(
            node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name
        )
    definitions = (*_FUNCTIONS, ast.ClassDef)
    return body, next(node for node in body if isinstance(node, definitions) and node.name == last)


def _worth(function: Function, node: _Definition) -> bool:
    """True if a definition is worth a task of its own."""
    if node.name.startswith("_") or function.end - function.line >= _MOST_LINES:
        return False
    if isinstance(node, ast.ClassDef):
        methods = [one for one in node.body if isinstance(one, _FUNCTIONS)]
        return len(methods) >= _LEAST and len(function.tests) >= _CLASS_TESTS
    return len(_code(node)) >= _LEAST and node.body[0].lineno > node.lineno


def _code(node: ast.FunctionDef) -> list[ast.AST]:
    """The statements of a function, however deep, without its docstring."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return [one for statement in body for one in ast.walk(statement) if isinstance(one, ast.stmt)]


def _removed(function: Function, lines: list[str], node: ast.stmt, *, alone: bool) -> Change:
    """Takes out the definition and the blank lines after it."""
    end = function.end
    while end < len(lines) and not lines[end].strip():
        end += 1
    new = (f"{' ' * node.col_offset}pass\n",) if alone else ()
    return Change(function.path, function.line, tuple(lines[function.line - 1 : end]), new)


def _emptied(function: Function, lines: list[str], node: ast.stmt) -> Change:
    """Keeps signatures, and takes out what they do and say."""
    old = lines[function.line - 1 : function.end]
    new = list(old)
    for one in _inner(node):
        if one.body[0].lineno == one.lineno:
            continue  # all on one line
        begin = testfiles.first_line(one.body[0]) - function.line
        begin = _without_comments(old, begin)
        raised = f"{' ' * one.body[0].col_offset}raise NotImplementedError\n"
        length = one.end_lineno - function.line + 1 - begin
        new[begin : begin + length] = [raised] + [""] * (length - 1)
    if isinstance(node, ast.ClassDef) and ast.get_docstring(node) is not None:
        first = node.body[0].lineno - function.line
        last = node.body[0].end_lineno - function.line
        new[first : last + 1] = [""] * (last + 1 - first)
    return Change(function.path, function.line, tuple(old), tuple(line for line in new if line))


def _without_comments(lines: list[str], begin: int) -> int:
    """The first of the comments right above line ``begin``."""
    while lines[begin - 1].lstrip().startswith("#"):
        begin -= 1
    return begin


def _inner(node: ast.stmt) -> list[ast.FunctionDef]:
    """The functions to empty: itself, or a class's methods."""
    if isinstance(node, ast.ClassDef):
        return [one for child in node.body for one in _inner(child)]
    return [node] if isinstance(node, _FUNCTIONS) else []


def _told(lines: list[str], node: ast.stmt) -> dict[str, str]:
    """Signature and documentation, for the task's text."""
    signature = _signature(lines, node)
    if isinstance(node, ast.ClassDef):
        for method in node.body:
            if isinstance(method, _FUNCTIONS):
                first = (ast.get_docstring(method) or "").strip().partition("\n\n")[0]
                own = _signature(lines, method).rstrip("\n") + "\n"
                note = f'    """{" ".join(first.split())}"""\n' if first else ""
                signature += "\n" + textwrap.indent(own + note, "    ")
    return {"signature": signature, "documentation": ast.get_docstring(node) or ""}


def _signature(lines: list[str], node: ast.FunctionDef | ast.ClassDef) -> str:
    """The lines of a definition before its body, from the left margin."""
    begin = testfiles.first_line(node)
    end = testfiles.first_line(node.body[0])
    if end <= node.lineno:
        return lines[node.lineno - 1].strip() + "\n"
    found = [
        line
        for line in itertools.islice(lines, begin - 1, end - 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    return textwrap.dedent("".join(found))
