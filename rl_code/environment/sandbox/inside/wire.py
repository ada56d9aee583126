"""Encoding of values that cross the border of a process that is not trusted: JSON with tags.

``None``, ``bool``, ``int``, ``float``, ``str`` and ``list`` are JSON's own. Every other value is an
object with exactly one key, its tag. These types travel:

  builtin     complex, bytes, tuple, set, frozenset, dict, range, the views of a dict
  stdlib      Decimal, Fraction, date, datetime, time, timedelta, timezone
  iterators   as the items that are left, at most ITERATOR_ITEMS of them
  by name     Enum members, dataclasses and named tuples, whose classes do not travel: they arrive
              as ``Member``, ``Record`` and ``Named``
  functions   as a number by which the other side may call them, where both sides agree on that

An instance of a subclass travels as the value of the builtin type underneath, read with that type's
own methods, so neither a forged ``__eq__`` nor a forged ``__iter__`` comes along. What ``loads``
returns consists of exactly the types above, whatever the other side wrote: nothing is unpickled and
no class is looked up. Texts have budgets of depth (MAX_DEPTH) and of elements (MAX_ELEMENTS);
budgets of bytes belong to frames, and of time to the process that reads.

Runs inside the sandbox too: standard library only.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

from .values import (
    MAX_DEPTH,
    MAX_ELEMENTS,
    NAMED,
    SHAPES,
    TEXTS,
    CutShort,
    Function,
    Member,
    Named,
    Reading,
    Record,
    WireError,
    Writing,
    encode,
    fields_of,
)

# Names that users of values need are found here.
__all__ = [
    "MAX_DEPTH",
    "MAX_ELEMENTS",
    "NAMED",
    "SHAPES",
    "TEXTS",
    "CutShort",
    "Function",
    "Member",
    "Named",
    "Record",
    "WireError",
    "dumps",
    "fields_of",
    "loads",
    "read",
    "read_exactly",
    "read_frame",
    "read_json",
    "write",
    "write_frame",
]


def dumps(value: object) -> str:
    """The text of ``value``.

    Raises:
      WireError: a value of a type that does not travel; nesting deeper than MAX_DEPTH (a cycle,
        too); more than MAX_ELEMENTS elements.
    """
    return write(value)[0]


def write(value: object, functions: list[Any] | None = None) -> tuple[str, bool]:
    """The text of ``value``, and whether something in it has an ``__eq__`` that lies.

    functions: list to which functions in the value are appended; None refuses them. Raises
    WireError as ``dumps``.
    """
    writing = Writing(MAX_ELEMENTS, functions)
    try:
        data = encode(value, 0, writing)
    except WireError as error:
        error.lying = writing.lying
        raise
    return json.dumps(data, separators=(",", ":"), allow_nan=False), writing.lying


def loads(text: str | bytes, function: Callable[[int, str], Any] = Function) -> Any:
    """The value of ``text``, made of exact types.

    function: makes what stands for a function of the other side, from its number and name.

    Raises:
      WireError: the text is not one that ``dumps`` writes.
    """
    return read(text, function)[0]


def read(text: str | bytes, function: Callable[[int, str], Any] = Function) -> tuple[Any, int]:
    """``loads``, and how many elements the value has at all depths together."""
    reading = Reading(MAX_ELEMENTS, function)
    try:
        value = reading.decode(json.loads(text, parse_constant=_no_constant), 0)
    except WireError:
        raise
    except (
        ValueError,
        TypeError,
        LookupError,
        RecursionError,
        ArithmeticError,
        MemoryError,
    ) as error:
        raise WireError(f"not a value: {error}") from error
    return value, MAX_ELEMENTS - reading.left


def _no_constant(name: str) -> None:
    raise WireError(f"{name} outside a tag")


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
    head = read_exactly(channel, 4)
    if head is None:
        return None
    size = int.from_bytes(head, "little")
    if size > limit:
        raise WireError(f"a frame of {size} bytes; at most {limit} are taken")
    data = read_exactly(channel, size)
    if data is None:
        raise CutShort("the connection closed inside a frame")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"a frame that is not UTF-8: {error}") from error


def read_json(channel: socket.socket, limit: int) -> Any:
    """The value of JSON that is the next text; None when the other side has closed. Raises as
    ``read_frame``, and WireError for no JSON, or values that are nested too deeply.
    """
    frame = read_frame(channel, limit)
    try:
        return None if frame is None else json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame that is no JSON: {error}") from error


def read_exactly(channel: socket.socket, size: int) -> bytes | None:
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
