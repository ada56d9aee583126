"""Copies of a test function: which functions can be copied, and the texts of their copies."""

from __future__ import annotations

import ast
import dataclasses
import random
import re
from collections.abc import Mapping, Sequence

from rl_code.environment.suites.sites import sites, usable
from rl_code.environment.suites.source import Site, SuiteFile

_WORDS = ("again", "basic", "cases", "default", "extra", "more", "other", "simple", "values")


@dataclasses.dataclass(frozen=True)
class Group:
    """A test and its canaries."""

    # Names of the functions.
    real: str
    canaries: list[str]
    kind: str
    # Where they stand, in bytes, and their text.
    edit: tuple[int, int, bytes]
    # The canaries under the test's own name.
    texts: frozenset[bytes]


def sites_of(source: SuiteFile, names: tuple[str, ...], rng: random.Random) -> list[Site]:
    """Places where a test function can be changed; none if it cannot be copied."""
    node = copyable(source, names)
    return sites(source, node, rng) if node else []


def copyable(source: SuiteFile, names: tuple[str, ...]) -> ast.FunctionDef | None:
    """A test function if it can be copied."""
    node = source.function(names)
    if node is None or not usable(source, node):
        return None
    if not _stands_alone(source, node) or len(_uses(source.data, names[-1])) != 1:
        return None
    return node


def bare(test: str) -> str:
    """The id of a test without its row."""
    return test.partition("[")[0]


def group_of(
    source: SuiteFile,
    names: tuple[str, ...],
    rng: random.Random,
    edits: Sequence[tuple[int, int, bytes]],
    copies: int,
    *,
    told: bool,
) -> Group | None:
    """A test function beside canaries, as many as ``copies`` if a site has so many other values;
    None where it cannot have one by a change that is ``told``, or by one that is not.
    """
    found = [site for site in sites_of(source, names, rng) if site.told == told]
    node = source.function(names)
    if not found or node is None:
        return None
    start, end = source.lines(node)
    block = source.block(node)
    name = names[-1]
    site = best(found, copies, rng)
    enough = min(copies, len(site.others))
    # All at one site: of copies that were changed at different ones, the real one would be the one
    # that differs least from each of the others.
    texts = [changed_at(block, start, site, text) for text in site.others[:enough]]
    taken = source.data + b"".join(text for _, _, text in edits)
    new = [name, *new_names(name, source, taken, enough, rng)]
    rng.shuffle(new)
    blocks = [
        with_name(text, name, other)
        for text, other in zip(
            (changed_at(block, start, site, site.real), *texts), new, strict=True
        )
    ]
    rng.shuffle(blocks)
    edit = (start, end, joined(node, blocks))
    return Group(new[0], new[1:], site.kind, edit, frozenset(texts))


def new_names(
    name: str, source: SuiteFile, taken: bytes, count: int, rng: random.Random
) -> list[str]:
    """Other names for a test."""
    new: list[str] = []
    while len(new) < count:
        new.append(_name(name, source.words, taken, rng))
        taken += b" " + new[-1].encode()
    return new


def joined(node: ast.FunctionDef, blocks: Sequence[bytes]) -> bytes:
    """Functions one below the other."""
    lines = b"\n" if node.col_offset else b"\n\n"
    return lines.join(text if text.endswith(b"\n") else text + b"\n" for text in blocks)


def best(found: Sequence[Site], copies: int, rng: random.Random) -> Site:
    """One of the sites that have most values which look alike, or more than are needed."""
    order = [(min(site.alike, copies), min(len(site.others), copies)) for site in found]
    return rng.choice([site for site, one in zip(found, order, strict=True) if one == max(order)])


def _stands_alone(source: SuiteFile, node: ast.FunctionDef) -> bool:
    """True if no other statement shares a line with the function."""
    start, end = source.lines(node)
    last = source.span(node)[1]
    rest = source.data[last:end].strip()
    head = source.data[start:end].lstrip()
    return head.startswith((b"def ", b"@")) and (not rest or rest.startswith(b"#"))


def inherited(files: Mapping[str, str], classes: Sequence[str]) -> bool:
    """True if a class of tests may have others below it, which run its tests as theirs."""
    for name in classes:
        named = sum(len(_uses(text.encode(), name)) for text in files.values())
        if named != 1:
            return True
    return False


def _uses(data: bytes, name: str) -> list[bytes]:
    return re.findall(rb"\b" + re.escape(name.encode()) + rb"\b", data)


def changed_at(block: bytes, start: int, site: Site, text: str) -> bytes:
    """The function's text with another text at a site."""
    return block[: site.start - start] + text.encode() + block[site.end - start :]


def with_name(block: bytes, name: str, new: str) -> bytes:
    """The text of a function under another name."""
    return re.sub(
        rb"(\bdef\s+)" + re.escape(name.encode()) + rb"\b", rb"\1" + new.encode(), block, count=1
    )


def _name(name: str, words_of: frozenset[str], taken: bytes, rng: random.Random) -> str:
    """Another name for a test, of words that names of tests in its file are made of."""
    words = sorted(words_of - set(re.findall(r"[a-z]+", name.lower())) - {"test"}) + list(_WORDS)
    while True:
        word = rng.choice(words)
        new = f"{name}_{word}" if "_" in name else f"{name}{word.capitalize()}"
        if not _uses(taken, new):
            return new
        words.append(f"{word}_{rng.choice(_WORDS)}")
