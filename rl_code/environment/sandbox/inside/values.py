"""The values that cross the border of a process that is not trusted, and how each is written.

``wire`` says which types travel, and has the functions that others use. Here stand the types that
stand for what does not travel itself, and the tables from a type to what JSON can write and back.

Runs inside the sandbox too: standard library only.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import itertools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

from . import nodes

MAX_DEPTH = 100
MAX_ELEMENTS = 200_000
ITERATOR_ITEMS = 10_000
SMALL_INT = 1 << 53
# Python prints no longer ones (sys.int_info.default_max_str_digits), and whoever receives a value
# may print it.
MAX_INT_BITS = 14_000
SCALARS = (bool, int, float, str)
WHOLE = slice(None)
FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
)
KEYS, VALUES, ITEMS = type({}.keys()), type({}.values()), type({}.items())
MICROSECOND = datetime.timedelta(microseconds=1)


class WireError(ValueError):
    """A value that cannot be sent, or a text that is not a value. The message says which.

    lying: something in the value that cannot be sent has an ``__eq__`` that lies.
    """

    lying = False


class CutShort(WireError):
    """The other side closed inside a frame."""


@dataclasses.dataclass(frozen=True)
class Member:
    """A member of an Enum. kind: the name of its class."""

    kind: str
    name: str
    value: Any


class Record:
    """A dataclass's instance, whose fields are attributes. Equal to a dataclass's instance whose
    class has the same name and whose fields have the same values.
    """

    def __init__(self, kind: str, fields: dict[str, Any]):
        self.__dict__.update(fields)
        self.__dict__["__kind__"] = kind

    def __eq__(self, other: object) -> bool:
        if type(other) is Record:
            return self.__dict__ == other.__dict__
        if not dataclasses.is_dataclass(other) or isinstance(other, type):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(other)]
        if type(other).__name__ != self.__dict__["__kind__"]:
            return False
        return fields_of(self) == {name: getattr(other, name) for name in names}

    __hash__ = None  # as of a dataclass that is not frozen

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in fields_of(self).items())
        return f"{self.__dict__['__kind__']}({fields})"


def fields_of(record: Record) -> dict[str, Any]:
    """Field -> value of a record. A function, since a field may have any name."""
    return {name: value for name, value in record.__dict__.items() if name != "__kind__"}


class Named(tuple):
    """A named tuple: equal to the tuple of its items, which are also attributes."""

    def __new__(cls, kind: str, names: list[str], items: list[Any]) -> Named:
        self = super().__new__(cls, items)
        self.__dict__.update(zip(names, items, strict=True))
        self.__dict__["__kind__"] = kind, names
        return self


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of the other side that cannot be called from here. It equals nothing else."""

    number: int
    name: str


@dataclasses.dataclass
class Writing:
    """State of one call of ``write``."""

    # Elements that may still be written.
    left: int
    # Functions that were written; the other side names them by their index. None refuses functions.
    functions: list[Any] | None
    # True if a value said that it equals an object which it does not equal.
    lying: bool = False


def encode(value: Any, depth: int, writing: Writing) -> Any:
    """``value`` as what ``json`` can write."""
    if depth > MAX_DEPTH:
        raise WireError(f"a value nested deeper than {MAX_DEPTH}")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind in ENCODERS:
        return ENCODERS[kind](value, depth + 1, writing)
    writing.lying = writing.lying or _lies(value)
    for base in kind.__mro__:
        if base is tuple and type(fields := getattr(kind, "_fields", None)) is tuple:
            items = encode_all(tuple.__getitem__(value, WHOLE), depth + 1, writing)
            return {"named": [kind.__name__, [str(name) for name in fields], items]}
        if base in ENCODERS:
            return ENCODERS[base](value, depth + 1, writing)
    if kind in FUNCTIONS and writing.functions is not None:
        writing.functions.append(value)
        name = str(getattr(value, "__name__", kind.__name__))
        return {"function": [len(writing.functions) - 1, name]}
    if nodes.is_node(value):
        values = nodes.values_of(value, MAX_ELEMENTS)
        if values is None:
            raise WireError(f"a {kind.__name__} without end")
        return _record(kind.__name__, {nodes.VALUES: values}, depth + 1, writing)
    if dataclasses.is_dataclass(kind):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(kind)}
        return _record(kind.__name__, fields, depth + 1, writing)
    if hasattr(kind, "__next__"):
        items = list(itertools.islice(value, ITERATOR_ITEMS + 1))
        tag = "iterator" if len(items) <= ITERATOR_ITEMS else "endless"
        return {tag: encode_all(items[:ITERATOR_ITEMS], depth + 1, writing)}
    raise WireError(f"a {kind.__name__} is not a plain value")


def encode_all(items: Any, depth: int, writing: Writing) -> list[Any]:
    """The elements of a container, which count against the budget."""
    encoded = [encode(item, depth, writing) for item in items]
    writing.left -= len(encoded)
    if writing.left < 0:
        raise WireError(f"a value of more than {MAX_ELEMENTS} elements")
    return encoded


def _lies(value: Any) -> bool:
    """True if ``value`` says that it equals an object that nothing else equals, or a builtin value
    that it does not hold. Only a value whose class writes its own ``__eq__`` can.
    """
    others: list[Any] = [object()]
    for base, other in _OTHERS.items():
        if base in type(value).__mro__:
            others.append(other(value))
    try:
        return any(bool(value == other) for other in others)
    except BaseException:  # code of the candidate's, which may raise anything
        return False


_OTHERS: dict[type, Callable[[Any], Any]] = {
    int: lambda value: int.__index__(value) + 1_000_003,
    float: lambda value: f"not {float.__float__(value)}",
    str: lambda value: str.__str__(value) + "\0",
    list: lambda value: [*list.__getitem__(value, WHOLE), None],
    tuple: lambda value: (*tuple.__getitem__(value, WHOLE), None),
    dict: lambda value: {object(): None},
}


def _encode_int(value: Any, depth: int, writing: Writing) -> Any:
    number = int.__index__(value)
    if number.bit_length() > MAX_INT_BITS:
        raise WireError(f"an int of {number.bit_length()} bits; at most {MAX_INT_BITS} are sent")
    return number if -SMALL_INT <= number <= SMALL_INT else {"int": hex(number)}


def _encode_float(value: Any, depth: int, writing: Writing) -> Any:
    number = float.__float__(value)
    return number if math.isfinite(number) else {"float": repr(number)}


def _encode_dict(value: Any, depth: int, writing: Writing) -> Any:
    pairs = list(dict.items(value))
    keys = encode_all((key for key, _ in pairs), depth, writing)
    values = encode_all((item for _, item in pairs), depth, writing)
    writing.left -= len(pairs)  # the reader counts pairs, keys and values
    return {"dict": [list(pair) for pair in zip(keys, values, strict=True)]}


def _record(kind: str, fields: dict[str, Any], depth: int, writing: Writing) -> Any:
    return {"record": [kind, list(fields), encode_all(fields.values(), depth, writing)]}


def _tagged(tag: str, items: Callable[[Any], Any]) -> Callable[[Any, int, Writing], Any]:
    """An encoder of the elements that ``items`` reads from a value."""
    return lambda value, depth, writing: {tag: encode_all(items(value), depth, writing)}


def _clock(value: Any) -> list[Any]:
    """Hour to microsecond, fold, and the offset from UTC in microseconds or None."""
    offset = value.utcoffset()
    shift = None if offset is None else offset // MICROSECOND
    return [value.hour, value.minute, value.second, value.microsecond, value.fold, shift]


# From an exact type to what json can write; an encoder takes a value, the depth inside it, and the
# state of the writing.
ENCODERS: dict[type, Callable[[Any, int, Writing], Any]] = {
    int: _encode_int,
    float: _encode_float,
    str: lambda value, depth, writing: str.__str__(value),
    list: lambda value, depth, writing: encode_all(list.__getitem__(value, WHOLE), depth, writing),
    tuple: _tagged("tuple", lambda value: tuple.__getitem__(value, WHOLE)),
    dict: _encode_dict,
    set: _tagged("set", set.__iter__),
    frozenset: _tagged("frozenset", frozenset.__iter__),
    bytes: lambda value, depth, writing: {"bytes": bytes.hex(value)},
    complex: _tagged(
        "complex", lambda value: (repr(complex.__complex__(value).real), repr(value.imag))
    ),
    range: _tagged("range", lambda value: (value.start, value.stop, value.step)),
    KEYS: _tagged("keys", list),
    VALUES: _tagged("values", list),
    ITEMS: _tagged("items", list),
    decimal.Decimal: lambda value, depth, writing: {"decimal": decimal.Decimal.__str__(value)},
    fractions.Fraction: _tagged("fraction", lambda value: (value.numerator, value.denominator)),
    datetime.timedelta: _tagged(
        "timedelta", lambda value: (value.days, value.seconds, value.microseconds)
    ),
    datetime.datetime: _tagged(
        "datetime", lambda value: (value.year, value.month, value.day, *_clock(value))
    ),
    datetime.date: _tagged("date", lambda value: (value.year, value.month, value.day)),
    datetime.time: _tagged("time", _clock),
    datetime.timezone: _tagged("timezone", lambda value: (value.utcoffset(None) // MICROSECOND,)),
    # Values that came from the other side may go back to it.
    Record: lambda value, depth, writing: _record(
        value.__dict__["__kind__"], fields_of(value), depth, writing
    ),
    Named: lambda value, depth, writing: {
        "named": [*value.__dict__["__kind__"], encode_all(tuple(value), depth, writing)]
    },
    Member: lambda value, depth, writing: {
        "member": [value.kind, value.name, encode(value.value, depth, writing)]
    },
    enum.Enum: lambda value, depth, writing: {
        "member": [type(value).__name__, str(value.name), encode(value.value, depth, writing)]
    },
}


class Reading:
    """One call of ``loads``. left: elements that may still be read."""

    def __init__(self, left: int, function: Callable[[int, str], Any]):
        self.left = left
        self.function = function

    def decode(self, data: Any, depth: int) -> Any:
        """The value that ``encode`` wrote as ``data``."""
        if data is None or type(data) in SCALARS:
            return data
        if depth > 2 * MAX_DEPTH:
            raise WireError(f"a value nested deeper than {MAX_DEPTH}")
        if type(data) is list:
            return self.all(data, depth + 1)
        if len(data) != 1:
            raise WireError(f"an object with {len(data)} keys instead of one tag")
        ((tag, content),) = data.items()
        if tag in SHAPES:
            return SHAPES[tag](self.all(content, depth + 1))
        if tag in TEXTS:
            return TEXTS[tag](self.text(content))
        if tag in NAMED:
            return getattr(self, f"_{tag}")(content, depth + 1)
        raise WireError(f"the unknown tag {tag[:40]!r}")

    def all(self, content: Any, depth: int) -> list[Any]:
        """The values of a list of elements."""
        if type(content) is not list:
            raise WireError("a tag without its list of elements")
        self.left -= len(content)
        if self.left < 0:
            raise WireError(f"a value of more than {MAX_ELEMENTS} elements")
        return [self.decode(item, depth) for item in content]

    def text(self, content: Any) -> str:
        """A tag's content that must be a text."""
        if type(content) is not str:
            raise WireError("a tag without its text")
        return content

    def _names(self, content: Any) -> list[str]:
        """A list of names of fields, each once."""
        if type(content) is not list or len(set(map(self.text, content))) != len(content):
            raise WireError("fields without their names")
        return content

    def _parts(self, content: Any, count: int) -> list[Any]:
        """A tag's content that must have ``count`` parts."""
        if type(content) is not list or len(content) != count:
            raise WireError(f"a tag without its {count} parts")
        return content

    def _member(self, content: Any, depth: int) -> Member:
        kind, name, value = self._parts(content, 3)
        return Member(self.text(kind), self.text(name), self.decode(value, depth))

    def _record(self, content: Any, depth: int) -> Record:
        kind, names, items = self._parts(content, 3)
        fields = dict(zip(self._names(names), self.all(items, depth), strict=True))
        return Record(self.text(kind), fields)

    def _named(self, content: Any, depth: int) -> Named:
        kind, names, items = self._parts(content, 3)
        return Named(self.text(kind), self._names(names), self.all(items, depth))

    def _function(self, content: Any, depth: int) -> Any:
        number, name = self._parts(content, 2)
        if type(number) is not int:
            raise WireError("a function without its number")
        return self.function(number, self.text(name))


def _int(text: str) -> int:
    number = int(text, 16)
    if number.bit_length() > MAX_INT_BITS:
        raise WireError(f"an int of {number.bit_length()} bits; at most {MAX_INT_BITS} are taken")
    return number


def _fraction(parts: list[Any]) -> fractions.Fraction:
    # a text such as "1e999999" would be costly to turn into a fraction
    if [type(part) for part in parts] != [int, int]:
        raise WireError("a fraction without its two ints")
    return fractions.Fraction(*parts)


def _zone(shift: int | None) -> datetime.timezone | None:
    return None if shift is None else datetime.timezone(shift * MICROSECOND)


def _endless(items: list[Any]) -> Iterator[Any]:
    """The first items of an iterator that has more."""
    yield from items
    raise RuntimeError(f"only the first {ITERATOR_ITEMS} items of an iterator travel")


# From a tag's text to the value.
TEXTS: dict[str, Callable[[str], Any]] = {
    "int": _int,
    "float": float,
    "bytes": bytes.fromhex,
    "decimal": decimal.Decimal,
}
# From a tag's elements to the value.
SHAPES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "set": set,
    "frozenset": frozenset,
    "complex": lambda parts: complex(*map(float, parts)),
    "range": lambda parts: range(*parts),
    "keys": lambda items: dict.fromkeys(items).keys(),
    "values": lambda items: dict(enumerate(items)).values(),
    "items": lambda pairs: dict(pairs).items(),
    "iterator": iter,
    "endless": _endless,
    "fraction": _fraction,
    "date": lambda parts: datetime.date(*parts),
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "timezone": lambda parts: datetime.timezone(*(shift * MICROSECOND for shift in parts)),
    "datetime": lambda p: datetime.datetime(*p[:7], tzinfo=_zone(p[8]), fold=p[7]),
    "time": lambda p: datetime.time(*p[:4], tzinfo=_zone(p[5]), fold=p[4]),
}
NAMED = ("member", "record", "named", "function")
