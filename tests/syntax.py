"""Syntax trees of this project's files, as the tests of style and imports read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_BLOCKS = ("body", "orelse", "handlers", "cases", "finalbody")


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement below a node, in the file's order.

    A third of the time of ``ast.walk``, since expressions are not gone into.
    """
    for name in _BLOCKS:
        for node in getattr(tree, name, ()):
            yield node
            yield from statements(node)
