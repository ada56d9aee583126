"""How values cross the border of a process that is not trusted: JSON with tags, and nothing but
builtin types.

``None``, ``bool``, ``int``, ``float``, ``str`` and ``list`` are JSON's own; every other type is an
object with exactly one key, its tag. An instance of a subclass travels as the builtin value
underneath, read with the builtin type's own methods, so neither a forged ``__eq__`` nor a forged
``__iter__`` comes along. What ``loads`` returns consists of exact builtin types whatever the other
side wrote.

Runs inside the sandbox too: standard library only.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100
SMALL_INT = 1 << 53
# Python prints no longer ones (sys.int_info.default_max_str_digits), and whoever receives a value
# may print it.
MAX_INT_BITS = 14_000
SCALARS = (bool, int, float, str)
WHOLE = slice(None)


class WireError(ValueError):
    """A value that cannot be sent, or a text that is not a value. The message says which."""


def dumps(value: object) -> str:
    """The text of ``value``.

    Raises:
      WireError: a type outside None, bool, int, float, complex, str, bytes, list, tuple, set,
        frozenset, dict, range and their subclasses; nesting deeper than MAX_DEPTH (a cycle, too).
    """
    return json.dumps(_encode(value, 0), separators=(",", ":"), allow_nan=False)


def loads(text: str | bytes) -> Any:
    """The value of ``text``, made of exact builtin types.

    Raises:
      WireError: the text is not one that ``dumps`` writes.
    """
    try:
        return _decode(json.loads(text, parse_constant=_no_constant), 0)
    except WireError:
        raise
    except (ValueError, TypeError, RecursionError, OverflowError, MemoryError) as error:
        raise WireError(f"not a value: {error}") from error


def _no_constant(name: str) -> None:
    raise WireError(f"{name} outside a tag")


def _encode(value: object, depth: int) -> Any:
    """``value`` as what ``json`` can write."""
    if depth > MAX_DEPTH:
        raise WireError(f"a value nested deeper than {MAX_DEPTH}")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind not in ENCODERS:
        kind = next((base for base in kind.__mro__ if base in ENCODERS), None)
        if kind is None:
            raise WireError(f"a {type(value).__name__} is not a plain value")
    return ENCODERS[kind](value, depth + 1)


def _encode_int(value: Any, depth: int) -> Any:
    number = int.__index__(value)
    if number.bit_length() > MAX_INT_BITS:
        raise WireError(f"an int of {number.bit_length()} bits; at most {MAX_INT_BITS} are sent")
    return number if -SMALL_INT <= number <= SMALL_INT else {"int": hex(number)}


def _encode_float(value: Any, depth: int) -> Any:
    number = float.__float__(value)
    return number if math.isfinite(number) else {"float": repr(number)}


def _sequence(tag: str, items: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
    """An encoder of the elements that ``items`` reads from a value."""
    return lambda value, depth: {tag: [_encode(item, depth) for item in items(value)]}


ENCODERS: dict[type, Callable[[Any, int], Any]] = {
    int: _encode_int,
    float: _encode_float,
    str: lambda value, depth: str.__str__(value),
    list: lambda value, depth: [_encode(item, depth) for item in list.__getitem__(value, WHOLE)],
    tuple: _sequence("tuple", lambda value: tuple.__getitem__(value, WHOLE)),
    dict: lambda value, depth: {
        "dict": [[_encode(k, depth), _encode(v, depth)] for k, v in dict.items(value)]
    },
    set: _sequence("set", set.__iter__),
    frozenset: _sequence("frozenset", frozenset.__iter__),
    bytes: lambda value, depth: {"bytes": bytes.hex(value)},
    complex: lambda value, depth: {
        "complex": [repr(complex.__complex__(value).real), repr(value.imag)]
    },
    range: lambda value, depth: {
        "range": [_encode(n, depth) for n in (value.start, value.stop, value.step)]
    },
}


def _decode(data: Any, depth: int) -> Any:
    """The value that ``_encode`` wrote as ``data``."""
    if depth > 2 * MAX_DEPTH:
        raise WireError(f"a value nested deeper than {MAX_DEPTH}")
    if data is None or type(data) in SCALARS:
        return data
    if type(data) is list:
        return [_decode(item, depth + 1) for item in data]
    if len(data) != 1:
        raise WireError(f"an object with {len(data)} keys instead of one tag")
    ((tag, content),) = data.items()
    if tag not in DECODERS:
        raise WireError(f"the unknown tag {tag[:40]!r}")
    return DECODERS[tag](content, depth + 1)


def _small_enough(number: int) -> int:
    if number.bit_length() > MAX_INT_BITS:
        raise WireError(f"an int of {number.bit_length()} bits; at most {MAX_INT_BITS} are taken")
    return number


def _elements(content: Any, depth: int) -> list[Any]:
    if type(content) is not list:
        raise WireError("a tag without its list of elements")
    return [_decode(item, depth) for item in content]


DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "int": lambda content, depth: _small_enough(int(content, 16)),
    "float": lambda content, depth: float(content),
    "tuple": lambda content, depth: tuple(_elements(content, depth)),
    "dict": lambda content, depth: dict(_elements(content, depth)),
    "set": lambda content, depth: set(_elements(content, depth)),
    "frozenset": lambda content, depth: frozenset(_elements(content, depth)),
    "bytes": lambda content, depth: bytes.fromhex(content),
    "complex": lambda content, depth: complex(*(float(part) for part in content)),
    "range": lambda content, depth: range(*_elements(content, depth)),
}


def write_frame(channel: socket.socket, text: str) -> None:
    """Sends one text. Raises OSError when the other side is gone or a timeout set on the socket
    passes.
    """
    data = text.encode()
    channel.sendall(len(data).to_bytes(4, "little") + data)


def read_frame(channel: socket.socket, limit: int) -> str | None:
    """The next text; None when the other side has closed.

    Raises:
      WireError: a frame longer than ``limit`` bytes, cut short, or not UTF-8.
      OSError: TimeoutError when a timeout set on the socket passes, or the connection broke.
    """
    head = _read_exactly(channel, 4)
    if head is None:
        return None
    size = int.from_bytes(head, "little")
    if size > limit:
        raise WireError(f"a frame of {size} bytes; at most {limit} are taken")
    data = _read_exactly(channel, size)
    if data is None:
        raise WireError("the connection closed inside a frame")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"a frame that is not UTF-8: {error}") from error


def _read_exactly(channel: socket.socket, size: int) -> bytes | None:
    """``size`` bytes, or None when the connection closed before they came."""
    parts = []
    missing = size
    while missing:
        part = channel.recv(min(missing, 1 << 20))
        if not part:
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
