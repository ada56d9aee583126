"""Groups that runs were trained on, as reports of experiments read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rl_code.run.workdir import STORE
from rl_code.store import steps as steps_lib
from rl_code.store.store import GroupStore
from rl_code.types import Group


def trained(run: Path) -> Iterator[tuple[int, Group]]:
    """(step, group) of all that a run was trained on so far; nothing of one that has not begun."""
    if not steps_lib.exists(run / STORE):
        return
    store = GroupStore(run / STORE)
    for step in store.consumed():
        for item in store.items(step):
            if item.trained:
                yield step, store.record(step, item.number).group
