"""Shares the record of a run with its fork, by hard links: no group is copied, and what either run
deletes stays with the other.

A shard whose last steps the fork does not take over is linked under a name that ends where the fork
begins: readers look for a step only where the name of a shard says so. What a fork takes over of
the steps from its own first one on is for the caller to say (``Reach``). Claims are never taken
over: they are those of the parent's actors.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import shutil
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Literal

from rl_code.store import shards
from rl_code.store import steps as steps_lib
from rl_code.store.errors import StoreError, explain
from rl_code.store.group_logs import GroupLog
from rl_code.store.processes import ProcessId
from rl_code.store.reader import REMOVED, RecordReader
from rl_code.store.steps import Listing

# What a fork takes over of the steps from its first own step on.
#   nothing         what is planned and sampled there may depend on what has changed
#   sampled before  the groups that versions of before the fork sampled, and the plans they answer
#   everything      nothing has changed: plans, groups, and consumptions, which must come out alike
type Reach = Literal["nothing", "sampled before", "everything"]

# Whose file the groups are in that a fork takes over one by one. No actor may have this name.
_PARENT = ProcessId("_parent", 0)
# The parent may go on, and move steps into shards meanwhile, where the next attempt finds them.
_ATTEMPTS = 5


@dataclasses.dataclass
class Shared:
    """Arrays that were shared."""

    # steps before the fork
    steps: int = 0
    # their groups
    groups: int = 0
    # groups of later steps
    beyond: int = 0
    # bytes of files that both runs have
    bytes: int = 0


def share(source: Path, target: Path, step: int, reach: Reach, ahead: int) -> Shared:
    """Makes the store ``target`` of a fork at ``step`` from the parent's store; returns what it
    shares.

    ahead: how many steps may be sampled before the weights of ``step`` are trained: the bound on
    staleness of the parent. Raises StoreError, also for two file systems.
    """
    for attempt in range(_ATTEMPTS):
        shutil.rmtree(target, ignore_errors=True)
        try:
            total = _share(source, target, step, reach, ahead)
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError) or attempt == _ATTEMPTS - 1:
                raise
            continue
        reader = RecordReader(target)
        there = [at for at in RecordReader(source).steps() if at < step]
        if [at for at in reader.steps() if at < step] == there:
            return _count(reader, step, total)
    raise StoreError(f"{source} changes all the time while it is shared; try again")


def _share(source: Path, target: Path, step: int, reach: Reach, ahead: int) -> int:
    """One attempt; the bytes of shared files."""
    end = math.inf if reach == "everything" else step  # of the steps that are shared as a whole
    total = 0
    for folder in (target, target / steps_lib.STEPS, target / "processes", target / shards.SHARDS):
        with explain("make the store's folder", folder):
            folder.mkdir()
    done: set[int] = set()
    for (first, last), path in shards.list_shards(source).items():
        if first < end:
            last = int(min(last, end - 1))
            total += link(path, shards.shard_path(target, first, last))
            done |= {at for at in shards.open_shard(path).steps if first <= at <= last}
    if (source / shards.SHARDS / REMOVED).exists():
        link(source / shards.SHARDS / REMOVED, target / shards.SHARDS / REMOVED)
    for at in steps_lib.steps(source):
        listing = steps_lib.list_step(source, at)
        if at < end and at not in done and listing is not None:
            total += _share_step(source, target, at, listing)
    if reach == "sampled before":
        for at in range(step, step + ahead + 1):
            _take_sampled(RecordReader(source), target, at, step)
    return total


def _share_step(source: Path, target: Path, at: int, listing: Listing) -> int:
    """Shares the folder of a step; the bytes of shared files."""
    folder = steps_lib.make_folder(target, at)
    total = 0
    for name in _names(source, at, listing):
        total += link(steps_lib.step_folder(source, at) / name, folder / name)
    groups = steps_lib.groups_folder(source, at)
    if listing.consumed:
        return total + link_tree(groups, folder / "groups")
    # Actors of the parent go on with the files of an open step, and what they deliver from now on
    # is not the fork's. So the groups that are there are copied.
    reader = RecordReader(source)
    _deliver(reader, target, at, reader.groups(at, listing))
    return total


def _names(store: Path, at: int, listing: Listing) -> Iterator[str]:
    """The files of a step's folder that are shared."""
    for first in listing.parts:
        yield steps_lib.part_path(store, at, first).name
        if listing.consumed and first in listing.taken:
            yield steps_lib.taken_path(store, at, first).name
    if listing.consumed:
        yield steps_lib.CONSUMED


def _take_sampled(reader: RecordReader, target: Path, at: int, step: int) -> None:
    """Takes over the groups of a step that versions up to ``step`` sampled, and the parts of the
    plan that they answer. These are a few groups, which may come from a shard, so they are written.
    """
    listing = reader.listing(at)
    if listing is None:
        return
    groups = {
        number
        for number in reader.groups(at, listing)
        if max(reader.group(at, number).versions, default=0) <= step
    }
    for first in listing.parts:
        part = reader.part(at, first)
        if part[0].kind == "refill":
            return  # the advantage, which may have changed, decides how many there are
        steps_lib.make_folder(target, at)
        path = steps_lib.part_path(target, at, first)
        with explain("write", path):
            path.write_bytes(steps_lib.part_bytes(part))
        _deliver(reader, target, at, groups & {item.number for item in part})
        # What a part screens decides the parts after it.
        if not groups.issuperset(item.number for item in part):
            return


def _deliver(reader: RecordReader, target: Path, at: int, numbers: Set[int]) -> None:
    """Copies groups of a step as if an actor had claimed and delivered them, and ended."""
    folder = steps_lib.groups_folder(target, at)
    log = GroupLog(folder, _PARENT)
    with explain("write the groups of the parent to", folder):
        for number in sorted(numbers):
            log.append(reader.group_file(at, number)[0])
    log.close()
    claimed: Path | None = None
    for first in reader.planned(at).parts:
        for block in steps_lib.blocks(reader.part(at, first)):
            if any(item.number in numbers for item in block):
                path = steps_lib.claim_path(target, at, block[0].number, 0)
                with explain("write a claim of the parent to", path):
                    if claimed is None:
                        path.write_bytes(steps_lib.claim_bytes(_PARENT))
                        claimed = path
                    else:
                        os.link(claimed, path)


def _count(reader: RecordReader, step: int, total: int) -> Shared:
    counts = {at: len(reader.groups(at)) for at in reader.steps()}
    before = [count for at, count in counts.items() if at < step]
    return Shared(len(before), sum(before), sum(counts.values()) - sum(before), total)


# --- Links ----------------------------------------------------------------------------------------


def link(source: Path, target: Path) -> int:
    """Gives a file a second name; its bytes. Raises StoreError."""
    with explain(f"link {source} to", target):
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno == errno.EXDEV:
                raise StoreError(
                    f"{target.parent} is on another file system than {source.parent}: a fork "
                    "shares files by hard links; choose a --workdir beside its parent"
                ) from error
            raise
        return target.stat().st_size


def link_tree(source: Path, target: Path, leave: frozenset[str] = frozenset()) -> int:
    """Makes a folder whose files are second names of those of ``source``; their bytes. leave: names
    of files that are left out.
    """
    target.mkdir(parents=True, exist_ok=True)
    total = 0
    for path in sorted(source.iterdir()):
        if path.name in leave:
            continue
        inner = target / path.name
        total += link_tree(path, inner) if path.is_dir() else link(path, inner)
    return total
