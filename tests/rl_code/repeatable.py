"""Which metrics are the same whenever, and in however many pieces, a run is made."""

from __future__ import annotations

from typing import Any

# Groups of metrics of what a process did and how long it took. Groups that were there already when
# it was started again are not sampled again.
DONE = ("time/", "engine/", "actor/", "weights/")
# What the record took on the disk when its thread had last looked. That is some time after a shard
# was begun, perhaps only in a later step, and not at all if the process was killed before.
RECORD = frozenset({"record/mb_per_mtokens", "record/mb", "record/files", "record/steps"})


def repeatable(row: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a step that every run of one config writes."""
    return {
        name: value
        for name, value in row.items()
        if name not in RECORD and not name.startswith(DONE)
    }
