"""Keeps the record of a run small while it grows: shards in the background, and removal of steps.

The record of a run is its store: what was planned, sampled and consumed. With its checkpoints it
can make every version of the weights again: from a checkpoint of step c and the groups of the steps
from c on, training makes versions c + 1, c + 2, ... bit for bit.

So the record may begin at step c only if the checkpoint of step c stays. ``keep`` therefore pins
checkpoints: the one at which the record begins, and the one at which it will begin next, which is
the first that is at least ``keep`` steps later. When ``keep`` steps are done after that one, the
record is cut there. Between ``keep`` and about twice as many steps are on disk at any time (a shard
is the least that is removed), and two checkpoints more than ``checkpoint.keep`` says. From step
c + max_staleness on, the versions that sampled a kept trajectory can be made again too.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from pathlib import Path

from absl import logging

from rl_code.checkpoint import record as checkpoint_record
from rl_code.config.read_config import at_least
from rl_code.store import usage
from rl_code.store.compaction import Compaction
from rl_code.store.errors import StoreError
from rl_code.store.store import GroupStore


@dataclasses.dataclass(frozen=True)
class RecordConfig:
    """Settings for the record of a run, which holds all that it sampled."""

    # Steps that are put together in one file when they are consumed.
    shard_steps: int = 25
    # The least number of newest steps that are kept; None for all. Older steps are removed where a
    # checkpoint allows it: up to twice as many are there, and two more checkpoints are kept.
    keep: int | None = None

    def __post_init__(self):
        at_least(self, shard_steps=1, keep=1)


class RecordKeeper:
    """Works in a thread of the learner's process. A context manager; leaving it waits for the
    thread.

    Does nothing in a process of the learner that does not write the store. Storage that fails is
    logged, and tried again at the next shard: training does not depend on it.
    """

    def __init__(self, store: GroupStore, workdir: Path, config: RecordConfig):
        self._config, self._store = config, store.folder
        self._checkpoints = workdir / "checkpoints"
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "record")
        self._pins = threading.Lock()  # pins are made by the learner's thread and dropped by ours
        self._done = 0  # steps that are consumed
        self._usage: usage.Usage | None = None
        self._compaction = None
        if store.writes:
            self._compaction = Compaction(store.process, store.folder, config.shard_steps)
            self._thread.submit(self._work)

    def consumed(self, step: int) -> None:
        """Says that a step was consumed."""
        self._done = step + 1
        if self._compaction is not None and self._done % self._config.shard_steps == 0:
            self._thread.submit(self._work)

    def saved(self, step: int) -> None:
        """Says that a checkpoint was saved, after ``step`` steps."""
        keep = self._config.keep
        if self._compaction is None or keep is None:
            return
        with self._pins:
            pins = checkpoint_record.pinned(self._checkpoints)
            # Shards are removed whole, so pins that are closer than a shard would be of no use.
            if step < max(pins, default=0) + max(keep, self._config.shard_steps):
                return
            checkpoint_record.pin(self._checkpoints, [*pins, step])
        self._thread.submit(self._work)

    def finish(self) -> None:
        """Puts what is left into a shard, when all steps are done."""
        if self._compaction is not None:
            self._thread.submit(self._work, rest=True).result()

    def metrics(self) -> dict[str, float]:
        """Disk usage of the record when it was last looked at, after a shard was made."""
        if self._usage is None or not self._usage.steps:
            return {}
        return {
            "record/mb_per_mtokens": self._usage.mb_per_mtokens,
            "record/mb": self._usage.bytes / 1e6,
            "record/files": float(self._usage.files),
            "record/steps": float(self._usage.steps),
        }

    def __enter__(self) -> RecordKeeper:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def _work(self, *, rest: bool = False) -> None:
        try:
            self._compaction.delete_removed()
            self._compaction.run(rest=rest)
            self._cut()
            self._usage = usage.measure(self._store)
        except (StoreError, OSError) as error:
            logging.warning("the record was not put into shards, and will be later: %s", error)

    def _cut(self) -> None:
        """Removes the steps that ``record.keep`` does not ask for."""
        keep = self._config.keep
        if keep is None:
            return
        with self._pins:
            pins = checkpoint_record.pinned(self._checkpoints)
            committed = checkpoint_record.steps(self._checkpoints)
            first = max(
                (pin for pin in pins if pin in committed and pin + keep <= self._done), default=0
            )
            if first:
                self._compaction.remove_before(first, keep)
                checkpoint_record.pin(self._checkpoints, [pin for pin in pins if pin >= first])
