"""Blocks of keys and values that are not on the device: in host memory up to a budget, the rest on
disk.

Writes, and reads from disk, run in threads, which start them in the order in which they were asked
for. A read waits for the writes of its block.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from attention.cache.records import Records
from attention.cache.storage import nbytes, to_device, to_host_apart
from attention.methods.method import Pair

# What names a block: a tuple of numbers.
Key = tuple[int, ...]


class HostBlocks:
    """Blocks (k, v) by key.

    budget: most bytes in host memory. The least recently used blocks beyond it are in a file in
    ``directory``. workers: threads that move blocks.
    """

    def __init__(self, directory: Path, budget: int, workers: int):
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._budget, self._workers = budget, workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="host_blocks")
        self._lock = threading.Lock()
        self._leaving = threading.Lock()  # held while blocks go to disk, so that each goes once
        self._host: OrderedDict[Key, Pair] = OrderedDict()
        self._bytes = 0
        self._disk = Records(directory / "blocks")
        self._writes: dict[Key, Future] = {}
        self._counts = Counter(
            to_host_bytes=0, to_disk_bytes=0, to_device_bytes=0, from_disk_bytes=0
        )

    def write(self, keys: Sequence[Key], blocks: Pair) -> Future:
        """Keeps blocks in place of earlier ones with the same keys.

        blocks: device arrays (k, v) whose first axis is that of the keys, or longer. Returns at
        once; the future that it returns is done when the blocks are kept.
        """
        # a block must be kept in the order of its writes, which may be in different threads
        before = {self._writes[key] for key in keys if key in self._writes}
        write = self._threads.submit(self._keep, list(keys), blocks, before)
        self._writes.update(dict.fromkeys(keys, write))
        return write

    def read(self, keys: Sequence[Key]) -> list[Pair]:
        """The blocks as arrays in host memory, wherever they are now; waits for them."""
        before = {key: self._pending(key) for key in keys}
        found = {key: None if before[key] else self._in_memory(key) for key in keys}
        # what is not in memory yet, or at all, is fetched by the threads, each an equal share
        rest = [key for key, block in found.items() if block is None]
        shares = [rest[start :: self._workers] for start in range(min(len(rest), self._workers))]

        def fetch(share: list[Key]) -> list[Pair]:
            return [self._fetch(key, before[key]) for key in share]

        for share, blocks in zip(shares, list(self._threads.map(fetch, shares)), strict=True):
            found.update(zip(share, blocks, strict=True))
        return [found[key] for key in keys]

    def send(self, key: Key) -> Future[Pair]:
        """Starts to move a block to the device; the future gives it there."""
        before = self._pending(key)
        return self._threads.submit(lambda: to_device(self._fetch(key, before)))

    def forget(self, keys: set[Key]) -> None:
        """Drops blocks, in memory and on disk."""
        for key in keys:
            if key in self._writes:  # whether it failed is of no interest any more
                concurrent.futures.wait([self._writes.pop(key)])
            with self._lock:
                self._bytes -= nbytes(self._host.pop(key, ()))
                self._disk.drop(key)

    def flush(self) -> None:
        """Waits for the writes, and until the disk has what belongs there and no copy of it is in
        memory.
        """
        for write in set(self._writes.values()):
            write.result()
        self._writes.clear()
        self._disk.flush()

    def close(self) -> None:
        """Waits for what was asked for, raises what went wrong, ends the threads and removes what
        is on disk.
        """
        self._threads.shutdown(wait=True)
        try:
            for write in set(self._writes.values()):
                write.result()
        finally:
            self._disk.close()

    def metrics(self) -> dict[str, int]:
        """Bytes in host memory, blocks on disk, and bytes moved since the start."""
        with self._lock:
            return {"host_bytes": self._bytes, "disk_blocks": len(self._disk), **self._counts}

    def _pending(self, key: Key) -> Future | None:
        """The write of a block that is not done yet, or that failed."""
        # a failed write stays, so that whoever needs the block learns of it
        write = self._writes.get(key)
        if write is not None and write.done() and write.exception() is None:
            del self._writes[key]
            return None
        return write

    def _keep(self, keys: list[Key], blocks: Pair, before: set[Future]) -> None:
        # this write takes the place of those before it, so it does not matter if one of them failed
        concurrent.futures.wait(before)
        for key, block in zip(keys, to_host_apart(blocks, len(keys)), strict=True):
            with self._lock:
                self._counts["to_host_bytes"] += nbytes(block)
                self._bytes += nbytes(block) - nbytes(self._host.pop(key, ()))
                self._host[key] = block
                self._disk.drop(key)
            self._keep_to_budget()

    def _keep_to_budget(self) -> None:
        with self._leaving:
            while True:
                with self._lock:
                    if self._bytes <= self._budget:
                        return
                    key, block = next(iter(self._host.items()))
                # The lock is not held while the disk works, so the block stays in memory until it
                # is written: a reader finds it in one of the two at any time.
                self._disk.write(key, block)
                with self._lock:
                    if self._host.get(key) is block:
                        del self._host[key]
                        self._bytes -= nbytes(block)
                        self._counts["to_disk_bytes"] += nbytes(block)
                    else:  # written anew, or dropped, in the meantime
                        self._disk.drop(key)

    def _in_memory(self, key: Key) -> Pair | None:
        with self._lock:
            block = self._host.get(key)
            if block is not None:
                self._host.move_to_end(key)
                self._counts["to_device_bytes"] += nbytes(block)
        return block

    def _fetch(self, key: Key, write: Future | None) -> Pair:
        if write is not None:
            write.result()
        block = self._in_memory(key)
        if block is None:
            block = tuple(self._disk.read(key))
            with self._lock:
                self._counts["to_device_bytes"] += nbytes(block)
                self._counts["from_disk_bytes"] += nbytes(block)
        return block
