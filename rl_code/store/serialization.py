"""Converts plain Python values, numpy arrays and the types of ``rl_code.types`` to bytes and back,
bit by bit.

A value becomes a flat sequence of msgpack objects. Scalars are msgpack's own. A container is an
extension object that says its kind, and how many of the values after it are its children. A flat
sequence has no limit on depth. This matters, because a model chooses how deeply the arguments of
its calls are nested. Types come back exactly: a tuple stays a tuple, True stays True, and a float
keeps the payload of its NaN. Elements of a set are ordered by their bytes, and everything else
keeps its order, so equal values have equal bytes in every process.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import numpy as np

from rl_code import types

_SCALARS = (type(None), bool, float, str, bytes)
_SMALL_INTS = range(-(2**63), 2**64)  # msgpack's own
_CLASSES = {
    cls.__name__: cls
    for cls in (
        types.Case, types.Context, types.Fork, types.Group, types.Layer, types.Reward, types.Script,
        types.Suite, types.Task, types.Tests, types.ToolCall, types.ToolResult, types.Trajectory,
        types.Turn, types.World,
    )
}  # fmt: skip
_LIST, _TUPLE, _SET, _FROZENSET, _DICT, _RANGE, _INT, _COMPLEX, ARRAY, _NUMPY_SCALAR, _CLASS = (
    range(1, 12)
)
_SEQUENCES = {list: _LIST, tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
_COUNT = struct.Struct("<Q")
_COMPLEX_PARTS = struct.Struct("<dd")


def dumps(value: Any) -> bytes:
    """The bytes of a value.

    Understands None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, range,
    mappings (read back as dicts), numpy arrays and scalars of numbers or bools, and the types of
    ``rl_code.types`` but Batch. Raises TypeError for anything else, also for subclasses of builtin
    types.
    """
    packer = msgpack.Packer(strict_types=True, unicode_errors="surrogatepass")
    parts = []
    # A stack instead of recursion, for values of any depth. Only sets recurse: their elements have
    # to be bytes before they can be ordered.
    waiting = [value]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind in _SCALARS or (kind is int and value in _SMALL_INTS):
            parts.append(packer.pack(value))
        else:
            code, data, children = _open(value)
            parts.append(packer.pack(msgpack.ExtType(code, data)))
            if code in (_SET, _FROZENSET):
                parts += sorted(map(dumps, children))
            else:
                waiting += reversed(children)
    return b"".join(parts)


def loads(data: bytes) -> Any:
    """The value whose bytes are ``data``. Raises ValueError when they are not what ``dumps``
    wrote.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(data)), unicode_errors="surrogatepass")
    unpacker.feed(data)
    root: list[Any] = []
    # Containers whose children have not all come yet, the innermost last: what builds the value,
    # how many children it takes, and those that there are.
    opened: list[tuple[Callable[[list[Any]], Any], int, list[Any]]] = [(list, 1, root)]
    try:
        for value in unpacker:
            if isinstance(value, msgpack.ExtType):
                opened.append((*_BUILDERS[value.code](value.data), []))
            else:
                opened[-1][2].append(value)
            while len(opened) > 1 and len(opened[-1][2]) == opened[-1][1]:
                build, _, children = opened.pop()
                opened[-1][2].append(build(children))
    except (ValueError, TypeError, KeyError, struct.error, msgpack.UnpackException) as error:
        raise ValueError(f"not a value: {type(error).__name__}: {error}") from error
    if len(opened) != 1 or len(root) != 1:
        raise ValueError(f"not a value: {len(root)} values, {len(opened) - 1} of them not whole")
    return root[0]


def _open(value: Any) -> tuple[int, bytes, list[Any]]:
    """Code and data of the extension object of a value, and the values that follow it."""
    kind = type(value)
    if kind is int:
        return _INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), []
    if kind in _SEQUENCES:
        return _SEQUENCES[kind], _COUNT.pack(len(value)), list(value)
    if kind.__name__ in _CLASSES and kind is _CLASSES[kind.__name__]:
        fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
        children = [
            child
            for field, item in fields
            if item is not None or not field.metadata.get("only_where_set")
            for child in (field.name, item)
        ]
        return _CLASS, _COUNT.pack(len(children)) + kind.__name__.encode(), children
    if isinstance(value, Mapping):
        return (
            _DICT,
            _COUNT.pack(2 * len(value)),
            [child for pair in value.items() for child in pair],
        )
    if kind is range:
        return _RANGE, b"", [value.start, value.stop, value.step]
    if kind is complex:
        return _COMPLEX, _COMPLEX_PARTS.pack(value.real, value.imag), []
    if kind is np.ndarray or isinstance(value, np.generic):
        return _open_array(value)
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be recorded: {repr(value)[:80]}"
    )


def _open_array(value: np.ndarray | np.generic) -> tuple[int, bytes, list[Any]]:
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise TypeError(f"an array of {array.dtype} cannot be recorded: {repr(value)[:80]}")
    code = ARRAY if isinstance(value, np.ndarray) else _NUMPY_SCALAR
    return code, " ".join([array.dtype.str, *map(str, array.shape)]).encode(), [array.tobytes()]


# By code: from the data of an extension object to what builds the value from its children, and how
# many those are.


def _counted(
    build: Callable[[list[Any]], Any],
) -> Callable[[bytes], tuple[Callable[[list[Any]], Any], int]]:
    return lambda data: (build, *_COUNT.unpack(data))


def _dict(children: list[Any]) -> dict[Any, Any]:
    return dict(zip(children[::2], children[1::2], strict=True))


def _class(data: bytes) -> tuple[Callable[[list[Any]], Any], int]:
    cls = _CLASSES[data[_COUNT.size :].decode()]
    (count,) = _COUNT.unpack(data[: _COUNT.size])
    return lambda children: cls(**_dict(children)), count


def _array(data: bytes) -> tuple[Callable[[list[Any]], Any], int]:
    dtype, *shape = data.decode().split(" ")
    return (
        lambda children: np.frombuffer(children[0], dtype).reshape([int(n) for n in shape]).copy(),
        1,
    )


_BUILDERS: dict[int, Callable[[bytes], tuple[Callable[[list[Any]], Any], int]]] = {
    _LIST: _counted(list),
    _TUPLE: _counted(tuple),
    _SET: _counted(set),
    _FROZENSET: _counted(frozenset),
    _DICT: _counted(_dict),
    _RANGE: lambda data: (lambda children: range(*children), 3),
    _INT: lambda data: (lambda children: int.from_bytes(data, "little", signed=True), 0),
    _COMPLEX: lambda data: (lambda children: complex(*_COMPLEX_PARTS.unpack(data)), 0),
    ARRAY: _array,
    _NUMPY_SCALAR: lambda data: (lambda children: np.frombuffer(children[0], data.decode())[0], 1),
    _CLASS: _class,
}
