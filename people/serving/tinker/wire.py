"""Protocol buffers of the client ``tinker`` 0.38: requests with data, results with arrays.

Field numbers and meanings are those of the client's ``tinker_public_pb2``. The encoding is
https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# Wire types of protocol buffers: a varint, 8 bytes, bytes with their length, 4 bytes.
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
# The client's numbers of dtypes.
_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
# The client's numbers of the reasons why a message ends.
STOP, LENGTH = 0, 1


@dataclasses.dataclass(frozen=True)
class Datum:
    """One sequence. tokens: int32 [N]. inputs: arrays of the loss by name, [N] or [N, K]."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Forward:
    """A request for a loss, and for its gradient unless ``forward_only``."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss: str
    config: Mapping[str, float | str]
    forward_only: bool


def read_forward(body: bytes) -> Forward:
    """Reads a request of ``/api/v1/forward_backward``. Raises ValueError for what is none, and for
    chunks that are not tokens.
    """
    found = _parse(body)
    config: dict[str, float | str] = {}
    # the client writes numbers in both maps
    for entry in [*found.get(5, ()), *found.get(7, ())]:
        key, value = _entry(entry)
        if isinstance(value, bytes):
            both = _parse(value)
            value = _text(both[2][-1]) if 2 in both else both.get(1, [0.0])[-1]
        config[key] = value
    return Forward(
        model_id=_text(_last(found, 1, b"")),
        seq_id=_last(found, 2, 0),
        data=[_read_datum(each, index) for index, each in enumerate(found.get(3, ()))],
        loss=_text(_last(found, 4, b"")),
        config=config,
        forward_only=bool(_last(found, 6, 0)),
    )


def _read_datum(data: bytes, index: int) -> Datum:
    found = _parse(data)
    tokens = []
    for chunk in found.get(1, ()):
        kinds = _parse(chunk)
        if 1 not in kinds:
            other = {2: "an image", 3: "audio"}.get(next(iter(kinds), 0), "nothing known")
            raise ValueError(f"data[{index}] has {other} in its model_input; this model reads text")
        tokens.append(_array(_last(_parse(kinds[1][-1]), 1, b""), np.dtype("<i4")))
    inputs = {}
    for entry in found.get(2, ()):
        key, value = _entry(entry)
        inputs[key] = _read_tensor(value, f"data[{index}].loss_fn_inputs[{key!r}]")
    return Datum(np.concatenate(tokens or [np.zeros(0, np.int32)]).astype(np.int32), inputs)


def _read_tensor(data: Any, where: str) -> np.ndarray:
    if not isinstance(data, bytes):
        raise ValueError(f"{where} is no tensor")
    found = _parse(data)
    number = _last(found, 3, 0)
    if number not in _DTYPES:
        raise ValueError(f"{where}: dtype number {number} must be one of {sorted(_DTYPES)}")
    shape: list[int] = []
    for each in found.get(4, ()):
        shape += [each] if isinstance(each, int) else list(_varints(each))
    if 2 not in found:
        values = _array(_last(found, 1, b""), _DTYPES[number])
        wanted = shape or [len(values)]
    else:
        parts = _parse(found[2][-1])
        values, rows, columns = (
            _array(_last(parts, field, b""), dtype)
            for field, dtype in ((1, _DTYPES[number]), (2, _DTYPES[2]), (3, _DTYPES[2]))
        )
        values, wanted = _dense(values, rows, columns, shape, where), shape
    if int(np.prod(wanted)) != values.size:
        raise ValueError(f"{where} has {values.size} values and the shape {wanted}")
    return values.reshape(wanted)


def _dense(values, rows, columns, shape: Sequence[int], where: str) -> np.ndarray:
    """A matrix of compressed rows; 0 where it lists nothing. Raises ValueError."""
    counts = np.diff(rows)
    good = len(shape) == 2 and len(rows) == shape[0] + 1 and bool((counts >= 0).all())
    good = good and int(counts.sum()) == len(values) == len(columns)
    if not good or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise ValueError(f"{where} is no matrix of compressed rows of the shape {list(shape)}")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def write_forward_output(
    outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]
) -> bytes:
    """A ``ForwardBackwardOutput``. outputs: for each datum its arrays by name, float32 [N] or
    [N, K]. Those of a record have one shape but for N, so each K has a record of its own.
    """
    records = b""
    start = 0
    while start < len(outputs):
        trailing = {name: x.shape[1:] for name, x in outputs[start].items()}
        end = start
        while end < len(outputs) and trailing == {
            name: x.shape[1:] for name, x in outputs[end].items()
        }:
            end += 1
        records += _bytes(2, _record(outputs[start:end], trailing))
        start = end
    found = _bytes(1, b"ArrayRecord") + records
    for name, value in metrics.items():
        found += _bytes(3, _bytes(1, name.encode()) + _double(2, value))
    return found


def _record(outputs: Sequence[Mapping[str, np.ndarray]], trailing: Mapping[str, tuple]) -> bytes:
    record = _bytes(1, b"ArrayRecord")
    for name, shape in trailing.items():
        parts = [np.ascontiguousarray(each[name], "<f4").tobytes() for each in outputs]
        offsets = np.cumsum([0, *map(len, parts)]).astype("<i8").tobytes()
        array = _bytes(1, b"".join(parts)) + _bytes(2, offsets) + _int(3, 1)
        array += b"".join(_int(4, size) for size in shape)
        record += _bytes(2, _bytes(1, name.encode()) + _bytes(2, array))
    return record + _int(3, len(outputs))


def write_samples(
    sequences: Sequence[tuple[int, Sequence[int], Sequence[float]]],
    prompt_logprobs: np.ndarray | None,
) -> bytes:
    """A ``SampleResponse``. sequences: (STOP or LENGTH, tokens, log-probabilities) of each.
    prompt_logprobs: float32, NaN where there is none; None where nobody asked.
    """
    found = b""
    for reason, tokens, logprobs in sequences:
        one = _int(1, reason) + _bytes(2, np.asarray(tokens, "<i4").tobytes())
        found += _bytes(1, one + _bytes(3, np.asarray(logprobs, "<f4").tobytes()))
    if prompt_logprobs is not None:
        found += _bytes(2, np.asarray(prompt_logprobs, "<f4").tobytes())
    return found


# --- The encoding -------------------------------------------------------------------------------


def _parse(data: bytes) -> dict[int, list]:
    """Values of a message by the number of their field. Raises ValueError."""
    found: dict[int, list] = {}
    for number, value in _fields(data):
        found.setdefault(number, []).append(value)
    return found


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
        elif kind in (_EIGHT, _FOUR):
            size, form = (8, "<d") if kind == _EIGHT else (4, "<f")
            if at + size > len(data):
                raise ValueError("the message ends inside a field")
            (value,) = struct.unpack_from(form, data, at)
            at += size
        elif kind == _BYTES:
            size, at = _varint(data, at)
            value = data[at : at + size]
            if len(value) != size:
                raise ValueError("the message ends inside a field")
            at += size
        else:
            raise ValueError(f"field {key >> 3} has the unknown wire type {kind}")
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for count in range(10):
        if at >= len(data):
            raise ValueError("the message ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            value &= 2**64 - 1
            return value - 2**64 if value >= 2**63 else value, at
    raise ValueError("a number has more than 10 bytes")


def _varints(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _last(found: Mapping[int, list], number: int, default: Any) -> Any:
    value = found[number][-1] if number in found else default
    if type(value) is not type(default):
        raise ValueError(f"field {number} must hold {type(default).__name__}")
    return value


def _entry(data: Any) -> tuple[str, Any]:
    """Key and value of an entry of a map."""
    if not isinstance(data, bytes):
        raise ValueError("an entry of a map must hold bytes")
    found = _parse(data)
    return _text(_last(found, 1, b"")), found.get(2, [b""])[-1]


def _text(value: bytes) -> str:
    return value.decode("utf-8")  # UnicodeDecodeError is a ValueError


def _array(data: bytes, dtype: np.dtype) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no whole number of {dtype} values")
    return np.frombuffer(data, dtype)


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _int(number: int, value: int) -> bytes:
    return _number(number << 3 | _VARINT) + _number(value)


def _bytes(number: int, value: bytes) -> bytes:
    return _number(number << 3 | _BYTES) + _number(len(value)) + value


def _double(number: int, value: float) -> bytes:
    return _number(number << 3 | _EIGHT) + struct.pack("<d", value)
