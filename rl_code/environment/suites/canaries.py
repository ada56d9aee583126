"""Canaries: copies of real tests in which an expected value is certainly wrong.

A suite runs in the candidate's own interpreter, where results can be forged. Canaries stand beside
the test that they are copies of, in the same file and under names made of words of that file. Which
of them keeps the old name, how many there are and in which order they stand is drawn anew each
time. So who wants to know which of them should pass needs the right value. A test and its canaries
ask for different values of the same expression: no honest code passes two of them.

A test can also be changed where it stands, in a suite without copies (``draw_alone``). Then there
is nothing to compare it with, and what tests leave behind is what the suite's own tests leave.
"""

from __future__ import annotations

import ast
import dataclasses
import random
import re
from collections.abc import Collection, Mapping, Sequence

from rl_code.environment.suites.sites import sites, usable
from rl_code.environment.suites.source import Site, Source

# Test functions that are copied in one grading, at most.
MOST = 8
# Canaries of a function whose test decides what is paid, if its values allow so many.
_COPIES = (3, 4, 5)
# Factor on the number of functions with a canary in all, if their tests decide what is paid.
_FURTHER = 4
# Functions with more parameters than this are not copied.
_IDS = 20
_WORDS = ("again", "basic", "cases", "default", "extra", "more", "other", "simple", "values")


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A suite with canaries in it."""

    # Path -> text of the files that hold canaries.
    files: dict[str, str]
    # Tests that are run: id -> the suite's own id of the test. A test may have another name in this
    # run.
    tests: dict[str, str]
    # Id of a canary -> the suite's own id of the test that it is a copy of.
    canaries: dict[str, str]
    # The kinds of changes (``source.Site``), one for each test function that was copied.
    kinds: tuple[str, ...] = ()
    # The suite's own id of a test that was copied -> the kind of its change.
    kind_of: dict[str, str] = dataclasses.field(default_factory=dict)
    # Texts of canaries, under the names of the tests that they are copies of.
    texts: frozenset[bytes] = frozenset()


def draw(
    files: Mapping[str, str],
    ids: Sequence[str],
    rng: random.Random,
    most: int = MOST,
    first: Sequence[str] = (),
) -> Drawn:
    """Puts canaries into files of tests.

    files: path -> text of the test files that are known. ids: of all tests that will run. most:
    test functions that are copied. first: ids of tests that are copied before others, and several
    times.
    """
    drawing = _Drawing(files, ids, rng)
    drawing.copy(most, {function_of(one) for one in first})
    return drawing.drawn()


def draw_alone(
    files: Mapping[str, str],
    ids: Sequence[str],
    rng: random.Random,
    alone: Collection[str],
    used: Collection[bytes] = (),
) -> Drawn:
    """The suite without copies, in which the functions of some tests are canaries themselves.

    alone: ids of these tests. used: texts that are not taken where there is another one. A function
    that cannot be changed stays as it is.
    """
    drawing = _Drawing(files, ids, rng)
    for function in dict.fromkeys(function_of(one) for one in alone):
        drawing.change(function, used)
    return drawing.drawn()


_Function = tuple[str, tuple[str, ...]]


class _Drawing:
    """A draw that is being made."""

    def __init__(self, files: Mapping[str, str], ids: Sequence[str], rng: random.Random):
        self._files = files
        self._rng = rng
        self._functions: dict[_Function, list[str]] = {}
        for one in ids:
            self._functions.setdefault(function_of(one), []).append(one)
        self._sources: dict[str, Source | None] = {}
        self._edits: dict[str, list[tuple[int, int, bytes]]] = {}
        self._tests = {one: one for one in ids}
        self._canaries: dict[str, str] = {}
        self._kinds: list[str] = []
        self._kind_of: dict[str, str] = {}
        self._texts: set[bytes] = set()

    def drawn(self) -> Drawn:
        """What was drawn."""
        written = {path: _edited(self._sources[path], edits) for path, edits in self._edits.items()}
        kinds = tuple(self._kinds)
        texts = frozenset(self._texts)
        return Drawn(written, self._tests, self._canaries, kinds, self._kind_of, texts)

    def copy(self, most: int, preferred: Collection[_Function]) -> None:
        """Puts canaries beside up to ``most`` functions, ``preferred`` ones first and with more
        copies; and one beside each further preferred function, up to ``_FURTHER`` times as many.
        """
        order = list(self._functions)
        self._rng.shuffle(order)
        # Changes that look like changes only where there are no others.
        attempts = [(function, told) for told in (False, True) for function in order]
        attempts.sort(key=lambda attempt: attempt[0] not in preferred)
        copied: set[_Function] = set()
        for function, told in attempts:
            enough = len(copied) >= most
            if enough and (function not in preferred or len(copied) >= _FURTHER * most):
                break
            copies = 1 if enough or function not in preferred else self._rng.choice(_COPIES)
            if function not in copied and self._copy(function, copies, told=told):
                copied.add(function)

    def _copy(self, function: _Function, copies: int, *, told: bool) -> bool:
        """Puts canaries beside a function; whether it can have some."""
        path, names = function
        source = self._source(function)
        group = source and _group(
            source, names, self._rng, self._edits.get(path, []), copies, told=told
        )
        if not group:
            return False
        self._edits.setdefault(path, []).append(group.edit)
        self._kinds.append(group.kind)
        self._texts |= group.texts
        for one in self._functions[function]:
            del self._tests[one]
            self._kind_of[one] = group.kind
            self._tests[_renamed(one, names, group.real)] = one
            for name in group.canaries:
                self._canaries[_renamed(one, names, name)] = one
        return True

    def change(self, function: _Function, used: Collection[bytes]) -> None:
        """Makes a function its own canary."""
        path, names = function
        source = self._source(function)
        found = source and _sites(source, names, self._rng)
        if not source or not found:
            return
        node = source.function(names)
        assert node is not None
        start, end = source.lines(node)
        block = source.data[start:end]
        least = min(site.told for site in found)
        site = _best([site for site in found if site.told == least], MOST, self._rng)
        texts = [_changed(block, start, site, other) for other in site.others]
        text = next((text for text in texts if text not in used), texts[0])
        self._edits.setdefault(path, []).append((start, end, text))
        self._texts.add(text)
        for one in self._functions[function]:
            del self._tests[one]
            self._canaries[one] = one

    def has_untold(self, function: _Function) -> bool:
        """True if a function can have a canary that is not ``told``."""
        source = self._source(function)
        found = _sites(source, function[1], self._rng) if source else []
        return any(not site.told for site in found)

    def _source(self, function: _Function) -> Source | None:
        """The file of a function that can be copied."""
        path, names = function
        if path not in self._sources:
            self._sources[path] = _source(self._files.get(path))
        too_many = len(self._functions[function]) > _IDS
        return None if too_many or _inherited(self._files, names[:-1]) else self._sources[path]


def guarded(files: Mapping[str, str], ids: Sequence[str]) -> set[str]:
    """The ids of tests that can have a canary which only the right value tells from the test."""
    drawing = _Drawing(files, ids, random.Random(0))
    return {one for one in ids if drawing.has_untold(function_of(one))}


def functions_in(path: str, text: str) -> list[str]:
    """Ids of the test functions of a file, without parameters; none for what is no Python."""
    source = _source(text)
    found = []
    for node in source.tree.body if source else ():
        match node:
            case ast.FunctionDef(name):
                found.append((name,))
            case ast.ClassDef(outer, body=body) if outer.startswith("Test"):
                methods = [one for one in body if isinstance(one, ast.FunctionDef)]
                found += [(outer, one.name) for one in methods]
    return ["::".join((path, *names)) for names in found if names[-1].startswith("test")]


def function_of(test: str) -> tuple[str, tuple[str, ...]]:
    """File and names (classes, then the function) of the function that a test's id names."""
    path, _, rest = test.partition("::")
    return path, tuple(rest.partition("[")[0].split("::"))


def _renamed(test: str, names: tuple[str, ...], name: str) -> str:
    """The id of a test whose function has another name."""
    path, _, rest = test.partition("::")
    _, bracket, parameters = rest.partition("[")
    return "::".join((path, *names[:-1], name)) + bracket + parameters


def _source(text: str | None) -> Source | None:
    try:
        return None if text is None else Source(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@dataclasses.dataclass(frozen=True)
class _Group:
    """A test and its canaries."""

    # Names of the functions.
    real: str
    canaries: list[str]
    kind: str
    # Where they stand, in bytes, and their text.
    edit: tuple[int, int, bytes]
    # The canaries under the test's own name.
    texts: frozenset[bytes]


def _sites(source: Source, names: tuple[str, ...], rng: random.Random) -> list[Site]:
    """Where a test function can be changed; nowhere if it cannot be copied."""
    node = source.function(names)
    if node is None or not usable(source, node):
        return []
    if not _stands_alone(source, node) or len(_uses(source.data, names[-1])) != 1:
        return []
    return sites(source, node, rng)


def _group(
    source: Source,
    names: tuple[str, ...],
    rng: random.Random,
    edits: Sequence[tuple[int, int, bytes]],
    copies: int,
    *,
    told: bool,
) -> _Group | None:
    """A test function beside canaries, as many as ``copies`` if a site has so many other values;
    None where it cannot have one by a change that is ``told``, or by one that is not.
    """
    found = [site for site in _sites(source, names, rng) if site.told == told]
    node = source.function(names)
    if not found or node is None:
        return None
    start, end = source.lines(node)
    block = source.data[start:end]
    name = names[-1]
    site = _best(found, copies, rng)
    enough = min(copies, len(site.others))
    # All at one site: of copies that were changed at different ones, the real one would be the one
    # that differs least from each of the others.
    texts = [_changed(block, start, site, text) for text in site.others[:enough]]
    taken = source.data + b"".join(text for _, _, text in edits)
    new = [name]
    while len(new) <= enough:
        new.append(_name(name, source.words, taken, rng))
        taken += b" " + new[-1].encode()
    rng.shuffle(new)
    blocks = [
        with_name(text, name, other)
        for text, other in zip((_changed(block, start, site, site.real), *texts), new, strict=True)
    ]
    rng.shuffle(blocks)
    lines = b"\n" if node.col_offset else b"\n\n"
    joined = lines.join(text if text.endswith(b"\n") else text + b"\n" for text in blocks)
    real, *canaries = new
    return _Group(real, canaries, site.kind, (start, end, joined), frozenset(texts))


def _best(found: Sequence[Site], copies: int, rng: random.Random) -> Site:
    """One of the sites that have most values which look alike, or more than are needed."""
    order = [(min(site.alike, copies), min(len(site.others), copies)) for site in found]
    return rng.choice([site for site, one in zip(found, order, strict=True) if one == max(order)])


def _stands_alone(source: Source, node: ast.FunctionDef) -> bool:
    """Whether no other statement shares a line with the function."""
    start, end = source.lines(node)
    last = source.span(node)[1]
    rest = source.data[last:end].strip()
    head = source.data[start:end].lstrip()
    return head.startswith((b"def ", b"@")) and (not rest or rest.startswith(b"#"))


def _inherited(files: Mapping[str, str], classes: Sequence[str]) -> bool:
    """Whether a class of tests may have others below it, which run its tests as theirs."""
    for name in classes:
        named = sum(len(_uses(text.encode(), name)) for text in files.values())
        if named != 1:
            return True
    return False


def _uses(data: bytes, name: str) -> list[bytes]:
    return re.findall(rb"\b" + re.escape(name.encode()) + rb"\b", data)


def _changed(block: bytes, start: int, site: Site, text: str) -> bytes:
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


def _edited(source: Source | None, edits: Sequence[tuple[int, int, bytes]]) -> str:
    """A file's text with edits in it, which do not overlap."""
    assert source is not None
    data = source.data
    for start, end, text in sorted(edits, reverse=True):
        data = data[:start] + text + data[end:]
    return data.decode()
