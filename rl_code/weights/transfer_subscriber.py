"""The actor's side of weights from device to device; ``transfer_files`` says how it works."""

from __future__ import annotations

import collections
import itertools
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from absl import logging
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from models.transformer import Transformer
from rl_code.weights.layout import Box, assemble, join, overlap, wanted_parts
from rl_code.weights.stored_subscriber import StoredSubscriber
from rl_code.weights.transfer_files import (
    LIVE,
    answer_path,
    box_of,
    identity,
    offer_path,
    start_server,
)
from rl_code.weights.version_records import read_json, write_json
from rl_code.weights.versions import (
    TransferStats,
    Version,
    Wanted,
    WeightError,
    WeightTimeout,
    check,
)
from rl_code.weights.waiting import GRACE_S, Deadline, agree

_MOST_FAILURES = 3  # in a row, before a learner is not asked any more
# What transfers, files and malformed files raise; WeightError and JaxRuntimeError are
# RuntimeErrors.
_TRANSFER_ERRORS = (OSError, ValueError, KeyError, RuntimeError)


class TransferSubscriber:
    """Pulls versions from the learner's devices, and reads from storage those that it cannot pull.

    Args:
      stored: reads from the learner's storage, in the layout that the actor wants.
      host: address of this machine, in numbers.
      pull_s: how long a version may take to be pulled before storage is tried.
    """

    def __init__(self, stored: StoredSubscriber, *, host: str, pull_s: float):
        if not pull_s > 0:
            raise ValueError(f"{pull_s=} must be positive")
        self._stored = stored
        self._folder = stored.folder / LIVE
        self._pull_s = pull_s
        self._server = start_server(host)
        self._connections: dict[str, transfer.TransferConnection] = {}
        # session and version of an offer that did not hold
        self._failed: tuple[int, int] | None = None
        self._failures: collections.Counter[int] = collections.Counter()  # in a row, by session
        self.fetched: TransferStats | None = None

    def newest(self) -> int | None:
        """As ``Subscriber.newest``."""
        return max(self._announced(), default=None)

    def wait(
        self, *, at_least: int | None = None, exactly: int | None = None, deadline_s: float
    ) -> tuple[int, Transformer]:
        """As ``Subscriber.wait``. Pulling may take another ``pull_s`` seconds, and reading from
        storage another ``deadline_s``.
        """
        wanted = Wanted(at_least, exactly)
        deadline = Deadline(deadline_s)
        while True:
            number = self._stored.choose(wanted, deadline, self._announced)
            model = self._pull(number)
            if model is None:
                model = self._stored.read_or_ask(number, deadline_s)
                self.fetched = self._stored.fetched
            if model is not None:
                return number, model

    def _announced(self) -> dict[int, Path]:
        """The versions that are served or stored, and which file says so."""
        offers = self._offers()
        live = {offers[0]["version"]["number"]: offer_path(self._folder, 0)} if offers else {}
        return live | self._stored.announced()

    def _offers(self) -> list[dict[str, Any]]:
        """Statements of each process of the learner about its offer. [] unless all serve the same
        version, and neither that version failed here before nor too many from this learner.
        """
        try:
            first = read_json(offer_path(self._folder, 0))
            offers = [
                read_json(offer_path(self._folder, process))
                for process in range(first["processes"])
            ]
        except WeightError:
            return []
        same = all(identity(offer) == identity(first) for offer in offers)
        given_up = (
            identity(first) == self._failed or self._failures[first["session"]] == _MOST_FAILURES
        )
        return offers if same and not given_up else []

    def _pull(self, number: int) -> Transformer | None:
        """Pulls a version from the learner's devices, and checks it. None if it is not served, or
        if pulling failed in any process of this actor.
        """
        begin = time.perf_counter()
        deadline = Deadline(self._pull_s)
        doing = f"{self._stored.name} pulling version {number}"
        offers = self._offers()
        session = offers[0]["session"] if offers and identity(offers[0])[1] == number else 0
        session = agree(GRACE_S, doing, session)[0][0]
        if not session:
            return None
        pulled, failure = None, "another process could not pull it"
        try:
            pulled = self._fetch(self._await_offers((session, number), deadline), deadline)
        except _TRANSFER_ERRORS as error:
            self._connections.clear()
            failure = str(error) or type(error).__name__
        if all(fine for (fine,) in agree(deadline.left() + GRACE_S, doing, pulled is not None)):
            version, parts, held = pulled
            named = {
                name: assemble(target, parts[name]) if name in parts else held[name]
                for name, target in self._stored.targets.items()
            }
            try:
                check(version, named, "the learner's devices")
                length = sum(part.nbytes for boxes in parts.values() for part in boxes.values())
                seconds = time.perf_counter() - begin
                self.fetched = TransferStats(
                    "fetch", number, seconds, live_bytes=length, live_s=seconds
                )
                self._failures.clear()
                return self._stored.hold(version, named)
            except WeightError as error:
                failure = str(error)
        self._failed = session, number
        self._failures[session] += 1
        logging.warning("%s failed: %s; trying storage", doing, failure)
        if self._failures[session] == _MOST_FAILURES:
            logging.warning(
                "pulling failed %d times in a row: %s reads from storage from now on; can this "
                "machine reach %s, and "
                "the learner the --host that this actor was given?",
                _MOST_FAILURES,
                self._stored.name,
                offers[0]["address"] if offers else "the learner",
            )
        return None

    def _await_offers(self, wanted: tuple[int, int], deadline: Deadline) -> list[dict[str, Any]]:
        """Waits for the offers that the first process has seen: shared storage may show them to
        this process later.
        """
        offers: list[dict[str, Any]] = []

        def there() -> bool:
            offers[:] = self._offers()
            return bool(offers) and identity(offers[0]) == wanted

        if not deadline.wait(there):
            raise WeightTimeout(
                f"its offer did not appear in {self._folder} within {self._pull_s:g} s"
            )
        return offers

    def _fetch(
        self, offers: list[dict[str, Any]], deadline: Deadline
    ) -> tuple[Version, dict[str, dict[Box, jax.Array]], dict[str, jax.Array]]:
        """The version and, by name, the parts that this process's devices want, each on one of its
        devices. Arrays that are the same in the version that is held are not pulled: they are the
        last result, by name.
        """
        version = Version.from_json(offers[0]["version"])
        version.check_kinds(self._stored.targets)
        targets, same = self._stored.targets, {}
        if (held := self._stored.held) is not None:
            new = version.differing(held[0])
            same = {name: x for name, x in held[1].items() if name not in new}
            targets = {name: targets[name] for name in new}
        # By process of the learner: (name, the part that is wanted here, the piece of it which that
        # process has, the device to which the piece goes).
        wants: dict[int, list[tuple[str, Box, Box, jax.Device]]] = {}
        for name, target in targets.items():
            for box, devices in wanted_parts(target).items():
                for process, offer in enumerate(offers):
                    pieces = (overlap(box, box_of(own)) for own in offer["boxes"][name])
                    found = [
                        (name, box, piece, devices[0]) for piece in pieces if piece is not None
                    ]
                    if found:
                        wants.setdefault(process, []).extend(found)
        arrived = self._pull_pieces(offers, wants, deadline)
        grouped: dict[tuple[str, Box], dict[Box, jax.Array]] = {}
        for (name, box, piece, _), array in zip(
            itertools.chain(*wants.values()), arrived, strict=True
        ):
            grouped.setdefault((name, box), {})[piece] = array
        parts = {
            name: {box: join(box, grouped[name, box]) for box in wanted_parts(target)}
            for name, target in targets.items()
        }
        return version, parts, same

    def _pull_pieces(
        self,
        offers: list[dict[str, Any]],
        wants: Mapping[int, list[tuple[str, Box, Box, jax.Device]]],
        deadline: Deadline,
    ) -> list[jax.Array]:
        """Parts wanted of each process, in the order of the wants."""
        session, number = identity(offers[0])
        requests = {
            process: self._folder / f"request_{process}_{secrets.token_hex(8)}" for process in wants
        }
        # All requests are written before the first answer is awaited, so that the processes of the
        # learner work at the same time.
        for process, path in requests.items():
            asked = [(name, piece) for name, _, piece, _ in wants[process]]
            request = {
                "session": session,
                "version": number,
                "wants": asked,
                "within_s": deadline.left(),
            }
            write_json(path, request)
        arrived: list[jax.Array] = []
        for process, path in requests.items():
            address = offers[process]["address"]
            uuid = self._await_answer(
                path, f"process {process} of {offers[0]['publisher']} at {address}", deadline
            )
            shapes = [
                jax.ShapeDtypeStruct(
                    tuple(stop - start for start, stop in piece),
                    self._stored.targets[name].dtype,
                    sharding=SingleDeviceSharding(device),
                )
                for name, _, piece, device in wants[process]
            ]
            if address not in self._connections:
                self._connections[address] = self._server.connect(address)
            arrived += self._connections[address].pull(uuid, shapes)
        # The timeout of ``pull`` itself has no effect with jax 0.11. Without this wait, an actor
        # would wait for a dead learner for ever.
        if not deadline.wait(lambda: all(x.is_ready() for x in arrived), poll_s=0.005):
            raise WeightTimeout(f"the arrays did not arrive within {self._pull_s:g} s")
        return jax.block_until_ready(arrived)

    def _await_answer(self, path: Path, server: str, deadline: Deadline) -> int:
        """The number under which a request's arrays can be pulled."""
        answer = answer_path(path)
        # by listing: a client of NFS may remember for long that a file was not there
        if not deadline.wait(lambda: answer.name in os.listdir(self._folder)):
            path.unlink(missing_ok=True)
            raise WeightTimeout(f"{server} did not answer within {self._pull_s:g} s")
        content = read_json(answer)
        answer.unlink()
        if "refused" in content:
            raise WeightError(f"{server} refused: {content['refused']}")
        return content["uuid"]
