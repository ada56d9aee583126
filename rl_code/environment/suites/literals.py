"""Other values for literals that tests expect.

A value and the others for it differ in one number or word, drawn so that nothing tells which one is
real (``alike``). So no text says of itself that it is the changed one, and of several copies none
stands nearer to all others than the rest. An element more or less, and something in place of
nothing, are told: they are changed where there is nothing else.
"""

from __future__ import annotations

import ast
import dataclasses
import random
import re
from collections.abc import Iterator

from rl_code.environment.suites.alike import NUMBER, TOKEN, Look
from rl_code.environment.suites.source import Site, SuiteFile

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DIGITS = "0123456789"
# Constants of a literal, and words of a string, that are looked at.
_LEAVES = 6
_WORDS = 4
# Numbers that look like a real one, at least; among fewer, the smallest or the usual one is real.
_HIDDEN = 2
# Other elements that are looked at in place of none.
_MANY = 40
# What may be the only element of a list, or item of a dict, in place of none.
_SMALL_ELEMENT = re.compile(r"""\d|(['"])[a-z]\1""")
_SMALL_ITEM = re.compile(r"""(\d|(['"])[a-z]\2): \d""")


def other_values(
    source: SuiteFile, node: ast.expr, rng: random.Random, look: Look, *, far: float | None = None
) -> Iterator[Site]:
    """Other values for a literal, or for the constants in a list, tuple or dict that holds other
    things, too: of one number or word in it, or an element more or less.

    look: of the test. far: None, or numbers must differ by more than this, and by more than
    rounding.
    """
    leaves = list(_leaves(node))
    rng.shuffle(leaves)
    found = [site for leaf in leaves[:_LEAVES] for site in _of_leaf(source, leaf, rng, look)]
    lengths = _of_length(source, node, rng, look) if is_literal(node) else ()
    for site in (*found, *lengths):
        yield from _different(source, node, site, far=far)


def _different(
    source: SuiteFile, node: ast.expr, site: Site, *, far: float | None
) -> Iterator[Site]:
    """The site with the texts with which the literal has other values, one for each value."""
    inner = node if is_literal(node) else _around(source, node, site)
    seen = [ast.literal_eval(inner)]
    kept = []
    alike = 0
    for number, text in enumerate(site.others):
        value = _replaced(source, inner, site, text)
        if value is None or not all(_differs(one, value) for one in seen):
            continue
        if far is not None and not _is_far(seen[0], value, far):
            continue
        seen.append(value)
        kept.append(text)
        alike += number < site.alike
    if kept:
        yield dataclasses.replace(site, others=tuple(kept), alike=alike)


def _around(source: SuiteFile, node: ast.expr, site: Site) -> ast.expr:
    """The constant that a site is in."""
    spans = {leaf: source.span(leaf) for leaf in _leaves(node)}
    return next(one for one, (a, b) in spans.items() if a <= site.start and site.end <= b)


def _is_far(before: object, after: object, least: float) -> bool:
    """True if numbers differ by more than rounding and a tolerance, also within lists."""
    if isinstance(before, int | float) and isinstance(after, int | float):
        return abs(before - after) > max(least, 1e-2 * max(abs(before), abs(after), 1e-6))
    if isinstance(before, list | tuple) and isinstance(after, list | tuple):
        return any(_is_far(one, other, least) for one, other in zip(before, after, strict=False))
    return False


def _of_leaf(
    source: SuiteFile, leaf: ast.Constant, rng: random.Random, look: Look
) -> Iterator[Site]:
    """Other constants of the same type; none where there is none for sure."""
    start, end = source.span(leaf)
    old = source.data[start:end].decode()
    match leaf.value:
        case bool():
            yield Site(start, end, old, (str(not leaf.value),), "truth", told=True)
        case int() | float():
            if NUMBER.fullmatch(old):
                others, alike = look.others(old, rng)
                yield Site(start, end, old, others, "number", alike, told=alike < _HIDDEN)
        case "" | b"":
            if len(old.lstrip("b")) == 2:
                others = tuple(f"{old[:-1]}{letter}{old[-1]}" for letter in _LETTERS)
                yield Site(start, end, old, others, "string", told=True)
        case str() | bytes():
            yield from _of_text(old, start, rng, look)


def _of_text(old: str, start: int, rng: random.Random, look: Look) -> Iterator[Site]:
    """Other words and numbers of a string, as it is written."""
    prefix = re.match(r"[A-Za-z]*", old)
    assert prefix is not None
    if set(prefix[0].lower()) & {"f", "t"}:
        return
    tokens = [
        token
        for token in TOKEN.finditer(old, len(prefix[0]))
        # of an escape, unless the string is raw
        if "r" in prefix[0].lower() or not re.search(r"\\\w*$", old[: token.start()])
    ]
    for token in rng.sample(tokens, min(len(tokens), _WORDS)):
        others, alike = look.others(token[0], rng)
        first = start + len(old[: token.start()].encode())
        last = first + len(token[0])
        told = token[0].isdigit() and alike < _HIDDEN
        yield Site(first, last, token[0], others, "string", alike, told=told)


def _of_length(source: SuiteFile, node: ast.expr, rng: random.Random, look: Look) -> Iterator[Site]:
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
        yield Site(first, end, last, tuple(others[:_MANY]), "length", told=True)
        if not items:
            return
    if len(items) > 1:
        before = items[-2][1]
        yield Site(before, end, source.data[before:end].decode(), ("",), "length", told=True)
    if isinstance(node, ast.List):
        leaves = list(_leaves(node.elts[-1]))
        changed = [
            site for leaf in leaves for site in _of_leaf(source, leaf, rng, look) if site.others
        ]
        if changed:
            site = rng.choice(changed)
            new = source.data[first : site.start].decode() + rng.choice(site.others)
            last = new + source.data[site.end : end].decode()
        yield Site(end, end, "", (f", {last}",), "length", told=True)


def _small(source: SuiteFile, last: str, *, of_dict: bool) -> list[str]:
    """All small elements or items; with the quotes of ``last``, or else those of the file."""
    own = [quote for quote in "\"'" if quote in last]
    usual = '"' if source.data.count(b'"') > source.data.count(b"'") else "'"
    quote = own[0] if own else usual
    elements = [*_DIGITS, *(f"{quote}{letter}{quote}" for letter in _LETTERS)]
    return [f"{key}: {digit}" for key in elements for digit in _DIGITS] if of_dict else elements


def _replaced(source: SuiteFile, node: ast.expr, site: Site, text: str) -> object:
    """The value of a literal with a text in it; None for what is no literal any more."""
    first, last = source.span(node)
    whole = source.data[first : site.start] + text.encode() + source.data[site.end : last]
    try:
        return ast.literal_eval(whole.decode().strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _differs(before: object, after: object) -> bool:
    """True if two expected values are different, also for comparisons that ignore the case of
    letters, or space.
    """

    def plain(value: object) -> str:
        return "".join(repr(value).casefold().split())

    return before != after and plain(before) != plain(after)


def is_literal(node: ast.expr) -> bool:
    """True if an expression is a plain value written out."""
    if isinstance(node, ast.Tuple) and not node.elts:
        return False
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _leaves(node: ast.expr) -> Iterator[ast.Constant]:
    """The constants that stand in a literal at a place of their own, and are no keys."""
    match node:
        case ast.Constant():
            yield node
        case ast.Dict(keys, values) if all(isinstance(key, ast.Constant) for key in keys):
            for value in values:
                yield from _leaves(value)
        case ast.List(elements) | ast.Tuple(elements):
            for element in elements:
                yield from _leaves(element)
                if isinstance(element, ast.Starred):  # what follows has no place of its own
                    return
        case ast.Set(elements) if is_literal(node):
            for element in elements:
                yield from _leaves(element)
        case ast.UnaryOp(ast.USub(), operand):
            yield from _leaves(operand)
