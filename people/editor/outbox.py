"""Events on the disk of the editor's machine, until they are acknowledged.

Each process writes a file of its own and holds a lock on it. The lock ends with the process,
however that ends, so a file without one is what a process left that was killed: whoever starts next
sends it. The events keep their keys, so one that had arrived counts once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import threading
import uuid
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from people.feedback.records import Event
from rl_code.host.files import lock
from rl_code.text.lines import split_lines


def outbox_of(url: str, key: str) -> Path:
    """The folder for the events of one person at one server: they are nobody else's."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    name = hashlib.sha256(f"{url} {key}".encode()).hexdigest()[:16]
    return Path(state) / "rl_code" / "outbox" / name


class Outbox:
    """One process's file in a folder, which is made. Used by two threads: one adds, one removes.

    Raises OSError.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        name = uuid.uuid4().hex
        self._path = folder / f"{name}.jsonl"
        # others look for its own name, which it gets once it is locked
        new = folder / f"{name}.new"
        self._file = os.fdopen(lock(new), "r+", encoding="utf-8")
        new.rename(self._path)
        self._writing = threading.Lock()

    def add(self, event: Event) -> None:
        """The event survives this process from here on, though not a loss of power."""
        self._write({"event": dataclasses.asdict(event)})

    def remove(self, keys: Collection[str]) -> None:
        """These are acknowledged, or will never be wanted."""
        self._write({"acknowledged": list(keys)})

    def left(self) -> list[Event]:
        """The events of processes that were killed, which are this one's from now on."""
        found: list[Event] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            if path == self._path:
                continue
            with contextlib.suppress(OSError):  # its process is at work, or another took it first
                with os.fdopen(lock(path), encoding="utf-8", errors="replace") as file:
                    events = list(_waiting(split_lines(file.read())))
                    for event in events:
                        self.add(event)
                    # only now: whoever is killed before leaves them twice, under one key
                    path.unlink()
                found += events
        return found

    def close(self) -> None:
        """Everything is acknowledged, and the file goes. Whoever ends before leaves it."""
        self._path.unlink(missing_ok=True)
        self._file.close()  # and with it the lock

    def _write(self, line: dict) -> None:
        with self._writing:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def _waiting(lines: Iterable[str]) -> Iterator[Event]:
    """The events of a file that were not acknowledged; a line that was cut off is passed over."""
    events: dict[str, Event] = {}
    for line in lines:
        try:
            found = json.loads(line)
            if "event" in found:
                event = Event(**found["event"])
                events[event.key] = event
            for key in found.get("acknowledged", ()):
                events.pop(key, None)
        except (ValueError, TypeError) as error:
            logging.warning("an event was cut off: %s", error)
    yield from events.values()
