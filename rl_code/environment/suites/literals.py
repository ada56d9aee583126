"""Other values for literals that tests expect.

Each change may be made the other way round as well, so that neither text says of itself that it is
the changed one.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator

from rl_code.environment.suites.source import Change, Source

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DIGITS = "0123456789"
# What may be the only element of a list, or item of a dict, in place of none.
_SMALL = re.compile(r"""(\d|(['"])[a-z]\2)(: \d)?""")


def other_values(
    source: Source, node: ast.expr, rng: random.Random, *, far: bool = False
) -> Iterator[Change]:
    """Another value for a literal: of one constant in it, or an element more or less.

    far: farther away than any tolerance.
    """
    if not is_literal(node):
        return
    before = ast.literal_eval(node)
    leaves = list(_leaves(node))
    rng.shuffle(leaves)
    found = [_of_leaf(source, leaf, rng, far=far) for leaf in leaves[:3]]
    for change in (*found, *_of_length(source, node, rng)):
        if change and _differs(before, _replaced(source, node, change)):
            yield change


def _of_leaf(
    source: Source, leaf: ast.Constant, rng: random.Random, *, far: bool = False
) -> Change | None:
    """Another constant of the same type; None where there is none for sure."""
    start, end = source.span(leaf)
    old = source.data[start:end].decode()
    match leaf.value:
        case bool():
            return Change(start, end, str(not leaf.value), "truth", told=True)
        case int() | float():
            new, kind = _other_number(old, rng, far=far), "number"
        case str() | bytes():
            new, kind = _other_text(old, rng), "string"
        case _:
            return None
    return Change(start, end, new, kind) if new else None


def _of_length(source: Source, node: ast.expr, rng: random.Random) -> Iterator[Change]:
    """A list with one element more or less, or a dict with one item or none, on one line."""
    match node:
        case ast.List(elements):
            items = [source.span(element) for element in elements]
        case ast.Dict([] | [ast.Constant()] as keys, values):
            pairs = zip(keys, values, strict=True)
            items = [(source.span(key)[0], source.span(value)[1]) for key, value in pairs]
        case _:
            return
    start, end = source.span(node)
    text = source.data[start:end]
    if b"\n" in text:
        return
    if not items:
        quote = '"' if source.data.count(b'"') > source.data.count(b"'") else "'"
        new = rng.choice((rng.choice(_DIGITS), f"{quote}{rng.choice(_LETTERS)}{quote}"))
        if isinstance(node, ast.Dict):
            new += f": {rng.choice(_DIGITS)}"
        yield Change(start + 1, start + 1, new, "length")
        return
    first, end = items[-1]
    last = source.data[first:end].decode()
    if len(items) > 1 or _SMALL.fullmatch(last):
        yield Change(items[-2][1] if len(items) > 1 else first, end, "", "length")
    if isinstance(node, ast.List):
        leaves = [_of_leaf(source, leaf, rng) for leaf in _leaves(node.elts[-1])]
        changed = [change for change in leaves if change]
        if changed:
            change = rng.choice(changed)
            new = source.data[first : change.start].decode() + change.text
            last = new + source.data[change.end : end].decode()
        yield Change(end, end, f", {last}", "length")


def _other_number(old: str, rng: random.Random, *, far: bool) -> str:
    """The text of a number in which one digit is another one, the first one if it must be ``far``
    away. "" for one that is not written plainly.
    """
    if not re.fullmatch(r"\d+(\.\d+)?", old):
        return ""
    at = 0 if far else rng.choice([i for i in range(len(old)) if old[i] != "."])
    # no zero stands before other digits
    digits = _DIGITS[1:] if at == 0 and old[1:2].isdigit() else _DIGITS
    return old[:at] + rng.choice([digit for digit in digits if digit != old[at]]) + old[at + 1 :]


def _other_text(old: str, rng: random.Random) -> str:
    """The text of a string in which one letter or digit is another one; an empty one gets a letter,
    and one letter may become none. "" for one that is written in a way in which this is not sure.
    """
    plain = re.fullmatch(r"""(b?)("[^"\\\n{}]*"|'[^'\\\n{}]*')""", old)
    if plain is None:
        return ""
    first = len(plain[1]) + 1
    if len(old) == first + 1:
        return old[:first] + rng.choice(_LETTERS) + old[first:]
    places = [i for i in range(first, len(old) - 1) if old[i].isascii() and old[i].isalnum()]
    if not places:
        return ""
    at = rng.choice(places)
    letter = old[at]
    alphabet = _DIGITS if letter.isdigit() else _LETTERS.upper() if letter.isupper() else _LETTERS
    others = [other for other in alphabet if other != letter]
    if len(old) == first + 2 and letter.islower():
        others.append("")
    return old[:at] + rng.choice(others) + old[at + 1 :]


def _replaced(source: Source, node: ast.expr, change: Change) -> object:
    """The value of a literal with a change in it; None for what is no literal any more."""
    first, last = source.span(node)
    text = source.data[first : change.start] + change.text.encode() + source.data[change.end : last]
    try:
        return ast.literal_eval(text.decode().strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _differs(before: object, after: object) -> bool:
    """Whether two expected values are different, also for those who do not look at the case of
    letters or at space.
    """

    def plain(value: object) -> str:
        return "".join(repr(value).casefold().split())

    return after is not None and before != after and plain(before) != plain(after)


def is_literal(node: ast.expr) -> bool:
    """Whether an expression is a plain value written out."""
    if isinstance(node, ast.Tuple) and not node.elts:
        return False
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _leaves(node: ast.expr) -> Iterator[ast.Constant]:
    """The constants of a literal that are no keys."""
    match node:
        case ast.Constant():
            yield node
        case ast.Dict(_, values):
            for value in values:
                yield from _leaves(value)
        case ast.List(elements) | ast.Tuple(elements) | ast.Set(elements):
            for element in elements:
                yield from _leaves(element)
        case ast.UnaryOp(ast.USub(), operand):
            yield from _leaves(operand)
