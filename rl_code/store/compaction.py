"""Puts consumed steps into shards, and deletes old shards, while a run goes on.

A step moves in this order, so that a process that is killed at any moment loses nothing and leaves
no step in no place:

1. The shard is written aside, forced to the disk, and read back.
2. It gets its name by one link, which is forced to the disk too. From then on readers find its
   steps there, whatever is in their folders.
3. Each step's folder is moved aside in one step, and deleted there.

What a killed process left of step 3 is deleted when the learner starts again.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from absl import logging

from rl_code.host import files
from rl_code.store import group_records, shards
from rl_code.store import steps as steps_lib
from rl_code.store.errors import StoreError, explain
from rl_code.store.group_logs import OpenFiles
from rl_code.store.processes import StoreProcess
from rl_code.store.reader import REMOVED, RecordReader, Removed
from rl_code.store.sealed import seal
from rl_code.store.shards import Content


class Compaction:
    """Moves consumed steps into shards. For the learner's process alone, one thread at a time.

    shard_steps: steps of a shard. Step s belongs to the block s // shard_steps, and a block is put
      into a shard when its last step is consumed.
    """

    def __init__(self, process: StoreProcess, store: Path, shard_steps: int):
        self._process, self._store, self._shard_steps = process, store, shard_steps
        self._reader = RecordReader(store)
        self._damaged: set[int] = set()  # steps that stay in their folders

    def run(self, *, rest: bool = False) -> None:
        """Puts every block that is consumed into a shard; with ``rest``, those that are begun too.

        A step with a damaged group stays in its folder, and that is logged. Raises StoreError when
        the storage fails.
        """
        self._delete_left_folders()
        steps = [at for at in steps_lib.steps(self._store) if at not in self._damaged]
        listings = {step: steps_lib.list_step(self._store, step) for step in steps}
        consumed = [step for step, listing in listings.items() if listing and listing.consumed]
        moved = [last for _, last in shards.list_shards(self._store)]
        newest = max([*consumed, *moved], default=-1)
        for block, found in itertools.groupby(consumed, lambda step: step // self._shard_steps):
            if rest or newest >= (block + 1) * self._shard_steps - 1:
                self._compact([step for step in found if self._sound(step)])

    def _compact(self, steps: Sequence[int]) -> None:
        if not steps:
            return
        path = shards.shard_path(self._store, steps[0], steps[-1])
        aside = self._process.aside()
        with explain(f"write the shard of steps {steps[0]} to {steps[-1]} to", path):
            path.parent.mkdir(exist_ok=True)
            files.sync(self._store)  # the name of the folder of shards
            try:
                written = shards.write(aside, map(self._content, steps))
                files.sync(aside)
                shards.check(aside, written)
                if not files.link_once(aside, path):
                    raise StoreError(f"{path} is there and does not hold all of its steps")
            finally:
                aside.unlink(missing_ok=True)
        for step in steps:
            self._delete_folder(step)

    def _content(self, step: int) -> Content:
        """The files of a step's folder that go into its shard."""
        folder = steps_lib.step_folder(self._store, step)
        listing = self._reader.planned(step)
        names = [steps_lib.part_path(self._store, step, first).name for first in listing.parts]
        small = {name: (folder / name).read_bytes() for name in [*names, steps_lib.CONSUMED]}
        numbers = sorted(self._reader.groups(step, listing))
        return Content(step, small, self._reader.claims(step, listing), self._groups(step, numbers))

    def _groups(self, step: int, numbers: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        with OpenFiles() as opened:
            for number in numbers:
                yield number, self._reader.group_file(step, number, opened)[0]

    def _sound(self, step: int) -> bool:
        """True if the files of a step are undamaged; the first that is not is logged."""
        try:
            listing = self._reader.planned(step)
            self._reader.items(step, listing)
            self._reader.consumption(step)
            with OpenFiles() as opened:
                for number in self._reader.groups(step, listing):
                    group_records.check(*self._reader.group_file(step, number, opened))
        except StoreError as error:
            logging.warning("step %d stays in its folder and in no shard: %s", step, error)
            self._damaged.add(step)
            return False
        return True

    def _delete_left_folders(self) -> None:
        """Deletes the folders of steps that are in a shard, or were removed."""
        for step in steps_lib.steps(self._store):
            if self._reader.moved(step):
                self._delete_folder(step)

    def _delete_folder(self, step: int) -> None:
        folder = steps_lib.step_folder(self._store, step)
        aside = self._process.aside()
        with explain("delete the folder of a step", folder):
            os.rename(folder, aside)
            shutil.rmtree(aside)

    def remove_before(self, step: int, keep: int) -> None:
        """Removes what is before ``step``, less what is in one shard with later steps, and says so
        in the log.

        keep: what ``record.keep`` says, for the messages of those who ask for what is gone.
        """
        spans = list(shards.list_shards(self._store))
        while straddling := [first for first, last in spans if first < step <= last]:
            step = min(straddling)
        gone = [last for _, last in spans if last < step]
        if not gone and min(steps_lib.steps(self._store), default=step) >= step:
            return
        # Written before anything is deleted: whoever asks for a step that is gone must be told why.
        path = self._store / shards.SHARDS / REMOVED
        with explain("write", path):
            files.write_atomically(path, seal({"before": step, "keep": keep}))
        logging.info("%s", Removed(step, keep))
        self.delete_removed()

    def delete_removed(self) -> None:
        """Deletes what is marked as removed."""
        removed = self._reader.removed()
        if removed is None:
            return
        for (_, last), path in shards.list_shards(self._store).items():
            if last < removed.before:
                with explain("delete the shard", path):
                    path.unlink(missing_ok=True)
        self._delete_left_folders()
