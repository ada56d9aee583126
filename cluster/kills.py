"""Ends whole programs as a kill does, to show what survives it."""

from __future__ import annotations

import contextlib
import time

import psutil


def kill_all(pid: int) -> None:
    """Ends a process and all below it by SIGKILL; returns when none of them runs any more."""
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        doomed = [first, *first.children(recursive=True)]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        while any(runs(process) for process in doomed):
            time.sleep(0.01)


def runs(process: psutil.Process) -> bool:
    """True if a process is there and has not ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
