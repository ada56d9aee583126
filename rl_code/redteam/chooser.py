"""A chooser: a small classifier that picks the real test among its copies.

It knows nothing of the code that is tested. It reads the texts only: letters and words of values,
round and small numbers, sums and lengths of what the test holds, values that come again in the test
or its file, names of exceptions. It learns from tests of other packages, copied in the same way,
which of several copies is the real one (a conditional logit, McFadden 1974). So its share of right
picks bounds from below what a policy can learn that looks at tests alone.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from rl_code.environment.suites.alike import NUMBER, WORD, Language, made_of
from rl_code.environment.suites.canaries import draw, function_of, functions_in, guarded
from rl_code.environment.suites.repeats import apart
from rl_code.environment.suites.rows import table_of
from rl_code.environment.suites.source import SuiteFile

_TOKEN = re.compile(r"[A-Za-z]+|\d+(?:\.\d+)?|\S")
_EXCEPTION = re.compile(r"[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning|Fault)")
# Hashed pieces of letters, a feature each.
_PIECES = 64
# Files that are larger are left out.
_LARGEST = 60_000
_STEPS = 400
_RATE = 0.05
_PENALTY = 5e-2
_MANY_NUMBERS = 24


@dataclasses.dataclass(frozen=True)
class Group:
    """A test among its copies."""

    # Kind of the change: "number", "string", "length" or "exception", and those "in a row".
    kind: str
    # The texts, under one name; which of them is real.
    copies: tuple[str, ...]
    real: int
    # The rest of the file.
    rest: str


@dataclasses.dataclass(frozen=True)
class Score:
    """Picks of a chooser, by kind of change."""

    kind: str
    groups: int
    right: int
    # Expected number of right picks of somebody who draws one of the copies.
    chance: float


def read_tests(folders: Iterable[Path], but: Collection[str] = ()) -> dict[str, str]:
    """Path -> text of the files of tests below folders. but: names of folders to leave out."""
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("test_*.py")):
            if set(but) & set(path.parts) or path.stat().st_size > _LARGEST:
                continue
            try:
                found[str(path)] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
    return found


def groups(files: Mapping[str, str], rng: random.Random) -> Iterator[Group]:
    """Every test function of files that can have canaries which nothing tells, among them; and rows
    of ``parametrize`` that can.
    """
    for path, text in files.items():
        ids = [one for function in functions_in(path, text) for one in _rows(text, function)]
        known = guarded({path: text}, ids)
        ids = [one for one in ids if one in known]
        if not ids:
            continue
        drawn = draw({path: text}, ids, rng, most=len(ids), first=ids)
        if path not in drawn.files:
            continue
        source = SuiteFile(drawn.files[path])
        names: dict[str, list[tuple[str, bool]]] = collections.defaultdict(list)
        for one, own in drawn.tests.items():
            names[own].append((one, True))
        for one, own in drawn.canaries.items():
            names[own].append((one, False))
        rows = {drawn.canaries[one] for one in drawn.in_place}
        for own in apart(drawn, names):
            if len(names[own]) > 1:
                kind = drawn.kind_of[own]
                yield _group(source, names[own], f"{kind} in a row" if own in rows else kind)


def _rows(text: str, function: str) -> list[str]:
    """Ids of the tests that a function makes of its rows, or its own."""
    source = SuiteFile(text)
    node = source.function(function_of(function)[1])
    found = table_of(source, node) if node else None
    if not found or any(row.label is None for row in found[1]):
        return [function]
    return [f"{function}[{label}]" for label in dict.fromkeys(row.label for row in found[1])]


def _group(source: SuiteFile, copies: list[tuple[str, bool]], kind: str) -> Group:
    spans = []
    for one, real in copies:
        node = source.function(function_of(one)[1])
        assert node is not None
        spans.append((*source.lines(node), node.name, real))
    spans.sort()
    texts = [
        re.sub(rf"\bdef\s+{name}\b", "def test", source.data[start:end].decode())
        for start, end, name, _ in spans
    ]
    rest = source.data[: spans[0][0]] + source.data[spans[-1][1] :]
    real = [real for *_, real in spans].index(True)
    return Group(kind, tuple(texts), real, rest.decode())


def measure(
    known: Sequence[Path], asked: Sequence[Path], most: int, seed: int = 0
) -> tuple[list[Score], int]:
    """Picks among the tests below the folders ``asked`` of a chooser that was trained on those
    below ``known``, and how many groups that were. most: files of each, drawn at random. Raises
    ValueError where there are none.
    """
    rng = random.Random(seed)
    found = []
    for folders in (known, asked):
        files = read_tests(folders)
        drawn = dict(rng.sample(sorted(files.items()), min(most, len(files))))
        found.append(list(groups(drawn, rng)))
        if not found[-1]:
            names = ", ".join(map(str, folders))
            raise ValueError(f"{names}: no test there can have canaries which nothing tells")
    return Chooser(found[0]).scores(found[1]), len(found[0])


class Chooser:
    """A classifier that was trained on groups."""

    def __init__(self, known: Sequence[Group]):
        texts = dict.fromkeys(group.rest for group in known)
        self._language = Language(texts)
        # Words as they are written.
        self._words = collections.Counter(word for text in texts for word in WORD.findall(text))
        arrays = [self.features(group) for group in known]
        # one row for a copy; groups of different sizes are padded, and what is padded weighs none
        most = max(map(len, arrays))
        width = arrays[0].shape[1]
        x_NxCxF = np.zeros((len(arrays), most, width), np.float32)
        mask_NxC = np.full((len(arrays), most), -np.inf, np.float32)
        for number, array in enumerate(arrays):
            x_NxCxF[number, : len(array)] = array
            mask_NxC[number, : len(array)] = 0.0
        self._scale_F = np.maximum(x_NxCxF.std(axis=(0, 1)), 1e-3)
        x_NxCxF /= self._scale_F
        self._weights_F = _fit(x_NxCxF, mask_NxC, np.array([group.real for group in known]))

    def pick(self, group: Group) -> int:
        """The copy that looks most like the real one."""
        return int(np.argmax(self.features(group) / self._scale_F @ self._weights_F))

    def scores(self, found: Sequence[Group]) -> list[Score]:
        """Picks by kind, and all of them as "all"."""
        rows = []
        for kind in (*sorted({group.kind for group in found}), "all"):
            own = [group for group in found if kind in (group.kind, "all")]
            right = sum(self.pick(group) == group.real for group in own)
            rows.append(Score(kind, len(own), right, sum(1 / len(one.copies) for one in own)))
        return rows

    def features(self, group: Group) -> np.ndarray:
        """Features of each copy, without what all copies of the group share."""
        tokens = [_TOKEN.findall(text) for text in group.copies]
        own = _apart(tokens)
        inside = collections.Counter(tokens[0])
        inside.subtract(own[0])
        outside = collections.Counter(_TOKEN.findall(group.rest))
        shared = [token for token in inside.elements() if inside[token] > 0]
        related = _related(shared)
        rows = [
            [*_common(one, inside, outside), *_of_numbers(one, related), *self._of_words(one)]
            for one in own
        ]
        table = np.array(rows, np.float32)
        table = np.concatenate([table, _ranks(table)], axis=1)
        places = np.eye(len(own), 8, dtype=np.float32)
        pieces = np.stack([_pieces(one) for one in own])
        table = np.concatenate([table, places, pieces], axis=1)
        return table - table.mean(axis=0)

    def _of_words(self, own: Sequence[str]) -> list[float]:
        words = [word for word in own if WORD.fullmatch(word)]
        likely = [self._language.likely(word) for word in words]
        usual = [math.log1p(self._words[word]) for word in words]
        folded = [math.log1p(self._language.words[word.lower()]) for word in words]
        return [
            *(sum(likely), min(likely, default=0.0), sum(usual), min(usual, default=0.0)),
            *(sum(folded), min(folded, default=0.0), sum(map(len, words))),
            float(sum(bool(_EXCEPTION.fullmatch(word)) for word in words)),
        ]


def _apart(tokens: Sequence[Sequence[str]]) -> list[list[str]]:
    """The tokens of each copy that stand between what begins and what ends all of them."""
    least = min(map(len, tokens))
    first = 0
    while first < least and len({one[first] for one in tokens}) == 1:
        first += 1
    last = 0
    while last < least - first and len({one[-1 - last] for one in tokens}) == 1:
        last += 1
    return [list(one[first : len(one) - last]) for one in tokens]


def _common(own: Sequence[str], inside: Mapping, outside: Mapping) -> list[float]:
    """Features of a copy's own tokens: how often they occur again in the test, and in its file."""
    here = [math.log1p(max(inside.get(token, 0), 0)) for token in own if token.isalnum()]
    there = [math.log1p(outside.get(token, 0)) for token in own if token.isalnum()]
    return [
        *(sum(here), max(here, default=0.0), min(here, default=0.0)),
        *(sum(there), max(there, default=0.0), min(there, default=0.0)),
        *(float(len(own)), float(len("".join(own)))),
        float(sum(one > 0 for one in here)) - len(here),
        float(sum(one > 0 for one in there)) - len(there),
        float(len(own) - len(set(own))),
    ]


def _related(shared: Sequence[str]) -> tuple[set[float], set[float]]:
    """Numbers that follow from those in a test: sums, products, differences; lengths of words."""
    numbers = [float(token) for token in shared if NUMBER.fullmatch(token)][:_MANY_NUMBERS]
    lengths = {float(len(token)) for token in shared if WORD.fullmatch(token)}
    return made_of(numbers), lengths


def _of_numbers(own: Sequence[str], related: tuple[set[float], set[float]]) -> list[float]:
    """Features of a copy's own numbers: their digits, and their relation to the test's other
    numbers.
    """
    found = [token for token in own if NUMBER.fullmatch(token)]
    row = np.zeros(20)
    for token in found:
        value = float(token)
        whole = token.partition(".")[0]
        row[0] += math.log1p(value)
        row[1] += len(token)
        row[2] += len(whole) - len(whole.rstrip("0")) if value else 1
        row[3] += token.endswith("5")
        row[4] += value in related[0]
        row[5] += value in related[1]
        row[6] += len(set(token)) / len(token)
        row[7] += value <= 3
        row[8] += value > 1 and value.is_integer() and (int(value) & (int(value) - 1)) == 0
        row[9] += token.rstrip("0").endswith(".") or (token.endswith("0") and "." in token)
        row[10 + int(token[0])] += 1
    return [*row]


def _ranks(table_CxF: np.ndarray) -> np.ndarray:
    """1 for the one copy that has most of a feature, and for the one that has least."""
    columns = []
    for sign in (1, -1):
        values = sign * table_CxF
        best = values == values.max(axis=0)
        columns.append(best & (best.sum(axis=0) == 1))
    return np.concatenate(columns, axis=1).astype(np.float32)


def _pieces(own: Sequence[str]) -> np.ndarray:
    """Hashed pieces of two and three letters, and whole tokens."""
    row = np.zeros(_PIECES, np.float32)
    for token in own:
        padded = f"^{token}$"
        pieces = [padded[at : at + n] for n in (2, 3) for at in range(len(padded) - n + 1)]
        for piece in (*pieces, token):
            row[_hash(piece) % _PIECES] += 1
    return row


def _hash(text: str) -> int:
    """The same number in every process."""
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value


def _fit(x_NxCxF: np.ndarray, mask_NxC: np.ndarray, real_N: np.ndarray) -> np.ndarray:
    """Weights under which the real copies are likeliest, by Adam on all groups at once."""
    weights = np.zeros(x_NxCxF.shape[-1], np.float32)
    first, second = np.zeros_like(weights), np.zeros_like(weights)
    rows = np.arange(len(real_N))
    chosen_NxF = x_NxCxF[rows, real_N]
    for step in range(1, _STEPS + 1):
        logits = x_NxCxF @ weights + mask_NxC
        logits -= logits.max(axis=1, keepdims=True)
        share = np.exp(logits)
        share /= share.sum(axis=1, keepdims=True)
        mean_NxF = np.einsum("nc,ncf->nf", share, x_NxCxF)
        slope = (mean_NxF - chosen_NxF).mean(axis=0) + _PENALTY * weights
        first = 0.9 * first + 0.1 * slope
        second = 0.99 * second + 0.01 * slope**2
        rate = _RATE * (1 - step / _STEPS)
        weights -= rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-6)
    return weights
