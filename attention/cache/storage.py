"""Storage of arrays that are not on the device: in host memory, and on disk as zarr arrays
with checksums.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path

import jax
import numpy as np
import tensorstore

# Every chunk ends in its checksum, and one that is missing is an error rather than zeros.
_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
_OPTIONS = {
    "driver": "zarr3",
    "fill_missing_data_reads": False,
    "store_data_equal_to_fill_value": True,
}


# The record of a folder, and what describes an array in its own folder.
META = "meta.json"
_DESCRIPTION = "zarr.json"
# The number of what is in a record; folders of another one count as corrupted.
FORMAT = 3
# Bytes of a chunk's own checksum, at its end.
_CHUNK_CHECKSUM = 4


class CorruptedFile(RuntimeError):
    """Raised where the bytes that were read are not those that were written."""


def to_host(tree):
    """Device arrays in host memory.

    It is page-locked where the backend has such memory, since arrays travel fastest from there.
    """

    def move(x):
        if not isinstance(x, jax.Array):
            return x
        if not _has_pinned(x):
            return np.asarray(x)
        return jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))

    return jax.tree.map(move, tree)


def to_host_apart(tree, count: int) -> list:
    """The first ``count`` entries along axis 0 of device arrays, each as a tree of its own in host
    memory.
    """
    # arrays in page-locked memory cannot be cut, so the entries are cut before they move
    if any(_has_pinned(x) for x in jax.tree.leaves(tree)):
        return [to_host(jax.tree.map(lambda x, at=at: x[at], tree)) for at in range(count)]
    # Everything moves at once and is cut afterwards. The parts are copies, since a view would keep
    # the whole array in memory.
    tree = to_host(tree)
    return [jax.tree.map(lambda x, at=at: x[at].copy(), tree) for at in range(count)]


def _has_pinned(x: jax.Array) -> bool:
    (device, *_) = x.devices()
    # all memory of a CPU is the host's already, and locked pages would only cost copies
    return device.platform != "cpu" and "pinned_host" in {
        memory.kind for memory in device.addressable_memories()
    }


def to_device(tree):
    """Host arrays on the device."""

    def move(x):
        if isinstance(x, jax.Array):
            return jax.device_put(x, x.sharding.with_memory_kind("device"))
        return jax.device_put(x)

    return jax.tree.map(move, tree)


def to_device_together(trees: list, size: int) -> list:
    """Moves trees of host arrays, all of the same shapes, to the device.

    The last tree is repeated until there are ``size`` of them. Where the arrays are in ordinary
    memory, they are stacked into one tree, so that they travel at once, and the result is a list of
    that one tree. Otherwise it is a list of ``size`` trees.
    """
    trees = trees + [trees[-1]] * (size - len(trees))
    if all(isinstance(x, np.ndarray) for x in jax.tree.leaves(trees)):
        trees = [jax.tree.map(lambda *xs: np.stack(xs), *trees)]
    return to_device(trees)


def nbytes(tree) -> int:
    """Bytes of all arrays, or of their shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def save(path: Path, arrays: dict[str, np.ndarray], meta: dict) -> None:
    """Writes a folder of arrays and a JSON record.

    It appears at ``path`` complete or not at all.
    """
    # written under another name and then renamed, which the file system does in one step
    draft = path.with_name(f".{path.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    writes = []
    for name, array in arrays.items():
        array = np.asarray(array)
        store = tensorstore.open(
            {
                **_OPTIONS,
                "kvstore": {"driver": "file", "path": str(draft / name)},
                "metadata": {"codecs": _CODECS},
            },
            create=True,
            dtype=array.dtype,
            shape=array.shape,
        ).result()
        writes.append(store.write(array))
    for pending in writes:
        pending.result()
    draft.mkdir(parents=True, exist_ok=True)
    # The chunks have checksums of their own, which those of another folder have too. What says
    # their shapes and dtypes has none: a single changed bit there could give an empty array. The
    # record, which has one, holds those of both.
    checksums = {name: _array_checksum(draft / name) for name in arrays}
    text = json.dumps({"format": FORMAT, "arrays": checksums, **meta}, sort_keys=True)
    (draft / META).write_text(f"{_checksum(text.encode())}{text}")
    shutil.rmtree(path, ignore_errors=True)
    os.replace(draft, path)


def load_meta(path: Path) -> dict:
    """The record of a folder. Raises CorruptedFile."""
    try:
        text = (path / META).read_text()
        checksum = text[:8]
        text = text[8:]
        if _checksum(text.encode()) != checksum:
            raise ValueError(f"{checksum=} is not that of the text")
        meta = json.loads(text)
        if meta.get("format") != FORMAT:
            raise ValueError(f"format={meta.get('format')}, expected {FORMAT}")
        return meta
    except (OSError, ValueError) as error:
        raise CorruptedFile(f"{path / META}: {error}") from error


def load(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    """(arrays, record) of a folder. Raises CorruptedFile."""
    meta = load_meta(path)
    try:
        for name, checksum in meta["arrays"].items():
            if _array_checksum(path / name) != checksum:
                raise ValueError(f"{name} is not what was written")
        stores = {
            name: tensorstore.open(
                {**_OPTIONS, "kvstore": {"driver": "file", "path": str(path / name)}}, open=True
            ).result()
            for name in meta["arrays"]
        }
        reads = {name: store.read() for name, store in stores.items()}
        return {name: pending.result() for name, pending in reads.items()}, meta
    except (OSError, ValueError) as error:
        raise CorruptedFile(f"{path}: {error}") from error


def _array_checksum(path: Path) -> str:
    """Checksum of an array's folder: of its description, and of each chunk's place and own
    checksum, which are the chunk's last bytes.
    """
    parts = [(path / _DESCRIPTION).read_bytes()]
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name != _DESCRIPTION:
            with file.open("rb") as chunk:
                chunk.seek(max(0, file.stat().st_size - _CHUNK_CHECKSUM))
                parts += [str(file.relative_to(path)).encode(), chunk.read()]
    return _checksum(b"\0".join(parts))


def _checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"
