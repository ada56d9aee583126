"""Lengths of functions. An agent wrote the files, so this runs in a disposable process: standard
library only.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence


def lengths(texts: Sequence[str]) -> list[int]:
    """Lines of each function of Python files. Raises SyntaxError."""
    found = []
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                last = node.end_lineno or node.lineno
                found.append(last - node.lineno + 1)
    return found
