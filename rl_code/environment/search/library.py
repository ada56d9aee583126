"""The indexes of all episodes of a pool: what the same file or the same files make is made once.

A file is known by its path and a hash of its text, and an index by its files. So the episodes of a
group, and all on one world, share the index of the files that they begin with. After an edit only
the changed file is cut and embedded anew.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.sandbox.snapshot import File, texts
from rl_code.environment.search.chunks import PARSED, Parser
from rl_code.environment.search.index import Chunk, Index, make_chunks
from rl_code.environment.tools.workspace import Workspace
from rl_code.read_config import to_dict
from rl_code.types import World

# Files, indexes and worlds that are kept, and chunks and characters of one index.
_FILES = 50_000
_INDEXES = 32
_WORLDS = 8
_CHUNKS = 50_000
_CHARACTERS = 30_000_000


class NotReady(ValueError):
    """The time was up before all files were read. What was read is kept."""


class Found(NamedTuple):
    """What may be searched."""

    # None where the files hold nothing.
    index: Index | None
    # Files that there was no room for.
    left_out: int


class _Known(NamedTuple):
    """A file by its path and a hash of its text."""

    path: str
    digest: bytes


class Library:
    """Files and indexes; from any thread, one at a time.

    most: files of one index: those that a grammar reads before all others, and then the first ones
    in the order of their paths. Raises ValueError for a grammar that is not there.
    """

    def __init__(self, pool: SandboxPool, grammars: Mapping[str, str], most: int):
        self._pool = pool
        self._most = most
        self._endings = tuple(grammars)
        self._parser = Parser(pool, grammars)
        self._lock = threading.Lock()
        self._files: collections.OrderedDict[_Known, list[Chunk]] = collections.OrderedDict()
        self._indexes: collections.OrderedDict[tuple[_Known, ...], Index | None]
        self._indexes = collections.OrderedDict()
        # Texts of the files of a world; while they are read, with the paths that are left.
        self._worlds: collections.OrderedDict[str, dict[str, str]] = collections.OrderedDict()
        self._reading: collections.OrderedDict[str, tuple[dict[str, str], list[str]]]
        self._reading = collections.OrderedDict()

    def index(self, workspace: Workspace, deadline: float) -> Found:
        """The index of the files as they stand.

        Raises NotReady, SnapshotError for files that cannot be read, and SandboxFault.
        """
        with self._lock:
            contents = self._contents(workspace, deadline)
            paths = sorted(contents, key=lambda path: (not path.endswith(self._endings), path))
            paths = paths[: self._most]
            sizes = itertools.accumulate(len(contents[path]) for path in paths)
            known = tuple(
                _Known(path, _digest(contents[path]))
                for path, size in zip(paths, sizes, strict=True)
                if size <= _CHARACTERS
            )
            if known not in self._indexes:
                chunks: list[Chunk] = []
                for number, file in enumerate(known):
                    if time.monotonic() > deadline:
                        raise NotReady(f"{number} of {len(known)} files are read; ask again")
                    chunks += self._chunks(file, contents[file.path])
                self._indexes[known] = Index(chunks[:_CHUNKS]) if chunks else None
            return Found(_used(self._indexes, known, _INDEXES), len(contents) - len(known))

    def close(self) -> None:
        """Ends the parser. May be called twice."""
        self._parser.close()

    def _chunks(self, file: _Known, text: str) -> list[Chunk]:
        """The chunks of a file. Raises SandboxFault."""
        if file not in self._files:
            pieces = self._parser.pieces(file.path, text)
            self._files[file] = make_chunks(file.path, text, pieces)
        return _used(self._files, file, _FILES)

    def _contents(self, workspace: Workspace, deadline: float) -> dict[str, str]:
        """The text files as they stand. What is too long is left out."""
        changes = workspace.snapshot()
        world = workspace.task.world
        contents = {} if world is None else dict(self._below(world, deadline))
        for path, entry in changes.items():
            contents.pop(path, None)
            if isinstance(entry, File) and entry.kind != "file":  # it hides what was below it
                for hidden in [other for other in contents if other.startswith(f"{path}/")]:
                    if entry.kind != "folder":
                        del contents[hidden]
        contents |= texts(changes)
        return {
            path: text
            for path, text in contents.items()
            if len(text) <= PARSED and "\0" not in text and not path.startswith(".git/")
        }

    def _below(self, world: World, deadline: float) -> dict[str, str]:
        """The text files of a world before anything is changed. Raises NotReady."""
        key = json.dumps(to_dict(world), sort_keys=True)
        if key not in self._worlds:
            with self._pool.open({}, world) as sandbox:
                if key not in self._reading:
                    self._reading[key] = ({}, sandbox.list_files()[::-1])
                found, unread = _used(self._reading, key, _WORLDS)
                while unread:
                    if time.monotonic() > deadline:
                        raise NotReady(f"{len(unread)} files are not read yet; ask again")
                    path = unread.pop()
                    try:
                        found[path] = sandbox.read_file(path)
                    except (OSError, ValueError):  # it is no text, or too long
                        continue
            del self._reading[key]
            self._worlds[key] = found
        return _used(self._worlds, key, _WORLDS)


def _used[K, V](cache: collections.OrderedDict[K, V], key: K, most: int) -> V:
    """The value of a key, which is now the last that was used. The first ones go."""
    cache.move_to_end(key)
    while len(cache) > most:
        cache.popitem(last=False)
    return cache[key]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
