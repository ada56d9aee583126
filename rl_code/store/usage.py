"""How much the record of a run takes on the disk, beside what it holds."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from rl_code.store.errors import StoreError
from rl_code.store.reader import RecordReader

_BLOCK = 512  # bytes of the blocks that stat(2) counts


@dataclasses.dataclass(frozen=True)
class Usage:
    """Of a store."""

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

    Raises StoreError, also for steps that an earlier version of this code consumed.
    """
    reader = RecordReader(store)
    listings = {step: reader.listing(step) for step in reader.steps()}
    consumed = [step for step, listing in listings.items() if listing and listing.consumed]
    consumptions = [reader.consumption(step) for step in consumed]
    for step, content in zip(consumed, consumptions, strict=True):
        if "tokens" not in content:
            raise StoreError(
                f"step {step} does not say how many tokens it has: an earlier version of this "
                "code consumed it"
            )
    files = size = 0
    for folder, _, names in os.walk(store):
        for name in (".", *names):
            try:
                size += _BLOCK * os.lstat(Path(folder) / name).st_blocks
                files += name != "."
            except FileNotFoundError:
                continue  # a heartbeat, or a claim that has just been put away
    return Usage(
        steps=len(consumed),
        tokens=sum(content["tokens"] for content in consumptions),
        sampled=sum(content["sampled"] for content in consumptions),
        files=files,
        bytes=size,
    )
