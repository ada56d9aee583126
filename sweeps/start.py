"""Starts of a sweep's runs: as a process of this machine, or in another way of the same kind."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sweeps.runs import SweepRun

# The file in a run's folder with its output.
LOG = "log.txt"
# The file in a run's folder which says that its last try failed, and with which exit code.
FAILED = "sweep_failed.json"


class Started(Protocol):
    """A run that was begun, here or elsewhere."""

    # Seconds that it took, once it has ended.
    seconds: float

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def terminate(self) -> None: ...


# A function of (run, command, whether its output goes to its log.txt).
Begin = Callable[[SweepRun, Sequence[str], bool], Started]


class Process(subprocess.Popen[bytes]):
    """A run as a process of this machine."""

    seconds = 0.0

    def __init__(self, *args: Any, **options: Any):
        self._begin = time.time()
        super().__init__(*args, **options)

    def poll(self) -> int | None:
        """The exit code, None before the end."""
        code = super().poll()
        if code is not None and not self.seconds:
            self.seconds = time.time() - self._begin
        return code


def start(run: SweepRun, command: Sequence[str], to_log: bool) -> Started:
    """Starts a run as a process in a group of its own.

    A Ctrl-C in the terminal goes to the sweep's group only; the sweep passes it on.
    """
    command = prepared(run, command)
    if not to_log:
        return Process(command, process_group=0)
    with open(run.workdir / LOG, "ab") as log:
        return Process(command, process_group=0, stdout=log, stderr=subprocess.STDOUT)


def prepared(run: SweepRun, command: Sequence[str]) -> list[str]:
    """The command of a run, whose folder is there."""
    run.workdir.mkdir(parents=True, exist_ok=True)
    (run.workdir / FAILED).unlink(missing_ok=True)
    print(f"starting {run.workdir.name}", flush=True)
    return [*command, f"--workdir={run.workdir.resolve()}"]
