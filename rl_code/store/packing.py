"""Packs the file of a group so that a compressor finds what repeats, and unpacks it, bit for bit.

A group's file (``group_records``) is a stream of small values between which arrays of a few hundred
bytes stand. Packed, the values stand together, and so do all arrays of one dtype. Their bytes are
sorted by significance: first the lowest byte of every element, then the next. Token ids, versions
and masks then are long runs of equal bytes, and so are the exponents of log-probabilities. Nothing
is rounded.

Packing looks at arrays only, whatever dataclass they are a field of. A field that is added to a
trajectory needs no change here.
"""

from __future__ import annotations

import math

import msgpack
import numpy as np

from rl_code.store import serialization
from rl_code.store.group_records import START


def pack(data: bytes) -> bytes:
    """The packed form of a group's file. What is no such file is packed as it is."""
    try:
        stream, columns = _split(data[START:])
        packed = msgpack.packb([data[:START], stream, columns])
        if unpack(packed) == data:
            return packed
    except (ValueError, TypeError, msgpack.UnpackException):
        pass  # no stream of values, such as a damaged file
    return msgpack.packb([data])


def unpack(packed: bytes) -> bytes:
    """The value that ``pack`` was given. Raises ValueError for bytes that it did not return."""
    try:
        parts = msgpack.unpackb(packed)
        if len(parts) == 1:
            return bytes(parts[0])
        start, stream, columns = parts
        return start + _join(stream, columns)
    # whatever damaged bytes make of themselves
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        msgpack.UnpackException,
    ) as error:
        raise ValueError(f"not a packed group: {type(error).__name__}: {error}") from error


def _split(stream: bytes) -> tuple[bytes, dict[str, bytes]]:
    """The values without the bytes of arrays, and those bytes by dtype."""
    parts = []
    arrays: dict[str, list[bytes]] = {}
    begin = 0  # of the values since the last array
    unpacker = _unpacker(stream)
    for value in unpacker:
        if isinstance(value, msgpack.ExtType) and value.code == serialization.ARRAY:
            parts.append(stream[begin : unpacker.tell()])
            arrays.setdefault(_array(value)[0], []).append(unpacker.unpack())
            begin = unpacker.tell()
    parts.append(stream[begin:])
    columns = {dtype: b"".join(found) for dtype, found in arrays.items()}
    return b"".join(parts), {dtype: _by_byte(dtype, data) for dtype, data in columns.items()}


def _join(stream: bytes, columns: dict[str, bytes]) -> bytes:
    """The stream that ``_split`` took apart."""
    flat = {dtype: _by_element(dtype, data) for dtype, data in columns.items()}
    used = dict.fromkeys(flat, 0)
    parts = []
    begin = 0
    unpacker = _unpacker(stream)
    for value in unpacker:
        if isinstance(value, msgpack.ExtType) and value.code == serialization.ARRAY:
            dtype, size = _array(value)
            first = used[dtype]
            used[dtype] = first + size
            parts += [
                stream[begin : unpacker.tell()],
                msgpack.packb(flat[dtype][first : used[dtype]]),
            ]
            begin = unpacker.tell()
    return b"".join([*parts, stream[begin:]])


def _unpacker(stream: bytes) -> msgpack.Unpacker:
    unpacker = msgpack.Unpacker(max_buffer_size=len(stream) + 1, unicode_errors="surrogatepass")
    unpacker.feed(stream)
    return unpacker


def _array(value: msgpack.ExtType) -> tuple[str, int]:
    """Dtype and bytes of an array, from the object that stands before its bytes."""
    dtype, *shape = value.data.decode().split(" ")
    return dtype, np.dtype(dtype).itemsize * math.prod(map(int, shape))


def _by_byte(dtype: str, data: bytes) -> bytes:
    """The elements' bytes, those of one significance together."""
    return np.frombuffer(data, np.uint8).reshape(-1, np.dtype(dtype).itemsize).T.tobytes()


def _by_element(dtype: str, data: bytes) -> bytes:
    return np.frombuffer(data, np.uint8).reshape(np.dtype(dtype).itemsize, -1).T.tobytes()
