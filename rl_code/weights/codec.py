"""Bits of arrays in host memory and on disk: in full, or as what changed since another version.

A change is the exclusive or of the bit patterns. It is exact for every value and is its own
inverse. Full weights are stored as zarr arrays of unsigned integers, whose bits are shuffled before
Zstandard compresses them. Where the weights moved little, most elements of a change are 0, so it is
stored as the others and the gaps between them (``sparse``), for each part that a process of the
learner has:

    full/<name>            a zarr array
    delta/<name>/<part>    a zarr array of bytes
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import tensorstore

from rl_code.checkpoint.arrays import any_mesh
from rl_code.checkpoint.checksums import unsigned
from rl_code.weights import sparse
from rl_code.weights.layout import Box, assemble, overlap, own_parts, to_slices, wanted_parts
from rl_code.weights.waiting import Deadline

CHUNK_BYTES = 16 * 2**20  # chunks are compressed in parallel
# A chunk that is missing is an error rather than zeros.
_OPTIONS = {
    "driver": "zarr3",
    "fill_missing_data_reads": False,
    "store_data_equal_to_fill_value": True,
}


@dataclasses.dataclass(frozen=True)
class HostArray:
    """The bits of one array's parts that this process answers for."""

    # of the whole array
    shape: tuple[int, ...]
    # shape of what is compressed at once
    chunk: tuple[int, ...]
    # the unsigned integer that holds an element's bits
    dtype: np.dtype
    # the parts, by where they are in the array
    parts: Mapping[Box, np.ndarray]


def to_host(named: Mapping[str, jax.Array]) -> dict[str, HostArray]:
    """Copies of the arrays' bits, which stay when the arrays are donated."""
    parts = {name: dict(own_parts(x)) for name, x in named.items()}
    for part in (part for boxes in parts.values() for part in boxes.values()):
        part.copy_to_host_async()
    return {
        name: HostArray(
            x.shape,
            _chunk(x.shape, x.sharding.shard_shape(x.shape), x.dtype.itemsize),
            unsigned(x.dtype),
            {box: np.array(part).view(unsigned(x.dtype)) for box, part in parts[name].items()},
        )
        for name, x in named.items()
    }


def same_layout(one: Mapping[str, HostArray], other: Mapping[str, HostArray]) -> bool:
    """True if this process has the same parts of the same arrays in both."""
    described = [
        {name: (x.shape, x.dtype, *x.parts) for name, x in host.items()} for host in (one, other)
    ]
    return described[0] == described[1]


def same_bits(one: Mapping[str, HostArray], other: Mapping[str, HostArray]) -> bool:
    """True if this process's parts of two versions of one layout have the same bits."""
    return all(
        np.array_equal(part, other[name].parts[box])
        for name, x in one.items()
        for box, part in x.parts.items()
    )


def changes(new: Mapping[str, HostArray], old: Mapping[str, HostArray]) -> dict[str, HostArray]:
    """Differences that turn the one into the other, and back."""
    return {
        name: dataclasses.replace(
            x, parts={box: part ^ old[name].parts[box] for box, part in x.parts.items()}
        )
        for name, x in new.items()
    }


def write(folder: Path, kind: str, host: Mapping[str, HostArray], deadline: Deadline) -> None:
    """Writes this process's parts into ``<folder>/<kind>/<name>``, and to the disk; other processes
    write theirs.
    """
    pending = []
    for name, x in host.items():
        path = folder / kind / name
        if kind == "full":
            store = _create(path, x.dtype, x.shape, x.chunk, "bitshuffle", deadline)
            pending += [store[to_slices(box)].write(part) for box, part in x.parts.items()]
            continue
        for box, part in x.parts.items():
            data = sparse.encode(part)
            chunk = (min(len(data), CHUNK_BYTES),)
            place = path / _box_name(box)
            store = _create(place, data.dtype, data.shape, chunk, "noshuffle", deadline)
            pending.append(store.write(data))
    for writing in pending:
        writing.result(deadline.left())


def _create(
    path: Path,
    dtype: np.dtype,
    shape: tuple[int, ...],
    chunk: tuple[int, ...],
    shuffle: str,
    deadline: Deadline,
) -> tensorstore.TensorStore:
    """A new compressed array, or the one that another process has made."""
    blosc = {"cname": "zstd", "clevel": 1, "shuffle": shuffle, "typesize": dtype.itemsize}
    codecs = [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "blosc", "configuration": blosc},
        {"name": "crc32c"},
    ]
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    keys = {"name": "default", "configuration": {"separator": "."}}  # no folder per coordinate
    metadata = {"codecs": codecs, "chunk_grid": grid, "chunk_key_encoding": keys}
    spec = {**_OPTIONS, "kvstore": {"driver": "file", "path": str(path)}, "metadata": metadata}
    pending = tensorstore.open(spec, create=True, open=True, dtype=dtype, shape=shape)
    return pending.result(deadline.left())


def read(
    folders: Sequence[Path], targets: Mapping[str, jax.ShapeDtypeStruct], deadline: Deadline
) -> dict[str, dict[Box, np.ndarray]]:
    """Exclusive or of the bits in all folders, for the parts that this process's devices want of
    each target.
    """
    return {
        name: _read_parts(
            [folder / name for folder in folders],
            target.shape,
            unsigned(target.dtype),
            wanted_parts(target),
            deadline,
        )
        for name, target in targets.items()
    }


def read_like(
    folders: Sequence[Path], host: Mapping[str, HostArray], deadline: Deadline
) -> dict[str, HostArray]:
    """Exclusive or of the bits in all folders, for the parts that ``host`` has."""
    return {
        name: dataclasses.replace(
            x,
            parts=_read_parts(
                [folder / name for folder in folders], x.shape, x.dtype, x.parts, deadline
            ),
        )
        for name, x in host.items()
    }


def _read_parts(
    paths: Sequence[Path],
    shape: tuple[int, ...],
    dtype: np.dtype,
    boxes: Iterable[Box],
    deadline: Deadline,
) -> dict[Box, np.ndarray]:
    """Exclusive or of the bits of one array's parts in several places."""
    found = {box: np.zeros([stop - start for start, stop in box], dtype) for box in boxes}
    for path in paths:
        names = os.listdir(path)
        # a change that was stored before changes were sparse is an array too
        whole = "zarr.json" in names
        pieces = (
            _of_whole(path, shape, dtype, found, deadline)
            if whole
            else _of_parts(path, names, dtype, found, deadline)
        )
        missing = {box: bits.size for box, bits in found.items()}
        for wanted, place, bits in pieces:
            found[wanted][place] ^= bits
            missing[wanted] -= bits.size
        if any(missing.values()):
            raise ValueError(f"{path} does not hold all of {dtype}{list(shape)}")
    return found


# A part that is wanted, where in it something was read, and the bits that were.
Piece = tuple[Box, tuple[slice, ...], np.ndarray]


def _of_whole(
    path: Path,
    shape: tuple[int, ...],
    dtype: np.dtype,
    boxes: Iterable[Box],
    deadline: Deadline,
) -> Iterator[Piece]:
    """The wanted parts of a stored array."""
    store = _open(path).result(deadline.left())
    if store.shape != shape or store.dtype.numpy_dtype != dtype:
        raise ValueError(
            f"{path} holds {store.dtype.name}{list(store.shape)}, not {dtype}{list(shape)}"
        )
    reading = {box: store[to_slices(box)].read() for box in boxes}
    for box, pending in reading.items():
        yield box, to_slices(box, box), np.asarray(pending.result(deadline.left()))


def _of_parts(
    path: Path, names: Sequence[str], dtype: np.dtype, boxes: Iterable[Box], deadline: Deadline
) -> Iterator[Piece]:
    """Overlap of wanted parts with those of a stored change."""
    boxes = list(boxes)
    for name in names:
        own = _box_named(name)
        shared = {box: both for box in boxes if (both := overlap(own, box)) is not None}
        if not shared:
            continue
        store = _open(path / name).result(deadline.left())
        data = np.asarray(store.read().result(deadline.left()))
        part = sparse.decode(data, tuple(stop - start for start, stop in own), dtype)
        for box, both in shared.items():
            yield box, to_slices(both, box), part[to_slices(both, own)]


def _open(path: Path) -> tensorstore.Future:
    return tensorstore.open(
        {**_OPTIONS, "kvstore": {"driver": "file", "path": str(path)}}, open=True
    )


def _box_name(box: Box) -> str:
    """A folder's name for a part, as "0-4.16-32"; "all" for that of an array without axes."""
    return ".".join(f"{start}-{stop}" for start, stop in box) or "all"


def _box_named(name: str) -> Box:
    """The part that ``_box_name`` gave this name."""
    if name == "all":
        return ()
    ranges = (axis.split("-") for axis in name.split("."))
    return tuple((int(start), int(stop)) for start, stop in ranges)


@any_mesh()
def place(
    targets: Mapping[str, jax.ShapeDtypeStruct],
    bits: Mapping[str, Mapping[Box, np.ndarray]],
    held: Mapping[str, jax.Array] | None,
) -> dict[str, jax.Array]:
    """Puts arrays onto the devices.

    bits: the bits of the arrays; or, if ``held`` is given, the bits in which they differ from the
    arrays that are held on the devices.
    """
    found = {}
    for name, target in targets.items():
        if held is None:
            parts = {box: part.view(target.dtype) for box, part in bits[name].items()}
            found[name] = assemble(target, parts)
        else:
            words = jax.ShapeDtypeStruct(
                target.shape, unsigned(target.dtype), sharding=target.sharding
            )
            found[name] = _flip(target.sharding)(held[name], assemble(words, bits[name]))
    return found


@functools.cache
def _flip(sharding: jax.sharding.Sharding) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(array, unsigned bits) -> the array with those bits flipped."""

    def flip(x: jax.Array, bits: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(
            jax.lax.bitcast_convert_type(x, bits.dtype) ^ bits, x.dtype
        )

    return jax.jit(flip, out_shardings=sharding)


def _chunk(shape: tuple[int, ...], part: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Shape of chunks of about CHUNK_BYTES, each within one device's part so that no two processes
    write to one.
    """
    chunk = list(part)
    for axis, size in enumerate(part):
        pieces = math.ceil(math.prod(chunk) * itemsize / CHUNK_BYTES)
        # a cut through a sharded axis would have to meet the parts' borders
        if pieces > 1 and size == shape[axis]:
            chunk[axis] = math.ceil(size / pieces)
    return tuple(chunk)
