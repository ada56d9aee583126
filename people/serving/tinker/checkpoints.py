"""Checkpoints of adapters by their ``tinker://`` paths, and who may read them."""

from __future__ import annotations

import dataclasses
import datetime
import re
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal

from people.serving.tinker.adapters import AdapterSettings, State, dump
from people.serving.tinker.history import History
from rl_code.host import files

Kind = Literal["training", "sampler"]
# The second part of a path, by what it holds.
_SEGMENTS: dict[Kind, str] = {"training": "weights", "sampler": "sampler_weights"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A file of an adapter; "training" has the moments of AdamW too."""

    path: str
    kind: Kind
    model_id: str
    user: str
    # The request that wrote it.
    request: str
    settings: AdapterSettings
    steps: int
    at: float
    size: int
    expires_at: float | None = None
    metadata: Mapping[str, str] | None = None

    @property
    def file(self) -> str:
        """Name of its file (``History.weights``)."""
        return self.path.removeprefix("tinker://").replace("/", ":")

    def shown(self) -> dict[str, Any]:
        """As the client's ``Checkpoint``."""
        return {
            "checkpoint_id": "/".join(self.path.split("/")[-2:]),
            "checkpoint_type": self.kind,
            "time": iso(self.at),
            "tinker_path": self.path,
            "size_bytes": self.size,
            "public": False,
            "user_metadata": self.metadata,
            "expires_at": None if self.expires_at is None else iso(self.expires_at),
        }


class Checkpoints:
    """All checkpoints of a history. Safe to use from several threads."""

    def __init__(self, history: History):
        self._history = history
        self._lock = threading.Lock()
        self._found: dict[str, Checkpoint] = {}
        for event in history.events:
            if event["event"] == "checkpoint":
                fields = {k: v for k, v in event.items() if k != "event"}
                fields["settings"] = AdapterSettings(**fields["settings"])
                self._found[event["path"]] = Checkpoint(**fields)
            elif event["event"] == "deleted":
                self._found.pop(event["path"], None)

    def save(
        self,
        state: State,
        kind: Kind,
        model_id: str,
        user: str,
        request: str,
        name: str,
        *,
        ttl_s: float | None = None,
        overwrite: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> Checkpoint:
        """Writes a checkpoint; one that the same request has written is there already. Raises
        ValueError for a name that cannot be one, or is taken.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"name {name!r} must be up to 100 letters, digits, '.', '_' and '-', the first one "
                "a letter or a digit"
            )
        if ttl_s is not None and not ttl_s > 0:
            raise ValueError(f"ttl_seconds={ttl_s} must be positive, or None")
        path = f"tinker://{model_id}/{_SEGMENTS[kind]}/{name}"
        there = self.all().get(path)
        if there is not None:
            if there.request == request:
                return there
            if not overwrite:
                raise ValueError(f"{path} is there already; give another name, or overwrite=True")
        data = dump(state, moments=kind == "training")
        now = time.time()
        saved = Checkpoint(
            path,
            kind,
            model_id,
            user,
            request,
            state.settings,
            state.steps,
            now,
            len(data),
            None if ttl_s is None else now + ttl_s,
            metadata,
        )
        files.write_atomically(self._history.weights(saved.file), data, private=True)
        self._history.note(event="checkpoint", **dataclasses.asdict(saved))
        with self._lock:
            self._found[path] = saved
        return saved

    def find(self, path: str, user: str) -> Checkpoint:
        """The checkpoint of a path. Raises ValueError for one that this user does not have."""
        found = self.all().get(path)
        if found is None or found.user != user:
            raise ValueError(f"{path!r} is no checkpoint of this API key")
        return found

    def read(self, checkpoint: Checkpoint) -> bytes:
        """The content of its file."""
        return self._history.weights(checkpoint.file).read_bytes()

    def delete(self, checkpoint: Checkpoint) -> None:
        """Deletes a checkpoint."""
        with self._lock:
            if self._found.pop(checkpoint.path, None) is None:
                return
        self._history.note(event="deleted", path=checkpoint.path)
        self._history.weights(checkpoint.file).unlink(missing_ok=True)

    def all(self) -> dict[str, Checkpoint]:
        """The checkpoints by path; those whose time is over are deleted first."""
        with self._lock:
            found = dict(self._found)
        now = time.time()
        for path, each in list(found.items()):
            if each.expires_at is not None and each.expires_at <= now:
                self.delete(found.pop(path))
        return found


def iso(seconds: float) -> str:
    """Unix seconds as a date of RFC 3339."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
