"""Blocks of keys and values that are not on the device: in host memory up to a budget, the rest on disk.

Reads and writes run in threads, in the order in which they were asked for; a read waits for the writes of its block.
"""

from __future__ import annotations

import shutil
import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from attention.cache.paged import Pair
from attention.cache.storage import load, nbytes, save, to_device, to_host

# What names a block: a tuple of numbers.
Key = tuple[int, ...]


class HostBlocks:
    """(k, v) by key. budget: bytes in host memory; the least recently used beyond it are in ``directory``."""

    def __init__(self, directory: Path, budget: int, workers: int):
        self._directory, self._budget = Path(directory), budget
        self._directory.mkdir(parents=True, exist_ok=True)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="host_blocks")
        self._lock = threading.Lock()
        self._host: OrderedDict[Key, Pair] = OrderedDict()
        self._bytes = 0
        self._disk: set[Key] = set()
        self._writes: dict[Hashable, Future] = {}
        self.counts: Counter[str] = Counter()

    def write(self, key: Key, block: Pair) -> None:
        """Keeps a block of device arrays, in place of an earlier one; returns at once."""
        self._writes[key] = self._threads.submit(self._keep, key, block, self._writes.get(key))

    def read(self, key: Key) -> Future[Pair]:
        """The block in host memory, wherever it is now."""
        return self._threads.submit(self._fetch, key, self._writes.get(key))

    def send(self, key: Key) -> Future[Pair]:
        """The block on the device."""
        before = self._writes.get(key)
        return self._threads.submit(lambda: to_device(self._fetch(key, before)))

    def forget(self, keys: set[Key]) -> None:
        """Drops blocks."""
        for key in keys:
            if key in self._writes:
                self._writes.pop(key).result()
            with self._lock:
                self._bytes -= nbytes(self._host.pop(key, ()))
                if key in self._disk:
                    self._disk.remove(key)
                    shutil.rmtree(self._path(key))

    def close(self) -> None:
        """Waits for what was asked for, raises what went wrong, ends the threads."""
        self._threads.shutdown(wait=True)
        for write in self._writes.values():
            write.result()

    def metrics(self) -> dict[str, int]:
        """Bytes in host memory, blocks on disk, and bytes moved since the start."""
        with self._lock:
            return {"host_bytes": self._bytes, "disk_blocks": len(self._disk), **self.counts}

    def _path(self, key: Key) -> Path:
        return self._directory / "-".join(map(str, key))

    def _keep(self, key: Key, block: Pair, before: Future | None) -> None:
        if before is not None:
            before.result()
        block = to_host(block)
        with self._lock:
            self.counts["to_host_bytes"] += nbytes(block)
            self._bytes += nbytes(block) - nbytes(self._host.pop(key, ()))
            self._host[key] = block
            self._disk.discard(key)
            while self._bytes > self._budget:
                last, (k, v) = next(iter(self._host.items()))
                save(self._path(last), {"k": k, "v": v}, {})
                del self._host[last]
                self._disk.add(last)
                self._bytes -= nbytes((k, v))
                self.counts["to_disk_bytes"] += nbytes((k, v))

    def _fetch(self, key: Key, write: Future | None) -> Pair:
        if write is not None:
            write.result()
        with self._lock:
            block = self._host.get(key)
            if block is not None:
                self._host.move_to_end(key)
        from_disk = block is None
        if from_disk:
            arrays, _ = load(self._path(key))
            block = arrays["k"], arrays["v"]
        with self._lock:
            self.counts["to_device_bytes"] += nbytes(block)
            self.counts["from_disk_bytes"] += nbytes(block) * from_disk
        return block
