"""Search for the next edit: its place is found in the syntax tree, its text by the model.

Two rules, in this order. After a name was changed, the next leaf that still has the old name. Else
the next place at which the tree has an error or something is missing.
"""

from __future__ import annotations

import dataclasses

from people.editor.tokens import parse, tokens


@dataclasses.dataclass(frozen=True)
class Place:
    """Characters of a text that are probably edited next; the same for an insertion."""

    start: int
    end: int
    # "renamed" or "error".
    why: str


@dataclasses.dataclass(frozen=True)
class Rename:
    """A name that was changed."""

    old: str
    new: str


def rename(before: str, after: str) -> Rename | None:
    """The name that is the only difference between two texts; None where there is another one."""
    a = [token.text for token in tokens(before)]
    b = [token.text for token in tokens(after)]
    if len(a) != len(b):
        return None
    pairs = {(x, y) for x, y in zip(a, b, strict=True) if x != y}
    if len(pairs) != 1:
        return None
    old, new = pairs.pop()
    return Rename(old, new) if old.isidentifier() and new.isidentifier() else None


def next_place(text: str, cursor: int, renamed: Rename | None) -> Place | None:
    """The place of the next edit after the cursor, or from the start of the text; None for none."""
    if renamed is not None:
        places = [Place(t.start, t.end, "renamed") for t in tokens(text) if t.text == renamed.old]
        if places:
            return _after(places, cursor)
    return _after(_errors(text), cursor)


def _after(places: list[Place], cursor: int) -> Place | None:
    return next((one for one in places if one.start >= cursor), places[0] if places else None)


def _errors(text: str) -> list[Place]:
    """Places right behind what the parser could not read, or where something is missing."""
    found = []
    tree = parse(text)
    if not tree.root_node.has_error:
        return []
    waiting = [tree.root_node]
    while waiting:
        node = waiting.pop()
        if node.is_missing or node.is_error:
            byte = node.end_byte
            at = len(text.encode("utf-8", "replace")[:byte].decode("utf-8", "replace"))
            found.append(Place(at, at, "error"))
        elif node.has_error:
            waiting += reversed(node.children)
    return found
