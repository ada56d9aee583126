"""Canaries of one row of ``parametrize``: another expected value in it, and nothing else.

``@parametrize("price, left", [(100, 90), (10, 9)])`` above ``assert discount(price) == left``: the
row ``(10, 9)`` is taken out of the table and stands in copies of the function, each with a table of
this row alone, in one of them as it was and in the others with another value for ``left``. So all
copies look alike, and the function itself says nothing of the row any more. The other rows run
where they did, under their own ids.

Alone (``canaries.draw_alone``), the value is changed in the table, where it stands.
"""

from __future__ import annotations

import ast
import dataclasses
import random
from collections.abc import Iterator

from rl_code.environment.suites.literals import other_values
from rl_code.environment.suites.rows import Row, table_of
from rl_code.environment.suites.sites import tail_of
from rl_code.environment.suites.source import Site, Source

# The id of the row in a table of one.
LABEL = "row"


@dataclasses.dataclass(frozen=True)
class RowSite:
    """A place in a row where what a test expects can be changed so that it must fail."""

    site: Site
    table: ast.expr
    row: Row
    number: int
    # Values of a row, each with a name; no tuple around them if there is just one.
    arguments: int


def row_sites(
    source: Source, node: ast.FunctionDef, test: str, rng: random.Random
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
    asked = _expected(source, node, row, rng)
    return [RowSite(site, table, row, same[0], len(row.values)) for site in asked]


def _expected(
    source: Source, node: ast.FunctionDef, row: Row, rng: random.Random
) -> Iterator[Site]:
    """Other values of what an assertion at the end of the test compares with, and nothing else
    reads.
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
                    found = other_values(source, values[name], rng, finder.look)
                    yield from (site for site in found if not site.told and len(site.others) > 1)


def _is_read(source: Source, name: str) -> bool:
    """True if a fixture of the file asks for an argument: then its value is not only expected."""
    return any(
        argument.arg == name
        for one in ast.walk(source.tree)
        if isinstance(one, ast.FunctionDef)
        and any("fixture" in ast.unparse(decorator) for decorator in one.decorator_list)
        for argument in one.args.args
    )


def alone_in(source: Source, node: ast.FunctionDef, one: RowSite, text: str) -> bytes:
    """The function's text in which the row has another text at the site."""
    start, end = source.lines(node)
    data, site = source.data, one.site
    return data[start : site.start] + text.encode() + data[site.end : end]


def label_of(block: bytes, name: str, number: int, *, indented: bool) -> str | None:
    """The id of a row in the text of a function; None if another row may have the same."""
    source = Source(("class Test:\n" if indented else "") + block.decode())
    node = source.function(("Test", name) if indented else (name,))
    found = table_of(source, node) if node else None
    if not found:
        return None
    labels = [row.label for row in found[1]]
    return labels[number] if labels.count(labels[number]) == 1 else None


def without(source: Source, node: ast.FunctionDef, one: RowSite) -> bytes:
    """The function's text in which the row says nothing; it is not run. Other rows keep their
    numbers.
    """
    nothing = "..." if one.arguments == 1 and not _is_tuple(one) else _nothing(one.arguments)
    start, end = source.lines(node)
    first, last = source.span(one.row.element)
    return source.data[start:first] + nothing.encode() + source.data[last:end]


def _nothing(count: int) -> str:
    return f"({'..., ' * count})"


def _is_tuple(one: RowSite) -> bool:
    """True if the only value of a row stands in a tuple of its own."""
    return one.row.element not in (one.row.values or {}).values()


def single(source: Source, node: ast.FunctionDef, one: RowSite, text: str) -> bytes:
    """The function's text with a table of this row alone, with a text at the site."""
    start, end = source.lines(node)
    first, last = source.span(one.table)
    begin, close = source.span(one.row.element)
    data, site = source.data, one.site
    row = data[begin : site.start] + text.encode() + data[site.end : close]
    return data[start:first] + b"[" + row + b'], ids=["' + LABEL.encode() + b'"]' + data[last:end]
