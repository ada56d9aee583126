"""Canaries of rows of ``parametrize``: another expected value in a row, and nothing else.

``@parametrize("price, left", [(100, 90), (10, 9)])`` above ``assert discount(price) == left``: the
row ``(10, 9)`` is taken out of the table and stands in copies of the function, each with a table of
this row alone, in one of them as it was and in the others with another value for ``left``. So all
copies look alike, and the function itself says nothing of the row any more. Several rows of a table
have copies of their own. The other rows run where they did, under their own ids.

Alone (``canaries.draw_alone``), the value is changed in the table, where it stands.
"""

from __future__ import annotations

import ast
import dataclasses
import random
from collections.abc import Iterator, Sequence

from rl_code.environment.suites.alike import Look
from rl_code.environment.suites.literals import other_values
from rl_code.environment.suites.rows import Row, part_of, table_of
from rl_code.environment.suites.sites import tail_of
from rl_code.environment.suites.source import Site, SuiteFile
from rl_code.text import python_source

# The id of the row in a table of one.
LABEL = "row"


@dataclasses.dataclass(frozen=True)
class RowSite:
    """A place in a row where what a test expects can be changed so that it must fail."""

    site: Site
    table: ast.expr
    row: Row
    number: int
    # Parts of ids that the other rows have.
    taken: frozenset[str]


def row_sites(
    source: SuiteFile, node: ast.FunctionDef, test: str, rng: random.Random
) -> list[RowSite]:
    """Places in the row of a test, by its id, of a function that can be copied."""
    found = table_of(source, node)
    if found is None:
        return []
    table, all_rows = found
    label = test.partition("[")[2].removesuffix("]")
    same = [number for number, row in enumerate(all_rows) if row.label == label]
    if len(same) != 1 or any(row.label is None for row in all_rows):
        return []
    row = all_rows[same[0]]
    if row.values is None or isinstance(row.element, ast.Call):
        return []
    # another value must be like the real one beside what a copy shows: this row, and no other
    shown = _with_table(source, node, table, source.data[slice(*source.span(row.element))])
    asked = _expected(source, node, row, Look(shown.decode(), source.tokens), rng)
    taken = frozenset(str(other.label) for other in all_rows if other is not row)
    return [RowSite(site, table, row, same[0], taken) for site in asked]


def _expected(
    source: SuiteFile, node: ast.FunctionDef, row: Row, look: Look, rng: random.Random
) -> Iterator[Site]:
    """Other values of what an assertion at the end of the test compares with, and nothing else
    reads. look: of a copy.
    """
    values = row.values or {}
    finder = tail_of(source, node, rng)
    names = [one.id for inner in node.body for one in ast.walk(inner) if isinstance(one, ast.Name)]
    for statement in finder.tail(node.body):
        match statement:
            case ast.Assert(ast.Compare(left, [ast.Eq()], [right])):
                sides = (right, left)
            case ast.Expr(ast.Call(ast.Attribute(_, "assertEqual"), [left, right])):
                sides = (right, left)
            case _:
                continue
        for side, other in (sides, sides[::-1]):
            match side:
                case ast.Name(name) if name in values and names.count(name) == 1:
                    if isinstance(other, ast.Name | ast.Constant) or _is_read(source, name):
                        continue
                    found = other_values(source, values[name], rng, look)
                    yield from (site for site in found if not site.told and len(site.others) > 1)


def _is_read(source: SuiteFile, name: str) -> bool:
    """True if a fixture of the file asks for an argument: then its value is not only expected."""
    return any(
        argument.arg == name
        for one in ast.walk(source.tree)
        if isinstance(one, ast.FunctionDef)
        and any("fixture" in ast.unparse(decorator) for decorator in one.decorator_list)
        for argument in one.args.args
    )


def texts_in_place(
    source: SuiteFile, node: ast.FunctionDef, one: RowSite
) -> dict[str, tuple[bytes, str]]:
    """Other text of a row -> the text of its function with it, and the row's part of the id there;
    without those that would not have an id of their own.
    """
    start, end = source.lines(node)
    data, site = source.data, one.site
    found = {}
    for text in site.others:
        label = _label(source, one, text)
        if label is not None and label not in one.taken:
            found[text] = (data[start : site.start] + text.encode() + data[site.end : end], label)
    return found


def _label(source: SuiteFile, one: RowSite, text: str) -> str | None:
    """The row's part of an id with another text at the site; None where that is not known."""
    data, site = source.data, one.site
    parts = []
    for name, cell in (one.row.values or {}).items():
        start, end = source.span(cell)
        if start <= site.start and site.end <= end:
            changed = data[start : site.start] + text.encode() + data[site.end : end]
            (statement,) = python_source.parse(f"({changed.decode()})").body
            assert isinstance(statement, ast.Expr)
            cell = statement.value
        parts.append(part_of(name, cell, one.number))
    return None if None in parts else "-".join(map(str, parts))


def without(source: SuiteFile, node: ast.FunctionDef, found: Sequence[RowSite]) -> bytes:
    """The function's text in which some rows say nothing; they are not run. Other rows keep their
    numbers.
    """
    start, end = source.lines(node)
    data = source.data[:end]
    for one in sorted(found, key=lambda one: one.number, reverse=True):
        first, last = source.span(one.row.element)
        data = data[:first] + _nothing(one).encode() + data[last:]
    return data[start:]


def _nothing(one: RowSite) -> str:
    """A row of as many values that say nothing; without a tuple around it if the row has none."""
    values = one.row.values or {}
    return "..." if one.row.element in values.values() else f"({'..., ' * len(values)})"


def single(source: SuiteFile, node: ast.FunctionDef, one: RowSite, text: str) -> bytes:
    """The function's text with a table of this row alone, with a text at the site."""
    begin, close = source.span(one.row.element)
    data, site = source.data, one.site
    row = data[begin : site.start] + text.encode() + data[site.end : close]
    return _with_table(source, node, one.table, row)


def _with_table(source: SuiteFile, node: ast.FunctionDef, table: ast.expr, row: bytes) -> bytes:
    start, end = source.lines(node)
    first, last = source.span(table)
    data = source.data
    return data[start:first] + b"[" + row + b'], ids=["' + LABEL.encode() + b'"]' + data[last:end]
