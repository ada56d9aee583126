"""Other values for literals that tests expect.

A value and the others for it are one family: the same digit, or the same letter, is another one in
each. From any of them the same family is reached, as often. So no text says of itself that it is
the changed one, and of several copies none stands nearer to all others than the rest.
"""

from __future__ import annotations

import ast
import dataclasses
import random
import re
from collections.abc import Iterator

from rl_code.environment.suites.source import Site, Source

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DIGITS = "0123456789"
# Other elements that are looked at in place of none.
_MANY = 40
# What may be the only element of a list, or item of a dict, in place of none.
_SMALL_ELEMENT = re.compile(r"""\d|(['"])[a-z]\1""")
_SMALL_ITEM = re.compile(r"""(\d|(['"])[a-z]\2): \d""")


def other_values(
    source: Source, node: ast.expr, rng: random.Random, *, far: bool = False
) -> Iterator[Site]:
    """Other values for a literal: of one constant in it, or an element more or less.

    far: farther away than any tolerance.
    """
    if not is_literal(node):
        return
    leaves = list(_leaves(node))
    rng.shuffle(leaves)
    found = [_of_leaf(source, leaf, rng, far=far) for leaf in leaves[:3]]
    for site in (*found, *_of_length(source, node, rng)):
        others = _different(source, node, site) if site else ()
        if site and others:
            yield dataclasses.replace(site, others=others)


def _different(source: Source, node: ast.expr, site: Site) -> tuple[str, ...]:
    """The other texts of a site with which the literal has other values, one for each value."""
    seen = [ast.literal_eval(node)]
    kept = []
    for text in site.others:
        value = _replaced(source, node, site, text)
        if value is not None and all(_differs(one, value) for one in seen):
            seen.append(value)
            kept.append(text)
    return tuple(kept)


def _of_leaf(
    source: Source, leaf: ast.Constant, rng: random.Random, *, far: bool = False
) -> Site | None:
    """Other constants of the same type; None where there is none for sure."""
    start, end = source.span(leaf)
    old = source.data[start:end].decode()
    match leaf.value:
        case bool():
            return Site(start, end, old, (str(not leaf.value),), "truth", told=True)
        case int() | float():
            others, kind = _other_numbers(old, rng, far=far), "number"
        case str() | bytes():
            others, kind = _other_texts(old, rng), "string"
        case _:
            return None
    return Site(start, end, old, tuple(others), kind) if others else None


def _of_length(source: Source, node: ast.expr, rng: random.Random) -> Iterator[Site]:
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
    small = _SMALL_ITEM if isinstance(node, ast.Dict) else _SMALL_ELEMENT
    first, end = items[-1] if items else (start + 1, start + 1)
    last = source.data[first:end].decode()
    if not items or (len(items) == 1 and small.fullmatch(last)):
        family = ("", *_small(source, last, of_dict=isinstance(node, ast.Dict)))
        others = [other for other in family if other != last]
        rng.shuffle(others)
        yield Site(first, end, last, tuple(others[:_MANY]), "length")
        if not items:
            return
    if len(items) > 1:
        before = items[-2][1]
        yield Site(before, end, source.data[before:end].decode(), ("",), "length")
    if isinstance(node, ast.List):
        leaves = [_of_leaf(source, leaf, rng) for leaf in _leaves(node.elts[-1])]
        changed = [site for site in leaves if site]
        if changed:
            site = rng.choice(changed)
            new = source.data[first : site.start].decode() + rng.choice(site.others)
            last = new + source.data[site.end : end].decode()
        yield Site(end, end, "", (f", {last}",), "length")


def _small(source: Source, last: str, *, of_dict: bool) -> list[str]:
    """All small elements or items; with the quotes of ``last``, or else those of the file."""
    own = [quote for quote in "\"'" if quote in last]
    usual = '"' if source.data.count(b'"') > source.data.count(b"'") else "'"
    quote = own[0] if own else usual
    elements = [*_DIGITS, *(f"{quote}{letter}{quote}" for letter in _LETTERS)]
    return [f"{key}: {digit}" for key in elements for digit in _DIGITS] if of_dict else elements


def _other_numbers(old: str, rng: random.Random, *, far: bool) -> list[str]:
    """Texts of numbers in which one digit is another one, the first one if it must be ``far``
    away. None for one that is not written plainly.
    """
    if not re.fullmatch(r"\d+(\.\d+)?", old):
        return []
    at = 0 if far else rng.choice([i for i in range(len(old)) if old[i] != "."])
    # no zero stands before other digits
    digits = _DIGITS[1:] if at == 0 and old[1:2].isdigit() else _DIGITS
    return _others_at(old, at, digits)


def _other_texts(old: str, rng: random.Random) -> list[str]:
    """Texts of strings in which one letter or digit is another one; an empty one gets a letter,
    and one letter may become none. None for one that is written in a way in which this is not sure.
    """
    plain = re.fullmatch(r"""(b?)("[^"\\\n{}]*"|'[^'\\\n{}]*')""", old)
    if plain is None:
        return []
    first = len(plain[1]) + 1
    if len(old) == first + 1:
        return [old[:first] + letter + old[first:] for letter in _LETTERS]
    places = [i for i in range(first, len(old) - 1) if old[i].isascii() and old[i].isalnum()]
    if not places:
        return []
    at = rng.choice(places)
    letter = old[at]
    alphabet = _DIGITS if letter.isdigit() else _LETTERS.upper() if letter.isupper() else _LETTERS
    found = _others_at(old, at, alphabet)
    if len(old) == first + 2 and letter.islower():
        found.append(old[:at] + old[at + 1 :])
    return found


def _others_at(old: str, at: int, alphabet: str) -> list[str]:
    """The texts with another character at one place."""
    return [old[:at] + other + old[at + 1 :] for other in alphabet if other != old[at]]


def _replaced(source: Source, node: ast.expr, site: Site, text: str) -> object:
    """The value of a literal with a text in it; None for what is no literal any more."""
    first, last = source.span(node)
    whole = source.data[first : site.start] + text.encode() + source.data[site.end : last]
    try:
        return ast.literal_eval(whole.decode().strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _differs(before: object, after: object) -> bool:
    """Whether two expected values are different, also for those who do not look at the case of
    letters or at space.
    """

    def plain(value: object) -> str:
        return "".join(repr(value).casefold().split())

    return before != after and plain(before) != plain(after)


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
