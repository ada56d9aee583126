"""Shards: the groups, plans and consumptions of many steps in one ArrayRecord file.

    shards/00000000_00000024.arrayrecord   steps 0 to 24, less those that were left in their folders

The records of a shard are its groups, packed (``packing``) and compressed with zstd, and then its
index: for every step the small files of its folder as they were, the latest claim on each item, and
which record each group is. A shard is written once, under another name, and never changed. So a
shard that has its name is whole, and what it holds is read by (step, number).

ArrayRecord compresses a few records together and reads any of them by its number. It pads each file
to blocks of 64 KiB, which is why a shard holds many steps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from rl_code.store import packing
from rl_code.store.errors import StoreError, explain
from rl_code.store.sealed import seal, unseal

SHARDS = "shards"
SCHEMA = 1
_NAME = re.compile(r"(\d{8,})_(\d{8,})\.arrayrecord")
# Records that are compressed together. More are smaller together, and to read one of them all are
# decompressed.
_WRITE = "group_size:8,zstd:9"
_READ = "readahead_buffer_size:0,max_parallelism:0"  # for reading single records
_OPEN = 32  # shards that a process keeps open
_COARSE_S = 3.0  # by which times of change may be coarse


@dataclasses.dataclass(frozen=True)
class ShardStep:
    """Entry of the index for a step."""

    # name -> content of the parts of the plan and of the consumption, as in the step's folder
    files: Mapping[str, bytes]
    # item -> its latest claim
    claims: Mapping[int, int]
    # item -> number of its group's record in the shard
    groups: Mapping[int, int]


class Shard:
    """An open shard. Raises StoreError when it cannot be read."""

    def __init__(self, path: Path):
        self.path = path
        # The library does not say whether several threads may read at once.
        self._lock = threading.Lock()
        with explain("read the shard", path):
            self.bytes = os.stat(path).st_size
        self._reader = self._open()
        self.records = self._reader.num_records()
        if not self.records:  # as the library says of a file that is no ArrayRecord
            raise damaged(path, "it holds no records")
        content = unseal(self.read(self.records - 1), path)
        if content["schema"] != SCHEMA:
            raise StoreError(
                f"{path} has schema {content['schema']}; this code reads schema {SCHEMA}"
            )
        self.steps = {int(step): _from_json(entry) for step, entry in content["steps"].items()}

    def group(self, step: int, number: int) -> bytes:
        """The file of a group as it was delivered; KeyError for one that the shard does not
        have.
        """
        packed = self.read(self.steps[step].groups[number])
        try:
            return packing.unpack(packed)
        except ValueError as error:
            raise damaged(self.path, f"item ({step}, {number}): {error}") from error

    def read(self, record: int) -> bytes:
        """A record as it was written."""
        try:
            with self._lock:
                return self._reader.read([record])[0]
        # The library raises these for damaged blocks, and for a record beyond the last.
        except (RuntimeError, ValueError, IndexError) as error:
            raise damaged(self.path, f"record {record}: {error}") from error

    def _open(self) -> ArrayRecordReader:
        try:
            return ArrayRecordReader(str(self.path), _READ)
        except (RuntimeError, ValueError) as error:
            raise damaged(self.path, str(error)) from error


def damaged(path: Path, how: str) -> StoreError:
    """The error for a shard that cannot be read. how: in words."""
    return StoreError(f"{path} is damaged: {how}. Restore it: it is the only copy of its groups")


@dataclasses.dataclass(frozen=True)
class Content:
    """A step that is to be written into a shard."""

    step: int
    files: Mapping[str, bytes]
    claims: Mapping[int, int]
    # (number, file of the group), read when they are written
    groups: Iterable[tuple[int, bytes]]


def write(path: Path, contents: Iterable[Content]) -> list[int]:
    """Writes a shard, which is not on the disk yet when this returns; CRC-32 of its records, for
    ``check``. Raises OSError.
    """
    sums = []
    try:
        writer = ArrayRecordWriter(str(path), _WRITE)
        index = {}
        for content in contents:
            groups = {}
            for number, data in content.groups:
                groups[number] = len(sums)
                sums.append(_write(writer, packing.pack(data)))
            index[content.step] = {
                "files": {name: data.decode("ascii") for name, data in content.files.items()},
                "claims": dict(content.claims),
                "groups": groups,
            }
        sums.append(_write(writer, seal({"schema": SCHEMA, "steps": index})))
        writer.close()
    except RuntimeError as error:  # the library's words for what the operating system refuses
        raise OSError(str(error)) from error
    return sums


def check(path: Path, sums: Sequence[int]) -> None:
    """Raises StoreError unless a shard can be read and holds what ``write`` was given."""
    shard = Shard(path)
    found = [zlib.crc32(shard.read(record)) for record in range(shard.records)]
    if found != list(sums):
        raise StoreError(f"{path} does not hold what was written")


def _write(writer: ArrayRecordWriter, record: bytes) -> int:
    writer.write(record)
    return zlib.crc32(record)


def _from_json(entry: Mapping[str, dict[str, Any]]) -> ShardStep:
    numbers = {
        name: {int(number): value for number, value in entry[name].items()}
        for name in ("claims", "groups")
    }
    files = {name: text.encode("ascii") for name, text in entry["files"].items()}
    return ShardStep(files=files, **numbers)


# --- The folder of shards -------------------------------------------------------------------------


def shard_path(store: Path, first: int, last: int) -> Path:
    """The file of a shard, which has steps from ``first`` to ``last``."""
    return store / SHARDS / f"{first:08}_{last:08}.arrayrecord"


def list_shards(store: Path) -> dict[tuple[int, int], Path]:
    """(first step, last step) -> path of every shard, oldest first. Raises StoreError."""
    folder = store / SHARDS
    with explain("list", folder):
        names = os.listdir(folder) if folder.is_dir() else []
    found = filter(None, map(_NAME.fullmatch, names))
    return {
        (int(match[1]), int(match[2])): folder / match[0]
        for match in sorted(found, key=lambda match: match[0])
    }


class ShardList:
    """The shards of a store, listed only when there are others: their folder grows with the run and
    is asked for often. A folder's time of change tells, which may be coarse: after a change it is
    listed until that change is some seconds old, by this process's clock.
    """

    def __init__(self, store: Path):
        self._store, self._folder = store, store / SHARDS
        self._found: dict[tuple[int, int], Path] = {}
        self._mark: tuple[int, int] | None = None
        self._since = 0.0  # when the mark was first seen
        self._listed = -math.inf

    def look(self) -> dict[tuple[int, int], Path]:
        """As ``list_shards``."""
        mark = self._look()
        now = time.monotonic()
        if mark != self._mark:
            self._mark, self._since = mark, now
        if self._listed < self._since + _COARSE_S:
            self._found = list_shards(self._store)
            self._listed = now
        return self._found

    def _look(self) -> tuple[int, int] | None:
        with explain("read", self._folder):
            # Opening makes a client of NFS ask; a call of stat(2) might be answered from memory.
            try:
                descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                return None
            try:
                stat = os.fstat(descriptor)
                return stat.st_ino, stat.st_mtime_ns
            finally:
                os.close(descriptor)


def open_shard(path: Path) -> Shard:
    """The shard at a path, opened once per process. Raises StoreError."""
    with explain("read the shard", path):
        stat = os.stat(path)
    # a file of the same name in a folder that was made anew is another one
    return _open_shard(path, stat.st_ino, stat.st_mtime_ns)


@functools.lru_cache(_OPEN)
def _open_shard(path: Path, inode: int, changed: int) -> Shard:
    return Shard(path)
