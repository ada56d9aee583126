"""Finished runs and what they were trained on, as reports of experiments read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_code.run.workdir import STORE
from rl_code.store import steps as steps_lib
from rl_code.store.store import GroupStore
from rl_code.types import Group
from sweeps import DONE


def finished(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """(workdir, config) of the runs of a sweep that have finished."""
    for path in sorted(folder.glob(f"*/{DONE}")):
        yield path.parent, json.loads(path.read_text())["config"]


def trained(run: Path) -> Iterator[tuple[int, Group]]:
    """(step, group) of all that a run was trained on so far; nothing of one that has not begun."""
    if not steps_lib.exists(run / STORE):
        return
    store = GroupStore(run / STORE)
    for step in store.consumed():
        for item in store.items(step):
            if item.trained:
                yield step, store.record(step, item.number).group
