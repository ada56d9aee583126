"""Tells whether other processes are alive, without synchronised clocks.

A living process keeps changing its heartbeat file. An observer remembers the content that it saw,
and measures on its own monotonic clock for how long it has not changed.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from absl import logging

from rl_code.store.errors import StoreError, explain
from rl_code.store.processes import ProcessId, StoreProcess, incarnations
from rl_code.store.sealed import unseal


class Replaced(StoreError):
    """Another process has been started under the name of this one."""


class Heartbeat:
    """A thread that changes this process's heartbeat file every ``heartbeat_s`` while its main loop
    makes progress.

    When ``progress`` has not been called for ``stall_s`` the file stays as it is, so a main loop
    that hangs looks dead to others. A file that cannot be written is logged and tried again.
    """

    def __init__(self, process: StoreProcess, *, heartbeat_s: float, stall_s: float):
        self._process = process
        self._heartbeat_s, self._stall_s = heartbeat_s, stall_s
        self._count = 0
        self._progress_at = time.monotonic()
        self._replaced: StoreError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def progress(self) -> None:
        """Called by the main loop. Raises StoreError when another process has taken this one's
        place.
        """
        if self._replaced is not None:
            raise self._replaced
        self._progress_at = time.monotonic()

    def close(self) -> None:
        """Ends the thread and tells the others that this process has left. Raises StoreError."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        if self._replaced is None:
            self._process.beat(self._count + 1, left=True)

    def _run(self) -> None:
        trouble = ""
        while not self._closing.wait(self._heartbeat_s):
            before = trouble
            trouble = self._beat()
            if trouble and not before:
                logging.warning("%s has stopped its heartbeat: %s", self._process.identity, trouble)
            elif before and not trouble:
                logging.warning("%s has a heartbeat again", self._process.identity)

    def _beat(self) -> str:
        """Changes the file if this process may; returns what is in the way, "" for nothing."""
        idle_s = time.monotonic() - self._progress_at
        if idle_s > self._stall_s:
            return f"its main loop has made no progress for {idle_s:.1f} s"
        try:
            newest = self._process.newest()
            if newest != self._process.identity:
                self._replaced = Replaced(
                    f"{self._process.identity} has been replaced by {newest}: another process was "
                    "started as "
                    f"{newest.name!r}; each needs a --name of its own"
                )
                return str(self._replaced)
            self._count += 1
            self._process.beat(self._count)
        except StoreError as error:
            return str(error)
        return ""


class Sighting(NamedTuple):
    """Knowledge of an observer about a process."""

    # for how many seconds the heartbeat has been seen not to change
    silent_s: float
    # why the process cannot be alive, or ""
    gone: str


@dataclasses.dataclass
class _Seen:
    content: bytes
    looked: float
    silent_s: float = 0.0


class Observer:
    """Watches heartbeats.

    Between two looks, at most ``longest_gap_s`` seconds count as silence. The observer itself may
    be stopped for a while, for instance by a debugger. If ``longest_gap_s`` is below the caller's
    timeout, the first look afterwards does not take all other processes for dead.
    """

    def __init__(
        self,
        store: Path,
        *,
        longest_gap_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._processes = store / "processes"
        self._longest_gap_s, self._clock = longest_gap_s, clock
        self._seen: dict[ProcessId, _Seen] = {}

    def look(self, who: ProcessId) -> Sighting:
        """Present knowledge about a process. Raises StoreError when the store cannot be read."""
        folder = self._processes / who.name
        path = folder / f"{who.incarnation}.json"
        with explain("read the heartbeat", path):
            try:
                # The names first: if a newer start deletes the file between the two calls, reading
                # it fails, which is handled below.
                newest = max(incarnations(folder), default=-1)
                content = path.read_bytes() if newest <= who.incarnation else b""
            except FileNotFoundError:  # a newer incarnation deletes it
                return Sighting(math.inf, "has no heartbeat any more")
        if newest > who.incarnation:
            return Sighting(math.inf, f"was restarted as {who._replace(incarnation=newest)}")
        if _left(content, path):
            return Sighting(math.inf, "has left")
        now = self._clock()
        seen = self._seen.get(who)
        if seen is None or seen.content != content:
            self._seen[who] = _Seen(content, now)
            return Sighting(0.0, "")
        seen.silent_s += min(now - seen.looked, self._longest_gap_s)
        seen.looked = now
        return Sighting(seen.silent_s, "")


def _left(content: bytes, path: Path) -> bool:
    try:
        return unseal(content, path)["left"]
    except StoreError:
        # the empty file of a process that is just starting, or one that a crash of its host cut
        # short
        return False
