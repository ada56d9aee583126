"""The record of Tinker's API: every request and its result on disk, before anybody hears of it.

    log.jsonl               sessions, samplers, checkpoints, one event a line
    requests/<id>.request   a line of JSON about the request, and its body
    requests/<id>.result    a line of JSON about the result, and its body
    weights/<name>.npz      checkpoints, and snapshots of adapters in training

An id is made of the session and the client's own numbers, so a request that is sent again is the
same one. A request without a result has not been carried out, whatever a process that died had
computed: what changes an adapter is in memory alone until the result is on the disk.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_code.host import files


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request on record."""

    id: str
    # The last part of its path, such as "forward_backward".
    kind: str
    # Hash of the key that sent it.
    user: str
    at: float
    body: bytes


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a request."""

    # "" unless it failed: then why.
    error: str
    # A protocol buffer where ``binary``, else JSON.
    body: bytes = b"{}"
    binary: bool = False
    # What replay needs: the rows' places in batches, the digest of the weights.
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class History:
    """The folder. Safe to use from several threads of one process; one process at a time."""

    def __init__(self, folder: Path):
        """Raises OSError, where another process has the folder too."""
        self.folder = folder
        for each in (folder, folder / "requests", folder / "weights"):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock_file = files.lock(folder / "lock")
        self._lock = threading.Lock()
        self._log = folder / "log.jsonl"
        files.make_private(self._log)
        self.events = self._read_log()

    def close(self) -> None:
        """Lets another process, or another history, have the folder."""
        os.close(self._lock_file)

    def note(self, **event: Any) -> dict[str, Any]:
        """Appends an event to the log; it is on the disk when this returns."""
        event = {"at": time.time(), **event}
        with self._lock:
            with open(self._log, "a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
            files.sync(self._log)
            self.events.append(event)
        return event

    def _read_log(self) -> list[dict[str, Any]]:
        found = []
        for line in self._log.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                found.append(json.loads(line))
        # a line that a process did not finish was never acted on
        whole = "".join(json.dumps(event) + "\n" for event in found)
        files.write_atomically(self._log, whole.encode(), private=True)
        return found

    def accept(self, asked: Asked) -> Asked:
        """Puts a request on record; returns the one that has its id, be it from before."""
        path = self._path(asked.id, "request")
        with self._lock:
            if not path.exists():
                head = {"id": asked.id, "kind": asked.kind, "user": asked.user, "at": asked.at}
                files.write_atomically(path, _join(head, asked.body), private=True)
        return self.request(asked.id) or asked

    def request(self, id: str) -> Asked | None:
        """The request of an id; None for none."""
        found = _read(self._path(id, "request"))
        return None if found is None else Asked(**found[0], body=found[1])

    def finish(self, id: str, result: Result) -> None:
        """Puts a result on record, once."""
        head = {"error": result.error, "binary": result.binary, "notes": dict(result.notes)}
        files.write_atomically(self._path(id, "result"), _join(head, result.body), private=True)

    def result(self, id: str) -> Result | None:
        """The result of a request; None while there is none."""
        found = _read(self._path(id, "result"))
        return None if found is None else Result(**found[0], body=found[1])

    def unfinished(self) -> list[Asked]:
        """Requests without a result, the oldest first."""
        found = []
        for path in (self.folder / "requests").glob("*.request"):
            if not path.with_suffix(".result").exists():
                head, body = _read(path) or ({}, b"")
                found.append(Asked(**head, body=body))
        return sorted(found, key=lambda asked: asked.at)

    def finished(self, model_id: str) -> list[tuple[int, Asked, Result]]:
        """(number, request, result) of what was carried out for an adapter, in order."""
        found = []
        for path in (self.folder / "requests").glob(f"{_file(model_id)}.*.result"):
            number = int(path.name.split(".")[-2])
            id = f"{model_id}:{number}"
            asked, result = self.request(id), self.result(id)
            assert asked is not None and result is not None
            found.append((number, asked, result))
        return sorted(found, key=lambda each: each[0])

    def weights(self, name: str) -> Path:
        """The file of weights of a name."""
        return self.folder / "weights" / f"{_file(name)}.npz"

    def _path(self, id: str, kind: str) -> Path:
        return self.folder / "requests" / f"{_file(id)}.{kind}"


def _file(id: str) -> str:
    """The name of a file for an id, which nothing but letters, digits, "-", "_" and ":" makes."""
    name = id.replace(":", ".")
    if not name.replace(".", "").replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise ValueError(f"{id!r} must be letters, digits, '-', '_' and ':'")
    return name


def _join(head: Mapping[str, Any], body: bytes) -> bytes:
    return json.dumps(head).encode() + b"\n" + body


def _read(path: Path) -> tuple[dict[str, Any], bytes] | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    head, _, body = data.partition(b"\n")
    return json.loads(head), body
