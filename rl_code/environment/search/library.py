"""The indexes of all episodes of a pool: what the same file or the same files make is made once.

A file is known by its path and a hash of its text, and an index by its files. So the episodes of a
group, and all on one world, share the index of the files that they begin with. After an edit only
the changed file is cut and embedded anew.

Agents write these files, and they are read in the training process, so all of it is bounded: an
index in characters and pieces, a call in time, and what is kept in bytes.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rl_code.config.read_config import to_dict
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.sandbox.snapshot import File, folders_of, texts
from rl_code.environment.search.chunks import PARSED, Parser
from rl_code.environment.search.index import Chunk, Index, make_chunks
from rl_code.environment.tools.workspace import Workspace
from rl_code.types import World

# Chunks and characters of one index, and of the files of one world.
_CHUNKS = 50_000
_CHARACTERS = 12_000_000
# Bytes that are kept of files, of indexes and of the texts of worlds, about.
_FILES_BYTES = 128 << 20
_INDEXES_BYTES = 256 << 20
_WORLDS_BYTES = 64 << 20
# Bytes of a chunk beside its text, most of them its embedding.
_CHUNK_BYTES = 1500
# The share of a call's time that is left for the index itself when the files are read.
_INDEX_SHARE = 0.3


class NotReady(ValueError):
    """The time was up before all files were read. What was read is kept."""


class Found(NamedTuple):
    """Index of the files that may be searched."""

    # None where the files hold nothing.
    index: Index | None
    # Files that there was no room for.
    left_out: int


class _Known(NamedTuple):
    """A file by its path and a hash of its text."""

    path: str
    digest: bytes


class _World(NamedTuple):
    """The text files of a world before anything is changed."""

    texts: dict[str, str]
    # Paths that are not read yet, the next one last.
    unread: list[str]

    @property
    def size(self) -> int:
        """Characters that are read."""
        return sum(map(len, self.texts.values()))


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
        self._files = _Cache[_Known, list[Chunk]](_FILES_BYTES, _bytes_of)
        self._indexes = _Cache[tuple[_Known, ...], Index | None](
            _INDEXES_BYTES, lambda index: 0 if index is None else 2 * _bytes_of(index.chunks)
        )
        self._worlds = _Cache[str, _World](_WORLDS_BYTES, lambda world: world.size)

    def index(self, workspace: Workspace, deadline: float) -> Found:
        """The index of the files as they stand.

        Raises NotReady, SnapshotError for files that cannot be read, and SandboxFault.
        """
        start = time.monotonic()
        if not self._lock.acquire(timeout=max(0.0, deadline - start)):
            raise NotReady("other searches are at work; ask again")
        try:
            contents, unread = self._contents(workspace, deadline)
            paths = sorted(contents, key=self._rank)[: self._most]
            sizes = itertools.accumulate(len(contents[path]) for path in paths)
            known = tuple(
                _Known(path, _digest(contents[path]))
                for path, size in zip(paths, sizes, strict=True)
                if size <= _CHARACTERS
            )
            if known not in self._indexes:
                files_until = deadline - _INDEX_SHARE * max(0.0, deadline - start)
                self._indexes.put(known, self._made(known, contents, files_until))
            return Found(self._indexes.get(known), len(contents) - len(known) + unread)
        finally:
            self._lock.release()

    def _rank(self, path: str) -> tuple[bool, str]:
        """The place of a file among others: what a grammar reads first."""
        return not path.endswith(self._endings), path

    def _made(
        self, known: Sequence[_Known], contents: Mapping[str, str], deadline: float
    ) -> Index | None:
        """The index of files. Raises NotReady, and SandboxFault."""
        chunks: list[Chunk] = []
        for number, file in enumerate(known):
            if time.monotonic() > deadline:
                raise NotReady(f"{number} of {len(known)} files are read; ask again")
            chunks += self._chunks(file, contents[file.path])
            if len(chunks) >= _CHUNKS:
                break
        return Index(chunks[:_CHUNKS]) if chunks else None

    def close(self) -> None:
        """Ends the parser. May be called twice."""
        self._parser.close()

    def _chunks(self, file: _Known, text: str) -> list[Chunk]:
        """The chunks of a file. Raises SandboxFault."""
        if file not in self._files:
            pieces = self._parser.pieces(file.path, text)
            self._files.put(file, make_chunks(file.path, text, pieces))
        return self._files.get(file)

    def _contents(self, workspace: Workspace, deadline: float) -> tuple[dict[str, str], int]:
        """The text files as they stand, and how many of a world there was no room for. What is too
        long is left out.
        """
        changes = workspace.snapshot()
        world = workspace.task.world
        below = _World({}, []) if world is None else self._below(world, deadline)
        hiding = {  # what was below them
            path
            for path, entry in changes.items()
            if isinstance(entry, File) and entry.kind not in ("file", "folder")
        }
        contents = {
            path: text
            for path, text in below.texts.items()
            if path not in changes and hiding.isdisjoint(folders_of(path))
        }
        contents |= texts(changes)
        found = {path: text for path, text in contents.items() if _is_searched(path, text)}
        return found, len(below.unread)

    def _below(self, world: World, deadline: float) -> _World:
        """The text files of a world before anything is changed. Raises NotReady."""
        key = json.dumps(to_dict(world), sort_keys=True)
        if key in self._worlds and not self._to_read(self._worlds.get(key)):
            return self._worlds.get(key)
        with self._pool.open({}, world) as sandbox:
            if key not in self._worlds:
                unread = sorted(sandbox.list_files(), key=self._rank, reverse=True)
                self._worlds.put(key, _World({}, unread))
            found = self._worlds.get(key)
            size = found.size
            while found.unread and size <= _CHARACTERS:
                if time.monotonic() > deadline:
                    raise NotReady(f"{len(found.unread)} files are not read yet; ask again")
                path = found.unread.pop()
                try:
                    text = sandbox.read_file(path)
                except (OSError, ValueError):  # it is no text, or too long
                    continue
                if _is_searched(path, text):
                    found.texts[path] = text
                    size += len(text)
        self._worlds.put(key, found)  # it has another size now
        return found

    @staticmethod
    def _to_read(world: _World) -> bool:
        """True if there are files that are not read and have room."""
        return bool(world.unread) and world.size <= _CHARACTERS


class _Cache[K, V]:
    """Values by key, the last used ones of them. weigh: bytes of a value."""

    def __init__(self, most: int, weigh: Callable[[V], int]):
        self._most = most
        self._weigh = weigh
        self._held: collections.OrderedDict[K, tuple[V, int]] = collections.OrderedDict()
        self._bytes = 0

    def __contains__(self, key: K) -> bool:
        return key in self._held

    def get(self, key: K) -> V:
        """The value of a key, which is now the last that was used."""
        self._held.move_to_end(key)
        return self._held[key][0]

    def put(self, key: K, value: V) -> None:
        """Keeps a value. The first ones go, but never this one."""
        if key in self._held:
            self._bytes -= self._held.pop(key)[1]
        weight = self._weigh(value) + _CHUNK_BYTES
        self._held[key] = (value, weight)
        self._bytes += weight
        while self._bytes > self._most and len(self._held) > 1:
            _, (_, gone) = self._held.popitem(last=False)
            self._bytes -= gone


def _bytes_of(chunks: Sequence[Chunk]) -> int:
    """Bytes that chunks take, about: their text, its words, and what each has beside."""
    return sum(len(chunk.text) + len(chunk.words) + _CHUNK_BYTES for chunk in chunks)


def _is_searched(path: str, text: str) -> bool:
    return len(text) <= PARSED and "\0" not in text and not path.startswith(".git/")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
