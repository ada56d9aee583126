"""Makes some folders slow in a whole Python process, as shared storage under load is.

Python imports a module of this name when it starts, if its folder is in PYTHONPATH. So the programs
that ``launch.faults --storage_ms`` starts have slow storage, and nothing in them knows of it. What
native code reads and writes (the arrays of checkpoints and versions) stays fast.

SLOW_STORAGE: the folders, with ``os.pathsep`` between them. SLOW_STORAGE_MS: mean delay of an
operation on a path in them; every ``STALL_EVERY``-th one, at random, takes ``STALL`` times as long,
unless SLOW_STORAGE_STALLS is 0.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import random
import time
from collections.abc import Callable
from typing import Any

STALL_EVERY = 500
STALL = 100
# Those whose first argument is a path.
OPERATIONS = (
    "open", "stat", "link", "replace", "rename", "unlink", "mkdir", "rmdir", "listdir", "scandir",
)  # fmt: skip


def install(folders: tuple[str, ...], mean_ms: float, stalls: bool) -> None:
    """Slows what this process does in the folders from now on."""
    chance = random.Random(os.getpid())

    def wait() -> None:
        delay_ms = 2 * mean_ms * chance.random()
        if stalls and chance.randrange(STALL_EVERY) == 0:
            delay_ms = STALL * mean_ms
        time.sleep(delay_ms / 1000)

    def slowed(operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def after_waiting(path: Any = ".", *args: Any, **settings: Any) -> Any:
            # a number is a file that is open already
            if not isinstance(path, int) and os.fsdecode(path).startswith(folders):
                wait()
            return operation(path, *args, **settings)

        return after_waiting

    def sync(descriptor: int) -> None:
        wait()
        fsync(descriptor)

    fsync, os.fsync = os.fsync, sync
    for name in OPERATIONS:
        setattr(os, name, slowed(getattr(os, name)))
    builtins.open = io.open = slowed(io.open)


if "SLOW_STORAGE" in os.environ:
    install(
        tuple(os.environ["SLOW_STORAGE"].split(os.pathsep)),
        float(os.environ["SLOW_STORAGE_MS"]),
        os.environ.get("SLOW_STORAGE_STALLS", "1") != "0",
    )
