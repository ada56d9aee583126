"""Cuts files into functions, classes and what stands between them; a program for the sandbox.

It is shown there beside tree-sitter and its grammars (``chunks.py`` starts it), because a parser in
C reads what a model wrote: what goes wrong with it must go wrong there. It reads lines of JSON,
``{"grammar": package, "text": text}``, and answers each with a line,
``{"pieces": [[first, last, name], ...]}`` (lines counted from 1, both included).
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys

import tree_sitter

# Lines of the longest piece, and classes in classes that are looked into.
LONGEST = 60
_DEEPEST = 4
# A line's end in text from old machines.
_RETURN = re.compile(r"\r(?!\n)")
# What grammars call definitions.
_DEFINITION = re.compile(
    r"(decorated|function|method|constructor|class|struct|impl|enum|trait|interface|module|type|"
    r"namespace)_(definition|declaration|item|specifier)"
)


def pieces(root: tree_sitter.Node, depth: int = 0) -> list[tuple[int, int, str]]:
    """The pieces of a file or of a class: first line, last line, and name."""
    found: list[tuple[int, int, str]] = []
    between: list[tree_sitter.Node] = []
    for child in root.children:
        if not _DEFINITION.fullmatch(child.type):
            between.append(child)
            continue
        found += _between(between)
        between = []
        first, last = _lines(child)
        name = _name(child)
        body = _body(child)
        if last - first < LONGEST or body is None or depth == _DEEPEST:
            found += _windows(first, last, name)
        else:
            inside = pieces(body, depth + 1)
            found += _windows(first, max(first, inside[0][0] - 1) if inside else last, name)
            found += [(one, other, f"{name}.{rest}".strip(".")) for one, other, rest in inside]
    return found + _between(between)


def _between(nodes: list[tree_sitter.Node]) -> list[tuple[int, int, str]]:
    """Pieces of the lines that these nodes take up between two definitions."""
    return _windows(_lines(nodes[0])[0], _lines(nodes[-1])[1], "") if nodes else []


def _windows(first: int, last: int, name: str) -> list[tuple[int, int, str]]:
    """Lines in pieces of at most LONGEST."""
    return [
        (start, min(start + LONGEST - 1, last), name) for start in range(first, last + 1, LONGEST)
    ]


def _lines(node: tree_sitter.Node) -> tuple[int, int]:
    """The first and the last line of a node, counted from 1."""
    row, column = node.end_point
    first = node.start_point[0] + 1
    return first, max(first, row if column == 0 else row + 1)


def _inner(node: tree_sitter.Node) -> tree_sitter.Node:
    """The definition below decorators."""
    return node.child_by_field_name("definition") or node


def _name(node: tree_sitter.Node) -> str:
    named = _inner(node).child_by_field_name("name")
    return named.text.decode(errors="replace")[:100] if named is not None and named.text else ""


def _body(node: tree_sitter.Node) -> tree_sitter.Node | None:
    return _inner(node).child_by_field_name("body")


@functools.cache
def _parser(grammar: str) -> tree_sitter.Parser:
    return tree_sitter.Parser(tree_sitter.Language(importlib.import_module(grammar).language()))


def cut(grammar: str, text: str) -> list[tuple[int, int, str]]:
    """The pieces of a file."""
    # the parser ends lines at line feeds alone
    text = _RETURN.sub("\n", text)
    return pieces(_parser(grammar).parse(text.encode()).root_node)


def main() -> None:
    """Answers until its input ends."""
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"pieces": cut(asked["grammar"], asked["text"])}), flush=True)


if __name__ == "__main__":
    main()
