"""Changes of arrays, most of whose elements are 0: how many 0s stand before each other element, and
its bits.

At the learning rates of reinforcement learning an update changes few bfloat16 numbers of a model.
A general compressor spends two bytes or more on where each of them is. One byte for each gap, which
it then codes by how often gaps occur, is near to the entropy of the places.

A change is a string of bytes, to be compressed: the number of pieces and, for each of them, how
many gaps and elements it has, as 64-bit integers; the gaps; and the elements, first their lowest
bytes, then the next ones.
"""

from __future__ import annotations

import numpy as np

# A gap of this many 0s with no element behind it, for gaps that are longer.
_SKIP = 255
# Elements that are looked at together, so that the places of a dense change fit into memory.
_PIECE = 2**24
_COUNT = np.dtype("<i8")


def encode(change: np.ndarray) -> np.ndarray:
    """The bytes, uint8 [...], of an array of unsigned integers."""
    flat = change.reshape(-1)
    found = [_encode(flat[at : at + _PIECE]) for at in range(0, len(flat), _PIECE)]
    counts = [len(found), *(len(part) for parts in found for part in parts)]
    gaps = [gaps for gaps, _ in found]
    bits = np.concatenate([np.zeros(0, change.dtype), *(bits for _, bits in found)])
    planes = bits.astype(bits.dtype.newbyteorder("<")).view(np.uint8)
    planes = planes.reshape(-1, bits.dtype.itemsize).T.reshape(-1)
    return np.concatenate([np.array(counts, _COUNT).view(np.uint8), *gaps, planes])


def decode(data: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The array of this shape and dtype whose bytes ``encode`` gave.

    Raises ValueError where there is none.
    """
    change = np.zeros(shape, dtype)
    flat = change.reshape(-1)
    pieces = -(-flat.size // _PIECE)
    head = _COUNT.itemsize * (1 + 2 * pieces)
    counts = data[:head].copy().view(_COUNT) if len(data) >= head else np.zeros(1, _COUNT)
    gaps, elements = counts[1::2], counts[2::2]
    behind = head + int(gaps.sum())
    if counts[0] != pieces or len(data) != behind + int(elements.sum()) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no change of {dtype}{list(shape)}")
    planes = data[behind:].reshape(dtype.itemsize, -1).T.copy()
    bits = planes.view(dtype.newbyteorder("<")).reshape(-1).astype(dtype)
    parts = zip(
        np.split(data[head:behind], np.cumsum(gaps)[:-1]) if pieces else [],
        np.split(bits, np.cumsum(elements)[:-1]) if pieces else [],
        strict=True,
    )
    for piece, (own, some) in enumerate(parts):
        _decode(own, some, flat[piece * _PIECE : (piece + 1) * _PIECE])
    return change


def _encode(flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gaps and the elements of a piece."""
    places = np.flatnonzero(flat)
    skips, rest = np.divmod(np.diff(places, prepend=-1) - 1, _SKIP)
    gaps = np.full(len(places) + int(skips.sum()), _SKIP, np.uint8)
    gaps[np.cumsum(skips + 1) - 1] = rest
    return gaps, flat[places]


def _decode(gaps: np.ndarray, bits: np.ndarray, flat: np.ndarray) -> None:
    """Puts the elements of a piece into ``flat``, which is 0."""
    holds = gaps != _SKIP
    places = (np.cumsum(gaps + holds.astype(np.int64)) - 1)[holds]
    if len(places) != len(bits) or (len(places) and places[-1] >= len(flat)):
        raise ValueError(f"{len(bits)} changed elements of {len(flat)} have {len(places)} places")
    flat[places] = bits
