"""New inputs for a function from those its tests call it with: type-aware mutation that keeps to
their kind.

The idea is that of EvalPlus (Liu et al. 2023, arXiv 2305.01210). There a hand-written contract says
which inputs are legal. Here a new input must share what all known inputs have in common, so that a
correct solution is not judged on inputs that nobody meant. This covers the types at each position,
the range and sign of numbers, the characters of strings and the nesting of their brackets, the
lengths of containers, sortedness and distinctness, rows of equal length, and relations between
arguments (``n == len(a)``, ``k <= len(a)``, ``x in a``, ``a <= b``, lists of equal length).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import string
from collections.abc import Callable, Sequence
from typing import Any

_TRIES = 20  # mutants drawn for each one wanted; many coincide
_GROW = 2
_RECORD = 4  # tuples of one common length up to this are records: each position has its own kind
_CLASSES = (string.ascii_lowercase, string.ascii_uppercase, string.digits)

Arguments = tuple[Any, ...]


def propose(known: Sequence[Arguments], count: int, rng: random.Random) -> list[Arguments]:
    """Up to ``count`` argument tuples that differ from the known ones and from each other, smaller
    ones first.

    known: argument tuples of plain values, all of one length; with none, or with no arguments,
    there are no proposals.
    """
    if not known or not known[0] or len({len(arguments) for arguments in known}) > 1:
        return []
    kinds = [Kind.of(column) for column in zip(*known, strict=True)]
    # An argument that never changes among others that do is part of what is meant.
    fixed = [
        len(known) > 2 and len(kinds) > 1 and len({repr(value) for value in kind.values}) == 1
        for kind in kinds
    ]
    keep = _relations(known)
    seen = {repr(arguments) for arguments in known}
    found: list[Arguments] = []
    for _ in range(count * _TRIES):
        if len(found) == count:
            break
        arguments = list(copy.deepcopy(rng.choice(known)))
        for i, kind in enumerate(kinds):
            if not fixed[i] and (len(kinds) == 1 or rng.random() < 0.6):
                arguments[i] = kind.mutate(arguments[i], rng)
        for relation in keep:
            relation(arguments, rng)
        if repr(arguments := tuple(arguments)) not in seen:
            seen.add(repr(arguments))
            found.append(arguments)
    return sorted(found, key=lambda arguments: len(repr(arguments)))


@dataclasses.dataclass(frozen=True)
class Kind:
    """Common properties of the known values at one place."""

    name: str
    # The known values.
    values: tuple[Any, ...]
    # Bounds of numbers, or of the length of containers and strings.
    low: int | float = 0
    high: int | float = 0
    # The kinds of the elements: one for all elements, or one for each position of a record, or
    # those of the keys and of the values of a dict.
    items: tuple[Kind, ...] = ()
    alphabet: str = ""
    record: bool = False
    ordered: int = 0  # 1 ascending, -1 descending, 0 neither
    distinct: bool = False
    even_rows: bool = False
    balanced: bool = False
    # Classes of characters (lower case, upper case, digit, or the character itself) that follow
    # each other in strings; "" for the ends.
    transitions: frozenset[tuple[str, str]] = frozenset()
    # The characters known at each position, of strings that all have one form, as dates have.
    template: tuple[str, ...] = ()

    @staticmethod
    def of(values: Sequence[Any]) -> Kind:
        """The kind of the values; "mixed" when they are of several types."""
        types = {type(value) for value in values}
        if types == {bool}:
            return Kind("bool", tuple(values))
        if types == {int} or types == {float} or types == {int, float}:
            return _number_kind(tuple(values), "int" if types == {int} else "float")
        if types == {str}:
            characters = set("".join(values))
            for group in _CLASSES:
                if len(characters & set(group)) > 1:
                    characters |= set(group)
            sizes = [len(value) for value in values]
            return Kind(
                "str",
                tuple(values),
                min(sizes),
                max(sizes),
                alphabet="".join(sorted(characters)),
                balanced=bool(characters & set("()[]{}")) and all(map(_balanced, values)),
                transitions=frozenset().union(*map(_transitions, values)),
                template=_template(values),
            )
        if len(types) == 1 and types <= {list, tuple, set}:
            return _sequence_kind(tuple(values), types.pop().__name__)
        if types == {dict}:
            sizes = [len(value) for value in values]
            pairs = [pair for value in values for pair in value.items()]
            items = tuple(map(Kind.of, zip(*pairs, strict=True))) if pairs else ()
            return Kind("dict", tuple(values), min(sizes), max(sizes), items)
        return Kind("mixed", tuple(values))

    def mutate(self, value: Any, rng: random.Random) -> Any:
        """A value of this kind near ``value``, which is of this kind; sometimes ``value``
        itself.
        """
        match self.name:
            case "bool":
                return not value
            case "int" | "float":
                return self._number(value, rng)
            case "str":
                return self._text(value, rng)
            case "dict":
                return self._dict(value, rng)
            case "list" | "tuple" | "set":
                return self._sequence(list(value), rng)
            case _:
                same_type = [known for known in self.values if type(known) is type(value)]
                return (
                    rng.choice(self.values)
                    if rng.random() < 0.5
                    else Kind.of(same_type).mutate_plain(value, rng)
                )

    def mutate_plain(self, value: Any, rng: random.Random) -> Any:
        """``mutate``, but a value whose type has no rule (None, bytes) stays."""
        return value if self.name == "mixed" else self.mutate(value, rng)

    def _text(self, value: str, rng: random.Random) -> str:
        if self.template:
            i = rng.randrange(len(value))
            return value[:i] + rng.choice(self.template[i]) + value[i + 1 :]
        text = "".join(self._edited(list(value), lambda c: rng.choice(self.alphabet), rng))
        odd = (self.balanced and not _balanced(text)) or not _transitions(text) <= self.transitions
        return value if odd else text

    def _number(self, value: int | float, rng: random.Random) -> int | float:
        choice = rng.random()
        if choice < 0.3:
            value += rng.choice((-2, -1, 1, 2))
        elif choice < 0.4:
            value = rng.choice(self.values)
        elif self.name == "int" or isinstance(value, int):
            value = rng.randint(int(self.low), int(self.high))
        else:
            value = round(rng.uniform(self.low, self.high), rng.choice((0, 1, 2)))
        return min(max(value, self.low), self.high)

    def _sequence(self, items: list[Any], rng: random.Random) -> Any:
        build = {"list": list, "tuple": tuple, "set": set}[self.name]
        if self.record:
            i = rng.randrange(len(items)) if items else 0
            return build(
                [
                    kind.mutate(x, rng) if k == i else x
                    for k, (kind, x) in enumerate(zip(self.items, items, strict=True))
                ]
            )
        if not self.items:
            return build(items)
        (kind,) = self.items
        pool = kind.values
        items = self._edited(
            items, lambda x: kind.mutate(rng.choice(pool) if x is None else x, rng), rng
        )
        if self.distinct:
            items = [x for i, x in enumerate(items) if x not in items[:i]]
        if self.ordered:
            items.sort(reverse=self.ordered < 0)
        if self.even_rows and items:
            width = min(map(len, items))
            items = [row[:width] for row in items]
        return build(items)

    def _edited(self, items: list[Any], new: Callable[[Any], Any], rng: random.Random) -> list[Any]:
        """Elements replaced, dropped, repeated, put in, or put in another order; 1 to 3 such
        edits.
        """
        for _ in range(rng.randint(1, 3)):
            i = rng.randrange(len(items)) if items else 0
            edit = rng.choice(
                (
                    "replace",
                    "replace",
                    "replace",
                    "drop",
                    "repeat",
                    "insert",
                    "swap",
                    "reverse",
                    "cut",
                )
            )
            if edit == "replace" and items:
                items[i] = new(items[i])
            elif edit == "drop" and len(items) > self.low:
                del items[i]
            elif edit == "repeat" and items and len(items) < self._longest:
                items.insert(rng.randrange(len(items) + 1), items[i])
            elif edit == "insert" and len(items) < self._longest:
                items.insert(rng.randrange(len(items) + 1), new(items[i] if items else None))
            elif edit == "swap" and items:
                j = rng.randrange(len(items))
                items[i], items[j] = items[j], items[i]
            elif edit == "reverse":
                items.reverse()
            elif edit == "cut" and len(items) > self.low:
                del items[max(int(self.low), i) :]
        return items

    def _dict(self, value: dict[Any, Any], rng: random.Random) -> dict[Any, Any]:
        pairs = list(value.items())
        if not self.items or not pairs:
            return value
        keys, values = self.items
        i = rng.randrange(len(pairs))
        edit = rng.random()
        if edit < 0.2 and len(pairs) > self.low:
            del pairs[i]
        elif edit < 0.4 and len(pairs) < self._longest:
            pairs.append((keys.mutate(pairs[i][0], rng), values.mutate(pairs[i][1], rng)))
        else:
            pairs[i] = (pairs[i][0], values.mutate(pairs[i][1], rng))
        return dict(pairs)

    @property
    def _longest(self) -> int:
        return int(self.high) + (_GROW if self.low != self.high or self.high > _RECORD else 0)


def _balanced(text: str) -> bool:
    """True if brackets come in nested pairs."""
    opened = []
    for character in text:
        if character in "([{":
            opened.append(")]}"["([{".index(character)])
        elif character in ")]}" and (not opened or opened.pop() != character):
            return False
    return not opened


def _class_of(character: str) -> str:
    """A letter that stands for all characters of a class, or the character itself."""
    return next((group[0] for group in _CLASSES if character in group), character)


def _transitions(text: str) -> frozenset[tuple[str, str]]:
    """The pairs of classes of neighbouring characters; "" stands for the ends."""
    classes = ["", *map(_class_of, text), ""]
    return frozenset(itertools.pairwise(classes))


def _template(values: Sequence[str]) -> tuple[str, ...]:
    """The characters at each position, if all strings have one form with separators in it."""
    forms = {tuple(map(_class_of, value)) for value in values}
    (form, *others) = forms
    separated = any(character not in {group[0] for group in _CLASSES} for character in form)
    if others or len(values) < 2 or not separated:
        return ()
    return tuple("".join(sorted(set(column))) for column in zip(*values, strict=True))


def _number_kind(values: tuple[Any, ...], name: str) -> Kind:
    """The range of numbers: with the known signs, up to twice the largest known size, and none
    smaller than the smallest known. Definitions often disagree about where numbers begin (0, 1, 2).
    """
    low = min(values)
    high = max(values)
    reach = 2 * max(abs(low), abs(high), 5)
    bottom = low if low >= 0 else -reach
    top = -1 if high <= -1 else 0 if high < 0 else reach
    return Kind(name, values, bottom, top)


def _sequence_kind(values: tuple[Any, ...], name: str) -> Kind:
    sizes = [len(value) for value in values]
    low = min(sizes)
    high = max(sizes)
    if name == "tuple" and low == high <= _RECORD and len(values) > 1:
        return Kind(
            name,
            values,
            low,
            high,
            tuple(Kind.of(column) for column in zip(*values, strict=True)),
            record=True,
        )
    elements = [element for value in values for element in value]
    ordered = 0
    if (
        name != "set"
        and high > 2
        and {type(element) for element in elements} in ({int}, {float}, {str})
    ):
        ordered = next(
            (d for d in (1, -1) if all(list(v) == sorted(v, reverse=d < 0) for v in values)), 0
        )
    rows = all(isinstance(element, list | tuple) for element in elements)
    return Kind(
        name,
        values,
        low,
        high,
        (Kind.of(elements),) if elements else (),
        ordered=ordered,
        distinct=all(
            not any(x in value[:i] for i, x in enumerate(value)) for value in map(list, values)
        ),
        even_rows=bool(elements)
        and rows
        and all(len(set(map(len, value))) <= 1 for value in values),
    )


Relation = Callable[[list[Any], random.Random], None]


def _relations(known: Sequence[Arguments]) -> list[Relation]:
    """Relations between two arguments in every known call (of at least two), as functions that
    restore it.
    """
    relations: list[Relation] = []
    positions = range(len(known[0]) if len(known) > 1 else 0)
    for i in positions:
        for j in positions:
            pairs = [(arguments[i], arguments[j]) for arguments in known]
            if i != j and (relation := _relation(i, j, pairs)):
                relations.append(relation)
    return relations


def _relation(i: int, j: int, pairs: Sequence[tuple[Any, Any]]) -> Relation | None:
    """The relation of argument i to argument j, if there is one."""
    sized = all(isinstance(b, list | tuple | str) for _, b in pairs)
    if all(type(a) is int for a, _ in pairs) and sized:
        gaps = {a - len(b) for a, b in pairs}
        if len(gaps) == 1:
            return lambda x, rng: x.__setitem__(i, len(x[j]) + min(gaps))
        if max(gaps) <= 0:
            most = max(gaps) if max(gaps) == 0 else -1
            least = min(a for a, _ in pairs)
            return lambda x, rng: x.__setitem__(i, max(min(x[i], len(x[j]) + most), min(least, 0)))
    if all(type(a) is int and type(b) is int and a <= b for a, b in pairs):
        return lambda x, rng: _swap_if(x, i, j)
    if sized and all(isinstance(a, list | tuple) for a, _ in pairs) and i < j:
        if len({len(a) for a, _ in pairs}) > 1 and all(len(a) == len(b) for a, b in pairs):
            return lambda x, rng: _cut_both(x, i, j)
    if sized and all(not isinstance(b, str) and a in b for a, b in pairs):
        return lambda x, rng: (
            x.__setitem__(i, rng.choice(x[j])) if x[j] and rng.random() < 0.7 else None
        )
    return None


def _swap_if(arguments: list[Any], i: int, j: int) -> None:
    if arguments[i] > arguments[j]:
        arguments[i], arguments[j] = arguments[j], arguments[i]


def _cut_both(arguments: list[Any], i: int, j: int) -> None:
    size = min(len(arguments[i]), len(arguments[j]))
    arguments[i], arguments[j] = arguments[i][:size], arguments[j][:size]
