"""Reads Python that others wrote, such as the files of a task, within bounds.

CPython's parser takes a time in proportion to a text and refuses deep nesting, by errors of several
kinds. What takes longer than a parse is done in a disposable process (``environment/sandbox/
disposable.py``); so is all that is done with files of agents.
"""

from __future__ import annotations

import ast

LONGEST = 2_000_000
"""Characters of the longest text that is read; a syntax tree takes some hundred bytes for each."""


def parse(text: str) -> ast.Module:
    """The syntax tree of a module, which may begin with a byte-order mark. Raises SyntaxError for
    what is no Python, too long, or nested too deeply.
    """
    if len(text) > LONGEST:
        raise SyntaxError(f"{len(text)} characters; at most {LONGEST} are read")
    try:
        return ast.parse(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(f"it cannot be read: {type(error).__name__} {error}") from error


def is_block(text: str) -> bool:
    """True if the lines of statements, indented or not, are Python."""
    try:
        parse("if True:\n" + text if text[:1].isspace() else text)
    except SyntaxError:
        return False
    return True


def unparse(tree: ast.AST) -> str:
    """The text of a syntax tree. Raises SyntaxError for one that is nested too deeply."""
    try:
        return ast.unparse(tree)
    except RecursionError as error:
        raise SyntaxError("it is nested too deeply") from error
