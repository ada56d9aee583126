"""Values that look like the one that a test expects, so that no reader can tell which is real.

A value is a token of a literal: a number, or a word of a text. Another one is drawn so that it

- comes again in the test, or in the rest of its file, as the real one does or does not;
- has as many digits, decimals and zeros at its end, or letters written in the same way;
- follows from other numbers of the test (a sum, a product, a length) as the real one does or not;
- is as natural, by letters and by how often Python's documentation has the word.

Where others stand in an order by one of these, the place of the real one among them is drawn.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

# Other values of one site, at most.
MOST = 8
# A word or a number; no part of an escape.
TOKEN = re.compile(r"(?<!\\)[A-Za-z]+|\d+(?:\.\d+)?")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
WORD = re.compile(r"[A-Za-z]+")
_VOWELS, _CONSONANTS = "aeiou", "bcdfghjklmnpqrstvwxyz"
# Numbers of a test that sums and products are made of, at most.
_NUMBERS = 24
_TRIES = 60


class Look:
    """The tokens of a test and of the rest of its file."""

    def __init__(self, test: str, file: Mapping[str, int]):
        """test: text of the test. file: token -> how often its file has it, the test included."""
        self.inside = collections.Counter(TOKEN.findall(test))
        self.outside = collections.Counter(file)
        self.outside.subtract(self.inside)
        numbers = [float(one) for one in self.inside.elements() if NUMBER.fullmatch(one)]
        self._numbers = numbers[:_NUMBERS]

    def others(self, real: str, rng: random.Random) -> tuple[tuple[str, ...], int]:
        """Other tokens in place of a real one, best first, and how many of them look alike in
        all that is known here.
        """
        is_number = NUMBER.fullmatch(real) is not None
        inside = self.inside.copy()
        inside[real] -= 1
        kind = self._kind(real, inside)
        found = self._numbers_like(real, rng) if is_number else self._words_like(real, rng)
        known = [one for one in (*self.inside, *self.outside) if one != real]
        found += [one for one in known if _style(one) == _style(real)]
        alike, near = [], []
        for one in dict.fromkeys(found):
            if one == real or self.inside[one] < 0:
                continue
            same = self._kind(one, inside) == kind
            (alike if same else near).append(one)
        chosen, count = _around(real, alike, functools.partial(self._weight, inside), MOST, rng)
        rng.shuffle(near)
        near.sort(key=functools.partial(self._distance, inside, real))
        return (*chosen, *near[: MOST - len(chosen)]), count

    def _distance(self, inside: Mapping[str, int], real: str, token: str) -> float:
        """Distance of a token from the real one, in the properties that they should share."""
        pairs = zip(self._kind(real, inside), self._kind(token, inside), strict=True)
        apart = sum(abs(one - other) for one, other in pairs)
        return 2.0 * apart + abs(self._weight(inside, real) - self._weight(inside, token))

    def _kind(self, token: str, inside: Mapping[str, int]) -> tuple[int, int, bool]:
        """Properties that a token must share with the real one: whether it comes again in the test,
        whether it does in the file, and whether it follows from numbers of the test.
        """
        again = inside.get(token, 0) > 0
        often = (self.outside.get(token, 0) > 0) + (self.outside.get(token, 0) > 3)
        follows = NUMBER.fullmatch(token) is not None and float(token) in self._related(token)
        return again, often, follows

    def _related(self, but: str) -> set[float]:
        numbers = list(self._numbers)
        if float(but) in numbers:
            numbers.remove(float(but))
        return made_of(numbers)

    def _weight(self, inside: Mapping[str, int], token: str) -> float:
        """Key by which tokens are ordered: how often they come again, then how natural they are."""
        again = 4.0 * inside.get(token, 0) + 2.0 * math.log1p(max(self.outside.get(token, 0), 0))
        return again + (-math.log1p(float(token)) if NUMBER.fullmatch(token) else natural(token))

    def _numbers_like(self, real: str, rng: random.Random) -> list[str]:
        """Numbers of as many digits, decimals and zeros at the end; all of one digit."""
        whole, point, decimals = real.partition(".")
        body = whole.rstrip("0") if not point else whole
        zeros = "0" * (len(whole) - len(body)) if whole != "0" and not point else ""
        found = []
        if not point:
            made = sorted(self._related(real))
            lengths = {float(len(token)) for token in self.inside}
            found += [f"{one:.0f}" for one in (*made, *sorted(lengths)) if one.is_integer()]
            found = [one for one in found if abs(len(one) - len(real)) <= 1]
        for _ in range(_TRIES):
            digits = body if len(whole) == 1 and point else _digits(max(len(body), 1), rng)
            if not point and len(real) == 1:
                digits = rng.choice("0123456789")
            part = _digits(len(decimals), rng, first="0123456789") if point else ""
            if point and decimals.strip("0") == "":
                digits, part = _digits(len(whole), rng), decimals
            found.append(f"{digits}{zeros}{point}{part}")
        return found

    def _words_like(self, real: str, rng: random.Random) -> list[str]:
        """Words of Python's documentation of about as many letters, and made ones."""
        of_length = [
            _in_case(word, real)
            for length in range(max(1, len(real) - 2), len(real) + 3)
            for word in _by_length().get(length, ())
        ]
        made = [_pattern(real, rng) for _ in range(_TRIES)]
        letters = "".join(sorted({one for one in real}))
        made += ["".join(rng.choice(letters) for _ in real) for _ in range(8 if letters else 0)]
        words = rng.sample(of_length, min(len(of_length), 400)) if len(real) > 1 else []
        return [*words, *made]


def made_of(numbers: Sequence[float]) -> set[float]:
    """Numbers that follow from others: their sum, and what pairs of them make."""
    made = {sum(numbers)}
    for one, other in itertools.combinations(numbers, 2):
        made |= {one + other, one * other, abs(one - other)}
    return made


def _around(
    real: str,
    found: Sequence[str],
    weight: Callable[[str], float],
    count: int,
    rng: random.Random,
) -> tuple[list[str], int]:
    """Up to ``count`` of the tokens, nearest in weight, of which a number that is drawn weighs
    less than the real one, in an order of which any first ones are such a draw, too. And how many
    of them hide the real one: few where nearly all others weigh more, or less.
    """
    own = weight(real)
    ties = {one: (weight(one), rng.random()) for one in found}
    below = sorted((one for one in found if ties[one] < (own, 0.5)), key=ties.__getitem__)[::-1]
    above = sorted((one for one in found if ties[one] >= (own, 0.5)), key=ties.__getitem__)
    # nearest ones only, but not always the very nearest
    below = rng.sample(below[: 2 * count], min(len(below), 2 * count))
    above = rng.sample(above[: 2 * count], min(len(above), 2 * count))
    hidden = 1 + 2 * min(len(below), len(above))
    chosen = []
    share = rng.random()
    while len(chosen) < count and (below or above):
        low = below and (not above or rng.random() < share)
        chosen.append((below if low else above).pop())
    return chosen, min(len(chosen), hidden)


class Language:
    """Counts of the words of texts in lower case, and of three and two letters in them."""

    def __init__(self, texts: Iterable[str]):
        self.words: collections.Counter[str] = collections.Counter()
        for text in texts:
            self.words.update(word.lower() for word in WORD.findall(text))
        self._triples: collections.Counter[str] = collections.Counter()
        self._pairs: collections.Counter[str] = collections.Counter()
        for word, count in self.words.items():
            padded = f"^^{word}$"
            for at in range(len(padded) - 2):
                self._triples[padded[at : at + 3]] += 1 + math.isqrt(count)
                self._pairs[padded[at : at + 2]] += 1 + math.isqrt(count)

    def likely(self, word: str) -> float:
        """Mean log-probability of a word's letters."""
        padded = f"^^{word.lower()}$"
        chances = [
            (self._triples[padded[at : at + 3]] + 0.5) / (self._pairs[padded[at : at + 2]] + 14)
            for at in range(len(padded) - 2)
        ]
        return sum(map(math.log, chances)) / len(chances)


def natural(word: str) -> float:
    """Naturalness of a word: by its letters, and by how often documentation has it."""
    language = _documentation()
    return language.likely(word) + 0.5 * math.log1p(language.words[word.lower()])


@functools.cache
def _documentation() -> Language:
    """The language of Python's documentation."""
    from pydoc_data import topics

    return Language(topics.topics.values())


@functools.cache
def _by_length() -> dict[int, list[str]]:
    found: dict[int, list[str]] = collections.defaultdict(list)
    for word in sorted(_documentation().words):
        found[len(word)].append(word)
    return found


def _style(token: str) -> tuple:
    """Style of a token: digits and zeros of a number, or case and length of a word."""
    if NUMBER.fullmatch(token):
        whole, point, decimals = token.partition(".")
        zeros = len(whole) - len(whole.rstrip("0")) if not point and len(whole) > 1 else 0
        return "number", bool(point), len(decimals), len(whole), zeros
    return ("word", token.islower(), token.isupper(), token[:1].isupper(), (len(token) + 1) // 3)


def _digits(count: int, rng: random.Random, first: str = "123456789") -> str:
    """Digits that end in no zero, the first one as often as in numbers that people write down
    (Benford 1938).
    """
    if not count:
        return ""
    weights = [math.log10(1 + 1 / max(int(digit), 1)) for digit in first]
    begin = rng.choices(first, weights)[0] if count > 1 else ""
    middle = "".join(rng.choice("0123456789") for _ in range(count - 2))
    last = rng.choices("123456789", [3, 3, 2, 2, 4, 2, 1, 2, 1])[0]
    return begin + middle + last


def _in_case(word: str, real: str) -> str:
    """A word in the case of another one."""
    if real.isupper():
        return word.upper()
    return word.capitalize() if real[:1].isupper() else word.lower()


def _pattern(real: str, rng: random.Random) -> str:
    """A word in which each letter is another one, the same wherever it comes again."""
    some = rng.sample(sorted(set(real.lower())), rng.randint(1, len(set(real.lower()))))
    table = {letter: rng.choice(_VOWELS if letter in _VOWELS else _CONSONANTS) for letter in some}
    letters = [table.get(letter.lower(), letter.lower()) for letter in real]
    return "".join(
        new.upper() if old.isupper() else new for old, new in zip(real, letters, strict=True)
    )
