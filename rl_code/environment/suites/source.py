"""A test file as text and as a syntax tree, and places where its text can be changed."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence

from rl_code.environment.suites.alike import TOKEN
from rl_code.text import python_source


@dataclasses.dataclass(frozen=True)
class Site:
    """A piece of a test's text, in bytes, and what may stand there in copies of the test.

    Of all that may stand there, ``real`` included, honest code passes one at most.
    """

    start: int
    end: int
    # Text of the test at this place: its own, or the same in other words.
    real: str
    # Texts of canaries at this place.
    others: tuple[str, ...]
    # "number", "string", "length", "truth" or "exception".
    kind: str
    # Number of the others, from the first on, that look like the real one in all that is compared
    # (``alike``).
    alike: int = 0
    # True if a reader who knows tests can tell which text is real: most tests ask for what is true,
    # and for an exception of the repository rather than one of Python's.
    told: bool = False


class SuiteFile:
    """A test file: its text and syntax tree. Raises SyntaxError for no Python, and UnicodeError for
    a text that no encoding can carry.
    """

    def __init__(self, text: str):
        self.data = text.encode()
        # The mark is no part of the program, and places in the first line do not count it.
        mark = "\ufeff"
        self._mark = len(mark.encode()) if text.startswith(mark) else 0
        self.tree = python_source.parse(text)
        self._starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    @functools.cached_property
    def tokens(self) -> collections.Counter[str]:
        """Number of times that the file has each word and number."""
        return collections.Counter(TOKEN.findall(self.data.decode()))

    @functools.cached_property
    def words(self) -> frozenset[str]:
        """Words that names of tests are made of, in small letters."""
        names = re.findall(rb"\bdef\s+(test\w*)", self.data)
        found = [word for name in names for word in re.findall(rb"[A-Za-z][a-z]+", name)]
        return frozenset(word.decode().lower() for word in found)

    def place(self, line: int, column: int) -> int:
        """The offset in bytes of a place as syntax trees name it."""
        return self._starts[line - 1] + column + (self._mark if line == 1 else 0)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Places where a node begins and ends, in bytes."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self.place(node.lineno, node.col_offset)
        return start, self.place(node.end_lineno, node.end_col_offset)

    def lines(self, node: ast.FunctionDef) -> tuple[int, int]:
        """Places where the lines of a function begin and end, those of its decorators included."""
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        assert node.end_lineno is not None
        return self.place(first, 0), self._starts[node.end_lineno]

    def block(self, node: ast.FunctionDef) -> bytes:
        """The lines of a function."""
        start, end = self.lines(node)
        return self.data[start:end]

    def edited(self, edits: Iterable[tuple[int, int, bytes]]) -> str:
        """The file's text with other texts between two places each, which do not overlap."""
        data = self.data
        for start, end, text in sorted(edits, reverse=True):
            data = data[:start] + text + data[end:]
        return data.decode()

    def function(self, names: Sequence[str]) -> ast.FunctionDef | None:
        """The test function of this name, behind those of its classes, if there is just one."""
        body: list[ast.stmt] = self.tree.body
        for name in names:
            found = [
                node
                for node in body
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
                and node.name == name
            ]
            if len(found) != 1 or isinstance(found[0], ast.AsyncFunctionDef):
                return None
            body = found[0].body
        return found[0] if names and isinstance(found[0], ast.FunctionDef) else None


def source_of(text: str | None) -> SuiteFile | None:
    """A test file; None where there is none, or no Python."""
    try:
        return None if text is None else SuiteFile(text)
    except (SyntaxError, UnicodeError):
        return None
