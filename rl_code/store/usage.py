"""Disk usage of the record of a run, beside what it holds."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

from rl_code.store import shards
from rl_code.store import steps as steps_lib
from rl_code.store.reader import RecordReader
from rl_code.store.sealed import unseal

_BLOCK = 512  # bytes of the blocks that stat(2) counts


@dataclasses.dataclass(frozen=True)
class Usage:
    """Disk usage of a store."""

    # consumed steps that are kept
    steps: int
    # tokens of their trajectories, prompts included, and those of them that the policy sampled
    tokens: int
    sampled: int
    # files of the store
    files: int
    # bytes that they and their folders take on the disk, in whole blocks
    bytes: int

    @property
    def mb_per_mtokens(self) -> float:
        """Megabytes (10^6 bytes) per million tokens."""
        return self.bytes / max(self.tokens, 1)

    @property
    def files_per_100_steps(self) -> float:
        """Files for each hundred steps."""
        return 100 * self.files / max(self.steps, 1)


def measure(store: Path) -> Usage:
    """Looks at every file of a store, which may be in use.

    Raises StoreError.
    """
    counts = _consumed(store)
    files = size = 0
    for folder, _, names in os.walk(store):
        for name in (".", *names):
            try:
                size += _BLOCK * os.lstat(Path(folder) / name).st_blocks
                files += name != "."
            except FileNotFoundError:
                continue  # a heartbeat, or a claim that has just been put away
    return Usage(
        steps=len(counts),
        tokens=sum(tokens for tokens, _ in counts.values()),
        sampled=sum(sampled for _, sampled in counts.values()),
        files=files,
        bytes=size,
    )


def _consumed(store: Path) -> dict[int, tuple[int, int]]:
    """Consumed step -> its tokens, and those of them that were sampled."""
    reader = RecordReader(store)
    found = {}
    # Folders first: a step that moves into a shard meanwhile is then seen twice, not missed.
    for step in steps_lib.steps(store):
        listing = reader.listing(step)
        if listing is not None and listing.consumed:
            found[step] = _counts(reader.consumption(step))
    for (first, last), path in shards.list_shards(store).items():
        stat = path.stat()
        inside = _in_shard(path, stat.st_ino, stat.st_mtime_ns)
        found |= {step: count for step, count in inside.items() if first <= step <= last}
    removed = reader.removed()
    return {step: n for step, n in found.items() if removed is None or step >= removed.before}


@functools.cache
def _in_shard(path: Path, inode: int, changed: int) -> dict[int, tuple[int, int]]:
    """As ``_consumed``, of one shard, which never changes: each is opened once by a process."""
    found = {}
    for step, entry in shards.open_shard(path).steps.items():
        found[step] = _counts(unseal(entry.files[steps_lib.CONSUMED], path))
    return found


def _counts(consumption: dict[str, Any]) -> tuple[int, int]:
    return consumption["tokens"], consumption["sampled"]
