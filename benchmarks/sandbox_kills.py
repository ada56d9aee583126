"""Kills of sandboxes at random requests, for measurements of what survives them."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
import weakref
from collections.abc import Callable, Generator
from pathlib import Path

import psutil

from rl_code.environment.sandbox.connection import Connection

# Seconds within which the keeper of a slot has forked its session.
_FORKED_S = 5.0


@dataclasses.dataclass
class Kills:
    """Counts of ``losing``."""

    # Sandboxes that were asked for something.
    opened: int = 0
    killed: int = 0


@contextlib.contextmanager
def losing(
    share: float, requests: int, seed: int | None, told: Callable[[Kills], None] = lambda _: None
) -> Generator[Kills]:
    """While it is open, this share of the sandboxes is killed, each before one of its first
    ``requests`` requests, drawn at random. One that gets fewer requests may outlive them.

    seed: of the choice; None for another one in every process. told: called with the counts when a
    sandbox gets its first request.
    """
    rng = random.Random(seed)
    send = Connection.send
    kills = Kills()
    lock = threading.Lock()
    # Requests until the kill; negative for a sandbox that lives on.
    left: weakref.WeakKeyDictionary[Connection, int] = weakref.WeakKeyDictionary()

    def send_or_lose(connection: Connection, *args, **options):
        with lock:
            if connection not in left:
                kills.opened += 1
                left[connection] = rng.randrange(requests) if rng.random() < share else -1
                told(kills)
            due = left[connection] == 0
            left[connection] -= 1
            kills.killed += due
        if due:
            kill(connection)
        return send(connection, *args, **options)

    Connection.send = send_or_lose
    try:
        yield kills
    finally:
        Connection.send = send


def kill(connection: Connection) -> None:
    """Kills a session and all of its processes, as soon as it has been forked; does nothing where
    it is gone already.
    """
    info = Path(f"/proc/self/fdinfo/{connection.slot.handle}").read_text()
    keeper = next(int(line.split()[1]) for line in info.splitlines() if line.startswith("Pid:"))
    if keeper <= 0:  # it has ended
        return
    deadline = time.monotonic() + _FORKED_S
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(keeper)
        while not (found := parent.children(recursive=True)) and time.monotonic() < deadline:
            time.sleep(0.001)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
