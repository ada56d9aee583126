"""The processes that take part: every one that writes to the store has a name, and each of its
starts a number.

    processes/actor-0/3.json       heartbeat of the third restart (incarnation 3) of "actor-0"
    processes/actor-0/claim.3.0    who it is; its claims are further names of this file
    processes/actor-0/aside.3.17   what incarnation 3 is writing; a later incarnation of the same
                                   name deletes it
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import NamedTuple

from rl_code.host import files
from rl_code.store.errors import explain
from rl_code.store.sealed import seal

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_HEARTBEAT = re.compile(r"(\d+)\.json")
_ASIDE = re.compile(r"(?:aside|claim)\.(\d+)\.\d+")


class ProcessId(NamedTuple):
    """A process: the name it was given, and the number of this start of it."""

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}/{self.incarnation}"


class StoreProcess:
    """A process that writes to a store. Creating one starts a new incarnation of the name.

    Raises StoreError when the store cannot be written, ValueError for a name that cannot be a
    file's.
    """

    def __init__(self, store: Path, name: str):
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name=}: expected letters, digits, '_', '.' and '-', at most 100 of them"
            )
        self._folder = store / "processes" / name
        self._writes = itertools.count()
        self._marks = itertools.count()
        self._mark: Path | None = None
        with explain("join the store at", self._folder):
            self._folder.mkdir(exist_ok=True)
            self.identity = ProcessId(name, _start(self._folder))
            _clean(self._folder, self.identity.incarnation)
        self.beat(0)

    def publish(self, path: Path, data: bytes, what: str, *, synced: bool = True) -> bool:
        """As ``files.write_once``; ``what`` is written, for the message of the StoreError it
        raises.
        """
        with explain(f"write {what} to", path):
            return files.write_once(path, data, self.aside(), synced=synced)

    def claim(self, path: Path, what: str) -> bool:
        """Gives this process's own file another name; returns False when the name is taken, be it
        by this process. ``what`` is claimed, for the message of the StoreError it raises.

        That is one operation, and readers tell from a file's inode alone whose claim it is. A file
        has only so many names; another one is begun when they are used up.
        """
        with explain(f"write {what} to", path):
            while True:
                if self._mark is None:
                    self._mark = self._make_mark()
                try:
                    os.link(self._mark, path)
                    return True
                except FileExistsError:
                    return False
                except OSError as error:
                    if error.errno != errno.EMLINK:
                        raise
                    self._mark = None

    def beat(self, count: int, *, left: bool = False) -> None:
        """Writes the heartbeat. left: this process has ended in order. Raises StoreError."""
        content = {
            "count": count,
            "left": left,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "when": time.time(),
        }
        path = self._folder / f"{self.identity.incarnation}.json"
        with explain("write the heartbeat to", path):
            files.replace(path, seal(content), self.aside())

    def newest(self) -> ProcessId:
        """The latest start of this name, another one than ``identity`` once that is replaced.
        Raises StoreError.
        """
        with explain("list", self._folder):
            found = incarnations(self._folder)
        return self.identity._replace(incarnation=max(found, default=self.identity.incarnation))

    def aside(self) -> Path:
        """A path that nobody else uses, on the file system of the store. The next incarnation
        deletes what is left there.
        """
        return self._folder / f"aside.{self.identity.incarnation}.{next(self._writes)}"

    def _make_mark(self) -> Path:
        path = self._folder / f"claim.{self.identity.incarnation}.{next(self._marks)}"
        content = {"actor": self.identity.name, "incarnation": self.identity.incarnation}
        files.write_once(path, seal(content | {"when": time.time()}), self.aside())
        return path


def incarnations(folder: Path) -> list[int]:
    """The incarnations that have a heartbeat in the folder of a name; the newest always has one.
    Raises OSError.
    """
    return [int(match[1]) for name in os.listdir(folder) if (match := _HEARTBEAT.fullmatch(name))]


def _start(folder: Path) -> int:
    """The number of a new incarnation: creating its heartbeat, still empty, makes it this process's
    own.
    """
    for number in itertools.count(max(incarnations(folder), default=-1) + 1):
        with contextlib.suppress(FileExistsError), open(folder / f"{number}.json", "xb"):
            return number
    raise AssertionError("unreachable")


def _clean(folder: Path, incarnation: int) -> None:
    """Deletes the heartbeats of earlier incarnations and what they were writing."""
    for name in os.listdir(folder):
        match = _HEARTBEAT.fullmatch(name) or _ASIDE.fullmatch(name)
        if match and int(match[1]) < incarnation:
            if (folder / name).is_dir():  # of a step that was being deleted
                shutil.rmtree(folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
