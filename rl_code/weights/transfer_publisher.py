"""The learner's side of weights from device to device; ``transfer_files`` says how it works."""

from __future__ import annotations

import datetime
import os
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from absl import logging

from models.transformer import Transformer
from rl_code.weights.layout import Box, detached, overlap, own_parts, to_slices
from rl_code.weights.stored_publisher import StoredPublisher
from rl_code.weights.transfer_files import (
    LIVE,
    answer_path,
    box_of,
    new_ticket,
    offer_path,
    start_server,
)
from rl_code.weights.version_records import read_json, write_json
from rl_code.weights.versions import TransferStats, Version
from rl_code.weights.waiting import GRACE_S, POLL_S, agree


class TransferPublisher:
    """Serves the newest version from the learner's devices and has every version stored.

    Args:
      stored: where versions are stored; closed with this one.
      host: address of this machine, in numbers, by which the actors reach it.
    """

    def __init__(self, stored: StoredPublisher, *, host: str):
        self._stored = stored
        self._folder = stored.folder / LIVE
        self._process = jax.process_index()
        self._lock = threading.Lock()
        self._live: tuple[Version, dict[str, dict[Box, jax.Array]]] | None = None
        if self._process == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True, exist_ok=True)  # an actor may be asking
        deadline_s = stored.config.deadline_s
        # All processes take the number that the first one drew. This is a barrier too: no process
        # writes into the folder before the first one has emptied it.
        drawn = agree(deadline_s, "starting to serve weights", secrets.randbits(30) + 1)
        self._session = drawn[0][0]
        self._server = start_server(host)
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._answer_requests, name="weights-server", daemon=True
        )
        self._thread.start()

    @property
    def published(self) -> TransferStats | None:
        """As ``Publisher.published``: of the newest version that is stored."""
        return self._stored.published

    def publish(self, version: int, model: Transformer) -> Version:
        """As ``Publisher.publish``."""
        begin = time.perf_counter()
        named = detached(model, self._stored.dtype, self._stored.quantised)
        made = Version.of(version, named)
        self._stored.write(made, named, begin)
        parts = {name: dict(own_parts(x)) for name, x in named.items()}
        # First the thread is given the new version, then the file tells actors of it. In the other
        # order, a quick request for the new version would be refused.
        with self._lock:
            self._live = made, parts
        offer = {
            "publisher": self._stored.name,
            "session": self._session,
            "processes": jax.process_count(),
            "address": self._server.address(),
            "version": made.to_json(),
            "boxes": {name: list(boxes) for name, boxes in parts.items()},
        }
        write_json(offer_path(self._folder, self._process), offer)
        return made

    def close(self) -> None:
        """As ``Publisher.close``; nothing is served any more."""
        self._closing.set()
        self._thread.join(self._stored.config.deadline_s)
        offer_path(self._folder, self._process).unlink(missing_ok=True)
        self._stored.close()

    def _answer_requests(self) -> None:
        """Runs in a thread until closed: answers the requests that appear in the folder."""
        prefix = f"request_{self._process}_"
        while not self._closing.wait(POLL_S):
            try:
                names = os.listdir(self._folder)
                for path in (self._folder / name for name in names if name.startswith(prefix)):
                    self._answer(path)
            except OSError as error:
                logging.log_every_n_seconds(
                    logging.WARNING, "%s cannot serve weights: %s", 60, self._stored.name, error
                )

    def _answer(self, path: Path) -> None:
        try:
            answer = self._arm(read_json(path))
        except Exception as error:  # whatever one request holds, others are to be served
            answer = {"refused": f"{type(error).__name__}: {error}"}
        path.unlink(missing_ok=True)
        write_json(answer_path(path), answer)

    def _arm(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Makes the wanted parts ready to be pulled."""
        with self._lock:
            version, parts = self._live or (None, {})
        if version is None or (request["session"], request["version"]) != (
            self._session,
            version.number,
        ):
            return {"refused": f"serves version {version and version.number} now"}
        pieces = []
        for name, wanted in request["wants"]:
            piece = box_of(wanted)
            box = next(box for box in parts[name] if overlap(box, piece) == piece)
            pieces.append(
                parts[name][box] if box == piece else parts[name][box][to_slices(piece, box)]
            )
        uuid = new_ticket()
        # Not for longer than the actor waits: arrays that are ready to be pulled stay in the memory
        # of the devices, also when a newer version has replaced them.
        ready_s = min(self._stored.config.deadline_s, request["within_s"] + GRACE_S)
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ready_s)
        self._server.await_pull(uuid, pieces, timeout=until)
        return {"uuid": uuid}
