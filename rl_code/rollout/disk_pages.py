"""Keys of documents in files, where they outlive the engine and the process.

A file holds the pages of one document. Its name is a hash of all that the keys depend on: the
document's tokens, the weights and adapters bit by bit, and the engine that computes with them. So
what is found here is what a prefill would write, bit for bit. A document whose text has changed, or
that other weights have read, is not found. Each owner has a folder, and finds what is in it alone.

The files are a cache: one that is lost or spoiled is computed again.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import math
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from models.transformer import Transformer
from rl_code.host.files import write_atomically
from rl_code.rollout.engine import Engine
from rl_code.rollout.spans import Document

# Bytes at the end of a file: the hash of the others.
_CHECK = 16
# Documents that wait to be written. Further ones are not kept, so that a slow disk takes no memory.
_MOST_WAITING = 64
# The folder of what belongs to no organisation.
_NOBODY = "shared"


class DiskPages:
    """The files below a folder, of which the least recently used go first. From any thread.

    budget: the most bytes that they take. keep_s: seconds after which they are removed. Raises
    OSError.
    """

    def __init__(self, folder: Path, budget: float, keep_s: float):
        self._folder, self._budget, self._keep_s = folder, budget, keep_s
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="documents")
        self._waiting: dict[Path, Future] = {}
        # The files and their bytes, the one that was used last at the end.
        self._sizes: collections.OrderedDict[Path, int] = collections.OrderedDict()
        there = [(path, path.stat()) for path in folder.glob("*/*.keys")]
        for path, stat in sorted(there, key=lambda pair: pair[1].st_atime_ns):
            self._sizes[path] = stat.st_size
        self._drop_oldest()

    def find(self, owner: str, name: str) -> bytes | None:
        """The content of a document's file; None where there is none that is whole."""
        path = self._path(owner, name)
        with self._lock:
            if path not in self._sizes:
                return None
            self._sizes.move_to_end(path)
        try:
            whole = path.read_bytes()
            stat = path.stat()
            if self._is_old(stat):
                whole = b""
            # when it was used last; when it was written stays
            os.utime(path, ns=(time.time_ns(), stat.st_mtime_ns))
        except OSError:
            whole = b""  # somebody has removed it
        content, check = whole[:-_CHECK], whole[-_CHECK:]
        if _checked(content) == check:
            return content
        self._drop([path])
        return None

    def keep(self, owner: str, name: str, blocks: Sequence[Sequence[jax.Array]]) -> None:
        """Writes the file of a document, later and in a thread of its own; does nothing where it is
        there.

        blocks: its pages in order, on the device: blocks of pages [pages of the block, ...], each
        with an array for each array of the cache.
        """
        path = self._path(owner, name)
        with self._lock:
            if path in self._sizes or path in self._waiting:
                return
            if len(self._waiting) == _MOST_WAITING:
                return
            self._waiting[path] = self._writer.submit(self._write, path, blocks)

    def wait(self) -> None:
        """Waits until all that was kept is written."""
        with self._lock:
            waiting = list(self._waiting.values())
        wait(waiting)

    def _path(self, owner: str, name: str) -> Path:
        return self._folder / (owner or _NOBODY) / f"{name}.keys"

    def _write(self, path: Path, blocks: Sequence[Sequence[jax.Array]]) -> None:
        try:
            whole = (np.concatenate(each) for each in zip(*blocks, strict=True))
            data = b"".join(x.tobytes() for x in whole)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomically(path, data + _checked(data), private=True)
        except OSError as error:  # the document is computed again when it is asked for
            logging.warning("keys of a document are not kept: %s", error)
        else:
            with self._lock:
                self._sizes[path] = len(data) + _CHECK
        finally:
            with self._lock:
                del self._waiting[path]
        self._drop_oldest()

    def _is_old(self, stat: os.stat_result) -> bool:
        return stat.st_mtime < time.time() - self._keep_s

    def _drop_oldest(self) -> None:
        """Removes files that are too old, and those that there is no room for."""
        with self._lock:
            left, gone = sum(self._sizes.values()), []
            for path, size in self._sizes.items():
                if left > self._budget or not path.exists() or self._is_old(path.stat()):
                    gone.append(path)
                    left -= size
        self._drop(gone)

    def _drop(self, paths: Sequence[Path]) -> None:
        with self._lock:
            for path in paths:
                self._sizes.pop(path, None)
                path.unlink(missing_ok=True)


class DocumentFiles:
    """The files of the documents of one engine."""

    def __init__(self, disk: DiskPages, engine: Engine):
        self._disk, self._engine = disk, engine
        self._identity = b""
        self._weights = -1
        self._like = jax.tree.leaves(engine.cache_shape().layers)

    def identify(self, model: Transformer, weights: int) -> None:
        """Tells the weights of now. weights: their number (``Span.weights``)."""
        self._identity, self._weights = _identity(model, self._engine), weights

    def find(self, document: Document, pages: int) -> list[list[np.ndarray]] | None:
        """The content of each page of a document, of each array of the cache; None where no file
        has it.
        """
        name = self._name(document)
        content = None if name is None else self._disk.find(document.owner, name)
        shapes = [(pages, *each.shape[1:]) for each in self._like]
        sizes = [math.prod(each.shape[1:]) * pages * each.dtype.itemsize for each in self._like]
        if content is None or len(content) != sum(sizes):
            return None
        ends = [*itertools.accumulate(sizes)]
        arrays = [
            np.frombuffer(content[end - size : end], each.dtype).reshape(shape)
            for size, end, shape, each in zip(sizes, ends, shapes, self._like, strict=True)
        ]
        return [list(page) for page in zip(*arrays, strict=True)]

    def keep(self, document: Document, blocks: Sequence[Sequence[jax.Array]]) -> None:
        """Keeps the keys of a document. blocks: its pages in order, blocks of them as
        ``Engine.read_pages`` gives them.
        """
        name = self._name(document)
        if name is not None:
            self._disk.keep(document.owner, name, blocks)

    def _name(self, document: Document) -> str | None:
        """The name of a document's file; None for one of earlier weights."""
        if document.weights != self._weights:
            return None
        own = self._identity + b"%d " % document.adapter
        hashed = hashlib.blake2b(own, digest_size=32)
        hashed.update(np.asarray(document.tokens, np.int64).tobytes())
        return hashed.hexdigest()


def _identity(model: Transformer, engine: Engine) -> bytes:
    """Hash of all that decides the bits of a document's keys, but its own tokens and adapter.

    It reads every weight, which takes about a second for each GB.
    """
    hashed = hashlib.blake2b(digest_size=32)
    sizes = dataclasses.asdict(engine.config)
    # which pages wait where changes no key, and neither does the number of pages
    kept = {key: value for key, value in sizes.items() if key not in ("host_pages_mb", "pages")}
    facts: list[Any] = [jax.__version__, kept, dict(engine.mesh.shape), model.config]
    facts.append(sorted({device.device_kind for device in engine.mesh.devices.flat}))
    hashed.update(repr(facts).encode())
    for path, array in jax.tree.leaves_with_path(model):
        hashed.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode())
        hashed.update(np.ascontiguousarray(array).view(np.uint8))
    return hashed.digest()


def _checked(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECK).digest()
