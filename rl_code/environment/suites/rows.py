"""Rows of ``pytest.mark.parametrize``: the arguments of each test that a function makes.

A suite names its tests by ids, in which pytest writes the row: numbers and texts as they are, other
values by the argument's name and the number of the row. An id stands for a row if no other row of
the function would have the same one.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from rl_code.environment.suites.literals import is_literal
from rl_code.environment.suites.sites import assigned, name_of
from rl_code.environment.suites.source import SuiteFile

# Rows of a function, with those of several decorators multiplied, that are looked at.
_MOST = 2000


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table."""

    element: ast.expr
    # Its part of an id; None where that is not known.
    label: str | None
    # Argument -> value; None for a row that is marked, or holds something else than plain values.
    values: Mapping[str, ast.expr] | None


def rows(
    source: SuiteFile, node: ast.FunctionDef, ids: Sequence[str]
) -> dict[str, dict[str, ast.expr]]:
    """Id -> argument -> value, of those of a function's tests whose arguments are known.

    An empty row for a function without arguments. Nothing where other things give arguments, and no
    id that may stand for several rows.
    """
    given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    arguments = [argument.arg for argument in given if argument.arg != "self"]
    if not node.decorator_list:
        return {} if arguments or len(ids) != 1 else {ids[0]: {}}
    # pytest begins an id with the decorator that stands nearest to the function
    tables = [_table(source, one) for one in reversed(node.decorator_list)]
    if not all(tables) or math.prod(map(len, tables)) > _MOST:
        return {}
    known: dict[str, list[dict[str, ast.expr]]] = {}
    for chosen in itertools.product(*tables):
        row: dict[str, ast.expr] = {}
        for one in chosen:
            if one.label is None:  # it may have any id
                return {}
            row |= one.values or {}
        known.setdefault("-".join(one.label or "" for one in chosen), []).append(row)
    found = {}
    for one in ids:
        same = known.get(one.partition("[")[2].removesuffix("]"), [])
        if len(same) == 1 and sorted(same[0]) == sorted(arguments):
            found[one] = same[0]
    return found


def _table(source: SuiteFile, decorator: ast.expr) -> list[Row]:
    """The rows of a decorator; none for one that is no ``parametrize`` written out."""
    match decorator:
        case ast.Call(made, [asked, table], more) if name_of(made) == "parametrize":
            labels = _labels(more)
        case _:
            return []
    match asked:
        case ast.Constant(str(text)):
            names = [name.strip() for name in text.split(",") if name.strip()]
            single = "," not in text
        case ast.List(parts) | ast.Tuple(parts) if all(map(_is_text, parts)):
            names = [str(ast.literal_eval(one)) for one in parts]
            single = False
        case _:
            return []
    if isinstance(table, ast.Name):
        table = assigned(source.tree.body, table.id) or table
    if not isinstance(table, ast.List | ast.Tuple) or labels is None:
        return []
    if labels and len(labels) != len(table.elts):
        return []
    return [
        _row(names, element, number, labels[number] if labels else None, single=single)
        for number, element in enumerate(table.elts)
    ]


def table_of(source: SuiteFile, node: ast.FunctionDef) -> tuple[ast.expr, list[Row]] | None:
    """The table of a function that has one, written in its only decorator, and nothing of ids."""
    match node.decorator_list:
        case [ast.Call(_, [_, ast.List() | ast.Tuple() as table], []) as decorator]:
            found = _table(source, decorator)
            return (table, found) if found else None
    return None


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _labels(more: Sequence[ast.keyword]) -> list[str] | None:
    """Value of ``ids``, [] where there is none; None for what is not known."""
    match more:
        case []:
            return []
        case [ast.keyword("ids", ast.List(parts) | ast.Tuple(parts))] if all(map(_is_text, parts)):
            return [_escaped(ast.literal_eval(one)) for one in parts]
    return None


def _row(
    names: Sequence[str], element: ast.expr, number: int, label: str | None, *, single: bool
) -> Row:
    """A row as it is written, or in ``pytest.param``."""
    cells: Sequence[ast.expr] = ()
    marked = False
    match element:
        case ast.Call(made, cells, more) if name_of(made) == "param":
            for keyword in more:
                if keyword.arg == "id" and _is_text(keyword.value):
                    label = _escaped(ast.literal_eval(keyword.value))
                else:
                    marked = True
        case _ if single:
            cells = [element]
        case ast.List(cells) | ast.Tuple(cells):
            pass
    if len(cells) != len(names) or any(isinstance(cell, ast.Starred) for cell in cells):
        return Row(element, label, None)
    if label is None:
        parts = [part_of(name, cell, number) for name, cell in zip(names, cells, strict=True)]
        label = None if None in parts else "-".join(map(str, parts))
    plain = not marked and all(map(is_literal, cells))
    return Row(element, label, dict(zip(names, cells, strict=True)) if plain else None)


def part_of(name: str, cell: ast.expr, number: int) -> str | None:
    """Text of a value in an id; None where that is not known."""
    if not is_literal(cell):
        return None
    value = ast.literal_eval(cell)
    if isinstance(value, str):
        return _escaped(value)
    if value is None or isinstance(value, bool | int | float | complex):
        return str(value)
    return None if isinstance(value, bytes) else f"{name}{number}"


def _escaped(text: str) -> str:
    """A text as pytest writes it in an id."""
    return text.encode("unicode_escape").decode("ascii")
