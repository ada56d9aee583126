"""Storage of an actor's groups: files that grow by one group after another.

Each start of an actor has a file of its own for every step that it samples, named
``<actor>.<incarnation>.<number>``, so nobody else writes to it. A group is appended and forced to
the disk, and has then been delivered. What a killed actor has begun is no whole group: readers wait
for the rest of it, which never comes. After a failure the actor goes on in a new file, so that
nothing ever stands behind half of a group.

A group in such a file is what ``group_records.encode`` makes of it, which says its own length.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rl_code.host import files
from rl_code.store import group_records
from rl_code.store.errors import explain
from rl_code.store.processes import ProcessId

_OPEN = 256  # files that are kept open at most


class Place(NamedTuple):
    """Place of the bytes of a group."""

    path: Path
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.path} from byte {self.offset} on"

    def read(self) -> bytes:
        """The bytes. Raises OSError."""
        with open(self.path, "rb", buffering=0) as file:
            return self.read_from(file)

    def read_from(self, file: BinaryIO) -> bytes:
        """As ``read``, of a file that is open."""
        return os.pread(file.fileno(), self.size, self.offset)


class OpenFiles:
    """Keeps files open while many groups are read from them. A context manager."""

    def __init__(self):
        self._files: dict[Path, BinaryIO] = {}

    def read(self, place: Place) -> bytes:
        """The bytes of a group. Raises OSError."""
        if place.path not in self._files:
            if len(self._files) == _OPEN:
                self._files.pop(next(iter(self._files))).close()
            self._files[place.path] = open(place.path, "rb", buffering=0)
        return place.read_from(self._files[place.path])

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()


class GroupLog:
    """A file to which a process appends. folder: of the groups of a step."""

    def __init__(self, folder: Path, process: ProcessId):
        self._folder = folder
        self._name = f"{process.name}.{process.incarnation}"
        self._files = 0  # that were begun
        self._descriptor: int | None = None
        self._size = 0  # of the file that is open

    def append(self, data: bytes) -> None:
        """Appends a group, which is on the disk when this returns. Raises OSError; the group is not
        delivered then, and can be appended again.
        """
        if self._descriptor is None:
            self._descriptor = self._begin()
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
            os.fsync(self._descriptor)
            self._size += len(data)
        except OSError:
            # Gives back the space, if it can be; nothing is appended to this file any more.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            self.close()
            raise

    def close(self) -> None:
        """Ends the file. What is appended afterwards goes into another one."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _begin(self) -> int:
        path = self._folder / f"{self._name}.{self._files}"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while True:
            try:
                descriptor = os.open(path, flags, 0o644)
                break
            except FileExistsError:  # of another log of this process
                self._files += 1
                path = self._folder / f"{self._name}.{self._files}"
        self._files += 1
        self._size = 0
        files.sync(self._folder)  # the file's name
        return descriptor


class LogReader:
    """Reads the groups that are appended to the files of a folder, each of them once.

    Not for several threads at once.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._ends: dict[str, int] = {}  # where the next group of each file begins

    def look(self, of: ProcessId | None = None) -> Iterator[tuple[Place, bytes]]:
        """The groups that were appended since the last look, and where each is. of: the process
        whose groups are wanted; None for those of all.

        Bytes that are no beginning of a group are looked at again next time, since a network drive
        may show a file's length before its content. Raises StoreError.
        """
        with explain("list", self._folder):
            try:
                names = sorted(os.listdir(self._folder))
            except FileNotFoundError:  # a step that has moved
                return
        for name in names:
            if of is None or name.rpartition(".")[0] == f"{of.name}.{of.incarnation}":
                yield from self._new(name)

    def _new(self, name: str) -> Iterator[tuple[Place, bytes]]:
        path = self._folder / name
        begin = self._ends.get(name, 0)
        with explain("read the groups of", path):
            # Opened anew each time: a client of NFS then asks how long the file is.
            with open(path, "rb", buffering=0) as file:
                data = _rest(file.fileno(), begin)
        at = 0
        while size := group_records.size(data, at):
            yield Place(path, begin + at, size), data[at : at + size]
            at += size
            self._ends[name] = begin + at


def _rest(descriptor: int, begin: int) -> bytes:
    """Content of a file from a byte on."""
    parts = []
    while part := os.pread(descriptor, 1 << 24, begin):
        parts.append(part)
        begin += len(part)
    return b"".join(parts)
