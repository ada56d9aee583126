"""Counts what a Python process does in a folder, by wrapping the calls with which Python reaches
files. What native code reads and writes is not seen.

``cluster/slow_storage`` wraps the same calls to make them slow, when the process starts. Counting
comes later and lies around it.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import io
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Those whose first argument is a path, and what they count as.
_OPERATIONS = {
    "link": "link",
    "replace": "rename",
    "rename": "rename",
    "unlink": "unlink",
    "mkdir": "mkdir",
    "rmdir": "unlink",
    "stat": "stat",
    "lstat": "stat",
}
# What a file server is asked for. A listing is one, however many entries it returns.
REQUESTS = ("open", "read", "write", "fsync", "list", "stat", "link", "rename", "unlink", "mkdir")


class Counts:
    """Counts of this process from now on, in ``folder`` and below.

    ``total`` has the kinds of REQUESTS, and besides: "bytes read" and "bytes written", "entries"
    (of listings), "longest" (entries of the longest listing).
    """

    def __init__(self, folder: str):
        self.total: collections.Counter[str] = collections.Counter()
        self._folder = folder
        self._lock = threading.Lock()
        self._descriptors: set[int] = set()  # of files in the folder
        self._wrap()

    def reset(self) -> None:
        """Counts from nothing."""
        with self._lock:
            self.total.clear()

    def add(self, kind: str, count: int = 1) -> None:
        """Counts something."""
        with self._lock:
            self.total[kind] += count

    def _inside(self, path: Any) -> bool:
        return not isinstance(path, int) and os.fsdecode(path).startswith(self._folder)

    def _wrap(self) -> None:
        for name, kind in _OPERATIONS.items():
            setattr(os, name, self._counted(getattr(os, name), kind))
        os.listdir = self._listing(os.listdir)
        os.scandir = self._scanning(os.scandir)
        builtins.open = io.open = self._opening(io.open)
        opened, closed, synced = os.open, os.close, os.fsync
        read, written = os.pread, os.write

        def open_descriptor(path: Any, flags: int, *args: Any, **settings: Any) -> int:
            descriptor = opened(path, flags, *args, **settings)
            if self._inside(path):
                self.add("open")
                self._descriptors.add(descriptor)
            return descriptor

        def close(descriptor: int) -> None:
            self._descriptors.discard(descriptor)
            closed(descriptor)

        def fsync(descriptor: int) -> None:
            self.add("fsync")
            synced(descriptor)

        def pread(descriptor: int, size: int, offset: int) -> bytes:
            data = read(descriptor, size, offset)
            self.add("read")
            self.add("bytes read", len(data))
            return data

        def write(descriptor: int, data: bytes) -> int:
            if descriptor in self._descriptors:
                self.add("write")
                self.add("bytes written", len(data))
            return written(descriptor, data)

        os.open, os.close, os.fsync, os.pread, os.write = (
            open_descriptor, close, fsync, pread, write,
        )  # fmt: skip

    def _counted(self, operation: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(operation)
        def counting(path: Any, *args: Any, **settings: Any) -> Any:
            if self._inside(path):
                self.add(kind)
            return operation(path, *args, **settings)

        return counting

    def _listed(self, entries: int) -> None:
        self.add("list")
        self.add("entries", entries)
        with self._lock:
            self.total["longest"] = max(self.total["longest"], entries)

    def _listing(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def listdir(path: Any = ".") -> list:
            names = operation(path)
            if self._inside(path):
                self._listed(len(names))
            return names

        return listdir

    def _scanning(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def scandir(path: Any = ".") -> Any:
            if not self._inside(path):
                return operation(path)
            with operation(path) as entries:
                found = list(entries)
            self._listed(len(found))
            return _Entries(found)

        return scandir

    def _opening(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def open_file(path: Any, mode: str = "r", *args: Any, **settings: Any) -> Any:
            file = operation(path, mode, *args, **settings)
            if not self._inside(path):
                return file
            self.add("open")
            return _CountedFile(file, self)

        return open_file


class _Entries(contextlib.ExitStack):
    """The result of ``os.scandir``, listed already: an iterator that can be closed."""

    def __init__(self, entries: Iterable[os.DirEntry]):
        super().__init__()
        self._entries = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> os.DirEntry:
        return next(self._entries)


class _CountedFile:
    """A file whose bytes are counted."""

    def __init__(self, file: Any, counts: Counts):
        self._file, self._counts = file, counts

    def read(self, *args: Any) -> Any:
        data = self._file.read(*args)
        self._counts.add("read")
        self._counts.add("bytes read", len(data))
        return data

    def write(self, data: Any) -> int:
        self._counts.add("write")
        self._counts.add("bytes written", len(data))
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __enter__(self) -> _CountedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
