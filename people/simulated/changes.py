"""An agent's change of some files, and what is left of it in later files."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
from collections.abc import Iterator, Mapping

from people.editor import tokens

# Path -> text.
type Files = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Change:
    """The files before and after the work of an agent."""

    before: Files
    after: Files

    @property
    def paths(self) -> list[str]:
        """The files that differ, sorted."""
        every = self.before.keys() | self.after.keys()
        return sorted(one for one in every if self.before.get(one) != self.after.get(one))

    @property
    def lines(self) -> int:
        """Lines that were added or taken away."""
        return sum(
            line[:1] in "+-" and line[:3] not in ("+++", "---")
            for path in self.paths
            for line in difflib.unified_diff(
                self.before.get(path, "").splitlines(), self.after.get(path, "").splitlines(), n=0
            )
        )

    @functools.cached_property
    def _own(self) -> dict[str, tuple[list[str], frozenset[int]]]:
        """Path -> the syntax-tree tokens of the file after the work, and which are the agent's."""
        found = {}
        for path in self.paths:
            texts = _texts(path, self.after.get(path, ""))
            old = set(tokens.aligned(texts, _texts(path, self.before.get(path, ""))))
            found[path] = texts, frozenset(range(len(texts))) - old
        return found

    @property
    def tokens(self) -> int:
        """Tokens that the agent wrote."""
        return sum(len(own) for _, own in self._own.values())

    def alive(self, now: Files) -> float:
        """Share of the agent's tokens that later files still have. Of a change that only takes
        something away: 1 while that is so, else 0.
        """
        if not self.tokens:
            return float(all(now.get(path) == self.after.get(path) for path in self.paths))
        kept = 0
        for path, (texts, own) in self._own.items():
            kept += sum(i in own for i in tokens.aligned(texts, _texts(path, now.get(path, ""))))
        return kept / self.tokens


def renamed(text: str, shortest: int) -> str:
    """Python code with longer names in place of variables whose names have fewer characters than
    ``shortest``; the text itself where it cannot be parsed or has none. Parameters keep theirs.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return text
    short = {name for name in _assigned(tree) if len(name) < shortest}
    if not short:
        return text
    pieces, at = [], 0
    for token in tokens.tokens(text):
        if token.text in short:
            pieces += [text[at : token.start], f"each_{token.text}"]
            at = token.end
    return "".join([*pieces, text[at:]])


def _assigned(tree: ast.AST) -> Iterator[str]:
    """Names that are assigned to and are no parameters of a function."""
    parameters = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id not in parameters:
                yield node.id


def _texts(path: str, text: str) -> list[str]:
    language = "python" if path.endswith(".py") else ""
    return [token.text for token in tokens.tokens(text, language)]
