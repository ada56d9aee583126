"""Comparison of two runs: the place where they part first, and the inputs that differ.

The records of both are compared from their first step on, in the order in which a step is made:
its plan, the groups that were sampled, the batch, the weights after the update. Each is compared by
its digest and by what is on record; times are not compared. So the first thing that differs has
only equal things before it, and what differs beside the records (config, code, libraries, machine)
made it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_code import sft
from rl_code.checkpoint import checkpoint
from rl_code.checkpoint import record as checkpoint_record
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.metrics.progress import Progress
from rl_code.recording import kept_config, trajectory_difference
from rl_code.run import lineage, provenance
from rl_code.run.workdir import IMPORTED, STORE, imported
from rl_code.store import steps as steps_lib
from rl_code.store.errors import StoreError
from rl_code.store.group_records import GroupRecord
from rl_code.store.store import GroupStore


@dataclasses.dataclass(frozen=True)
class Parting:
    """The first thing that differs."""

    # None before the first step
    step: int | None
    # What differs: "plan", "record", "weights", "batch", "update", or the kind of a
    # ``trajectory_difference.Difference``.
    what: str
    # where and how, in words
    words: str

    def __str__(self) -> str:
        where = "before the first step" if self.step is None else f"at step {self.step}"
        return f"{where}: {self.what}: {self.words}"


@dataclasses.dataclass
class Comparison:
    """Result of ``compare``."""

    # The finished steps that both have on record.
    steps: range
    # The finished steps that each of them has on record.
    records: tuple[range, range]
    # groups that were compared and are equal
    groups: int = 0
    parting: Parting | None = None
    # What differs beside the records, in words.
    inputs: list[str] = dataclasses.field(default_factory=list)
    # Steps among ``steps`` that one of them lacks: dumps of others may have gaps.
    gaps: list[int] = dataclasses.field(default_factory=list)


def compare(one: Path, other: Path) -> Comparison:
    """Compares two runs up to where they part.

    Raises ConfigError for a folder without a run, and for two runs that have no finished step in
    common; StoreError when storage fails.
    """
    stores = _open(one), _open(other)
    finished = [_finished(store) for store in stores]
    there, here = (range(own[0], own[-1] + 1) for own in finished)
    steps = range(max(there.start, here.start), min(there.stop, here.stop))
    one_has, other_has = map(set, finished)
    if not one_has & other_has:
        raise ConfigError(
            f"{one} has steps {_words(there)} on record and {other} has steps {_words(here)}: "
            "there is no step in common to compare"
        )
    found = Comparison(steps, (there, here))
    found.gaps = sorted((one_has ^ other_has) & set(steps))
    found.parting = _warm_starts(one, other)
    with Progress("compared", len(found.steps), compiles=False) as progress:
        for step in sorted(one_has & other_has):
            if found.parting is not None:
                break
            _compare_step(found, stores, step)
            progress.update(step + 1 - steps.start)
    found.inputs = _inputs(one, other, stores, found.parting)
    return found


def _compare_step(found: Comparison, stores: tuple[GroupStore, GroupStore], step: int) -> None:
    """Counts the equal groups of a step, up to where the runs part."""
    for parting in _step(stores, step):
        if parting is not None:
            found.parting = parting
            return
        found.groups += 1


def _open(workdir: Path) -> GroupStore:
    if not steps_lib.exists(workdir / STORE):
        raise ConfigError(f"{workdir} holds no run: it has no {STORE}")
    return GroupStore(workdir / STORE)


def _finished(store: GroupStore) -> list[int]:
    """The consumed steps of a run. Raises ConfigError if there is none."""
    consumed = store.consumed()
    if not consumed:
        raise ConfigError(
            f"{store.folder.parent} has no finished step, so there is nothing to compare"
        )
    return consumed


def _words(steps: range) -> str:
    return f"{steps[0]} to {steps[-1]}"


# --- The records ----------------------------------------------------------------------------------


def _warm_starts(one: Path, other: Path) -> Parting | None:
    """True if the weights that training began with differ, where both runs had a warm start."""
    records = []
    for workdir in (one, other):
        saved = checkpoint.steps(workdir / sft.FOLDER)
        if not saved:
            return None
        folder = workdir / sft.FOLDER / "checkpoints"
        records.append(checkpoint_record.read(checkpoint_record.folder_of(folder, saved[-1])))
    there, here = (record.checksums for record in records)
    names = sorted(name for name in there | here if there.get(name) != here.get(name))
    if not names:
        return None
    return Parting(None, "weights", f"the warm starts end with other {', '.join(names[:5])}")


def _step(stores: tuple[GroupStore, GroupStore], step: int) -> Iterator[Parting | None]:
    """Differences of a step, in the order in which it is made; None for each group that does
    not.
    """
    one, other = stores
    plans = one.items(step), other.items(step)
    if found := steps_lib.differences(*plans):
        yield Parting(step, "plan", "; ".join(found[:3]))
        return
    for item in plans[0]:
        yield _group(stores, step, item.number)
    yield from _update(one.consumption(step), other.consumption(step), step)


def _group(stores: tuple[GroupStore, GroupStore], step: int, number: int) -> Parting | None:
    """True if the group of an item differs."""
    records: list[GroupRecord] = []
    for store in stores:
        run = store.folder.parent
        try:
            record = store.record(step, number)
        except StoreError as error:
            return Parting(step, "record", f"group {number} of {run}: {error}")
        if record.digest != store.consumption(step)["digests"][number]:
            words = f"group {number} of {run} is another one than the group that was trained on"
            return Parting(step, "record", f"{words}{_tampered(stores, step, number)}")
        records.append(record)
    there, here = records
    if there.digest == here.digest:
        return None
    difference = trajectory_difference.of_groups(there.group, here.group)
    if difference is None:
        return None
    words = f"group {number} ({here.group.task.id}), {difference}"
    return Parting(step, difference.kind, words)


def _tampered(stores: tuple[GroupStore, GroupStore], step: int, number: int) -> str:
    """Difference of such a group from that of the other run, in words; "" if nobody can say."""
    try:
        there, here = (store.record(step, number).group for store in stores)
    except StoreError:
        return ""
    difference = trajectory_difference.of_groups(there, here)
    return "" if difference is None else f"; {difference}"


def _update(there: dict[str, Any], here: dict[str, Any], step: int) -> Iterator[Parting]:
    """True if the weights after a step differ, of equal groups."""
    if there["weights"] == here["weights"]:
        return
    batches = there.get("batch"), here.get("batch")
    words = f"weights {there['weights']} there, {here['weights']} here"
    if None in batches:
        yield Parting(step, "batch or update", f"equal groups; {words}")
    elif batches[0] != batches[1]:
        yield Parting(step, "batch", f"equal groups, another batch of them; {words}")
    else:
        yield Parting(step, "update", f"equal groups and an equal batch; {words}")


# --- The inputs -----------------------------------------------------------------------------------


def _inputs(
    one: Path, other: Path, stores: tuple[GroupStore, GroupStore], parting: Parting | None
) -> list[str]:
    """Differences of config, code, libraries and machine at the step at which two runs part."""
    step = None if parting is None else parting.step
    configs = []
    starts = []
    for workdir, store in zip((one, other), stores, strict=True):
        configs.append(_config_at(workdir, step))
        when = None if step is None else store.consumption(step)["when"]
        starts.append(provenance.last(workdir, when))
    found = [
        f"config.{key}: {read_config.lookup(configs[0], key)!r} -> "
        f"{read_config.lookup(configs[1], key)!r}"
        for key in read_config.diff(*configs)
    ]
    for words in provenance.differing(*starts):
        if not words.startswith("code: "):
            found.append(words)
    if starts[0].get("code") != starts[1].get("code"):
        found.append(f"code: {_files(one, other, starts)}")
    return found


def _config_at(workdir: Path, step: int | None) -> Any:
    """The config of a step, or of the whole run; of an imported run what the import says."""
    if (found := imported(workdir)) is not None:
        return {IMPORTED: found}
    own = kept_config.read(workdir)
    return own if step is None else lineage.config_at(workdir, own, step)


def _files(one: Path, other: Path, starts: list[dict[str, Any]]) -> str:
    """The source files that differ between two starts."""
    there, here = (
        provenance.code_of(workdir, start.get("code", ""))
        for workdir, start in zip((one, other), starts, strict=True)
    )
    if not there or not here:
        return "which files differ was not recorded"
    names = sorted(name for name in there | here if there.get(name) != here.get(name))
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
