"""Survival of accepted code: which of its syntax-tree tokens are still in the file.

A token is a leaf of the syntax tree, so white space and line breaks do not count. The tokens of the
file at the acceptance and those of the file now are aligned by a longest common subsequence. An
accepted token is alive when it is part of that.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Sequence

import numpy as np
import tree_sitter
import tree_sitter_python

_WORD = re.compile(r"\w+|[^\w\s]")
# Above this many cells the alignment is made of runs (difflib), which may not be the longest.
_CELLS = 4_000_000


@dataclasses.dataclass(frozen=True)
class Token:
    """A leaf of the syntax tree, with its place in the text, in characters."""

    text: str
    start: int
    end: int


@functools.cache
def _parser() -> tree_sitter.Parser:
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_python.language()))


def parse(text: str) -> tree_sitter.Tree:
    """The syntax tree of Python code, which may have errors."""
    return _parser().parse(text.encode("utf-8", "replace"))


def leaves(tree: tree_sitter.Tree) -> list[tree_sitter.Node]:
    """The leaves that have a text, in order. Without recursion: code may be nested deeply."""
    found = []
    waiting = [tree.root_node]
    while waiting:
        node = waiting.pop()
        if node.child_count:
            waiting += reversed(node.children)
        elif node.end_byte > node.start_byte:
            found.append(node)
    return found


def tokens(text: str, language: str = "python") -> list[Token]:
    """The tokens of a text, in order. Of a language that has no grammar here, words and signs."""
    if language != "python":
        return [Token(m.group(), m.start(), m.end()) for m in _WORD.finditer(text)]
    place = _Places(text)
    found = []
    for leaf in leaves(parse(text)):
        start, end = place(leaf.start_byte), place(leaf.end_byte)
        if text[start:end].strip():
            found.append(Token(text[start:end], start, end))
    return found


class _Places:
    """Map from places in the bytes of a text to places in its characters; asked in any order."""

    def __init__(self, text: str):
        data = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
        # a byte that continues a character has the bits 10 at its start
        self._before = np.concatenate([[0], np.cumsum((data & 0xC0) != 0x80)])

    def __call__(self, byte: int) -> int:
        return int(self._before[byte])


def aligned(a: Sequence[str], b: Sequence[str]) -> list[int]:
    """Indices of ``a`` that a longest common subsequence with ``b`` holds, ascending."""
    head = 0
    while head < min(len(a), len(b)) and a[head] == b[head]:
        head += 1
    tail = 0
    while tail < min(len(a), len(b)) - head and a[-1 - tail] == b[-1 - tail]:
        tail += 1
    inner_a, inner_b = a[head : len(a) - tail], b[head : len(b) - tail]
    if len(inner_a) * len(inner_b) > _CELLS:
        matcher = difflib.SequenceMatcher(None, inner_a, inner_b, autojunk=False)
        inner = [block.a + i for block in matcher.get_matching_blocks() for i in range(block.size)]
    else:
        inner = _longest_common(inner_a, inner_b)
    return [*range(head), *(head + i for i in inner), *range(len(a) - tail, len(a))]


def _longest_common(a: Sequence[str], b: Sequence[str]) -> list[int]:
    """As ``aligned``, by the table of lengths of all pairs of ends."""
    if not a or not b:
        return []
    numbers = {text: i for i, text in enumerate(dict.fromkeys((*a, *b)))}
    wanted = np.array([numbers[text] for text in b])
    lengths = np.zeros((len(a) + 1, len(b) + 1), np.int32)
    for i in range(len(a) - 1, -1, -1):
        # lengths[i, j] = lengths[i + 1, j + 1] + 1 where equal, else max of below and right; the
        # maximum from the right is a running one
        below = lengths[i + 1]
        taken = np.where(wanted == numbers[a[i]], below[1:] + 1, below[:-1])
        lengths[i, :-1] = np.maximum.accumulate(taken[::-1])[::-1]
    found = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            found.append(i)
            i, j = i + 1, j + 1
        elif lengths[i + 1, j] >= lengths[i, j + 1]:
            i += 1
        else:
            j += 1
    return found


@dataclasses.dataclass(frozen=True)
class Accepted:
    """A file at the moment when a part of it was accepted."""

    language: str
    # The tokens of the file, and the indices of those that were accepted.
    texts: tuple[str, ...]
    own: frozenset[int]

    @classmethod
    def at(cls, text: str, start: int, end: int, language: str = "python") -> Accepted:
        """text: the file with the accepted part in it, characters ``start`` to ``end``. A token
        that reaches over an end is own by its greater part.
        """
        found = tokens(text, language)
        own = frozenset(
            i
            for i, token in enumerate(found)
            if 2 * (min(token.end, end) - max(token.start, start)) > token.end - token.start
        )
        return cls(language, tuple(token.text for token in found), own)

    def alive(self, text: str) -> float | None:
        """Share of the accepted tokens that are in the file now; None if there were none."""
        if not self.own:
            return None
        now = [token.text for token in tokens(text, self.language)]
        return sum(i in self.own for i in aligned(self.texts, now)) / len(self.own)
