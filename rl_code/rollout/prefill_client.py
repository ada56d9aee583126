"""The side of an actor whose prompts another process prefills; ``prefill_wire`` says how it works.

Whatever goes wrong on the way (nobody answers, the answer comes late, the weights are others), the
caller is told to prefill the prompt by itself. So nothing is lost, and no sample depends on it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import multiprocessing.connection
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from rl_code.rollout import prefill_wire
from rl_code.rollout.engine import Engine
from rl_code.rollout.prefill_wire import PrefillConfig
from rl_code.weights.transfer_files import start_server
from rl_code.weights.version_records import read_json
from rl_code.weights.waiting import Deadline

# The content of a prompt's pages: blocks of pages, each with one array for each array of the cache.
Blocks = list[list[jax.Array]]


@dataclasses.dataclass(eq=False)
class _Asked:
    """A request that was not answered yet."""

    message: dict[str, Any]
    pages: int
    deadline: Deadline


class PrefillClient:
    """Asks the prefill process of a run for the pages of prompts. Its methods never wait for it.

    Args:
      name: of this actor, for messages.
      host: address of this machine, in numbers.
      engine: the one that decodes. Pages arrive on its first device.
    """

    def __init__(self, workdir: Path, name: str, host: str, config: PrefillConfig, engine: Engine):
        self._offer, self._name, self._config = prefill_wire.offer_path(workdir), name, config
        self._engine = engine
        self._server = start_server(host)
        self._numbers = itertools.count()
        self._asked: dict[int, _Asked] = {}
        self._link: _Link | None = None
        self._not_before = 0.0  # until then nobody is asked
        # What was said since pages last came: each trouble is told once.
        self._told: set[str] = set()

    def ask(self, tokens: Sequence[int], kinds: Sequence[int] | None, version: int) -> int | None:
        """Asks for the pages of a prompt; returns the number of the request, or None if the caller
        has to prefill by itself.

        kinds: as ``Span.add`` takes them. version: of the weights.
        """
        if time.monotonic() < self._not_before or not tokens:
            return None
        if self._link is not None and self._link.failed and not self._asked:
            self.close()  # it ended while nothing was asked; another process may be there now
        if self._link is None:
            self._link = _Link(self._offer, self._server, self._engine)
        number = next(self._numbers)
        message = {
            "id": number,
            "version": version,
            "tokens": [int(token) for token in tokens],
            "kinds": None if kinds is None else [int(kind) for kind in kinds],
            "within_s": self._config.deadline_s,
        }
        pages = -(-len(tokens) // self._engine.config.page)
        asked = _Asked(message, pages, Deadline(self._config.deadline_s))
        self._asked[number] = asked
        self._link.ask(asked)
        return number

    def collect(self) -> list[tuple[int, Blocks | None]]:
        """The requests that are over: (number, what the pages hold). None for one whose prompt the
        caller has to prefill by itself.
        """
        found: list[tuple[int, Blocks | None]] = []
        while self._link is not None and self._link.answers:
            number, blocks, refused = self._link.answers.popleft()
            if self._asked.pop(number, None) is None:
                continue  # given up meanwhile
            if blocks is None:
                self._tell("refused", f"the prefill process {refused}")
            else:
                self._told.clear()
            found.append((number, blocks))
        if self._link is not None and self._link.failed:
            found += self._give_up("failed", self._link.failed)
        if any(not asked.deadline.left() for asked in self._asked.values()):
            late = f"the prefill process did not answer within {self._config.deadline_s:g} s"
            found += self._give_up("late", late)
        return found

    def wait(self, seconds: float) -> None:
        """Waits until a request is over, at most so long."""
        if self._link is not None:
            self._link.changed.wait(seconds)
            self._link.changed.clear()

    def drop(self, number: int) -> None:
        """Forgets a request."""
        self._asked.pop(number, None)

    def close(self) -> None:
        """Forgets all requests and ends the stream."""
        self._asked.clear()
        if self._link is not None:
            self._link.close()
            self._link = None

    def _give_up(self, what: str, why: str) -> list[tuple[int, None]]:
        """Ends the stream and every request; returns these."""
        self._tell(what, why)
        lost = [(number, None) for number in self._asked]
        self.close()
        self._not_before = time.monotonic() + self._config.pause_s
        return lost

    def _tell(self, what: str, why: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logging.warning(
                "%s prefills by itself: %s. Samples are the same; this is said once until pages "
                "come again",
                self._name,
                why,
            )


class _Link:
    """A stream to the prefill process, and the thread that uses it.

    The thread alone may wait: for a process that was stopped, or for arrays of one that has died.
    """

    def __init__(self, offer: Path, server: transfer.TransferServer, engine: Engine):
        self._path, self._server, self._engine = offer, server, engine
        self._device = engine.mesh.devices.flat[0]
        self._shapes = jax.tree.leaves(engine.cache_shape().layers)
        # (number, what the pages hold, why there are none)
        self.answers: collections.deque[tuple[int, Blocks | None, str]] = collections.deque()
        self.failed = ""  # why the stream has ended
        self.changed = threading.Event()
        self._outbox: collections.deque[_Asked] = collections.deque()
        self._open: dict[int, _Asked] = {}
        # A byte here tells the thread of a new request, or of the end.
        self._wake, self._woken = multiprocessing.connection.Pipe()
        self._closed = False
        threading.Thread(target=self._run, name="prefill-client", daemon=True).start()

    def ask(self, asked: _Asked) -> None:
        """Hands a request to the thread."""
        self._outbox.append(asked)
        self._wake.send_bytes(b"a")

    def close(self) -> None:
        """The thread ends as soon as it can."""
        self._closed = True
        self._wake.send_bytes(b"c")

    def _run(self) -> None:
        end: Connection | None = None
        try:
            offer = self._read_offer()
            end = Client(tuple(offer["address"]), authkey=bytes.fromhex(offer["key"]))
            arrays = self._server.connect(offer["transfer"])
            while not self._closed:
                for ready in multiprocessing.connection.wait([end, self._woken]):
                    if ready is end:
                        self._take(prefill_wire.receive(end), arrays)
                    else:
                        self._woken.recv_bytes()
                        self._send(end)
        except Exception as error:  # whatever it is, the actor goes on without
            why = str(error) or type(error).__name__
            self.failed = f"the prefill process cannot be reached ({why})"
        finally:
            if end is not None:
                end.close()
            self.changed.set()

    def _read_offer(self) -> dict[str, Any]:
        offer = read_json(self._path)
        here = prefill_wire.kind_of(self._engine)
        if other := prefill_wire.difference(here, offer["kind"]):
            raise ValueError(f"its pages are of another kind: {other}")
        return offer

    def _send(self, end: Connection) -> None:
        while self._outbox:
            asked = self._outbox.popleft()
            self._open[asked.message["id"]] = asked
            prefill_wire.send(end, asked.message)

    def _take(self, answer: dict[str, Any], arrays: transfer.TransferConnection) -> None:
        asked = self._open.pop(answer["id"])
        blocks = None
        if "refused" not in answer:
            blocks = self._pull(answer, asked, arrays)
        self.answers.append((answer["id"], blocks, answer.get("refused", "")))
        self.changed.set()

    def _pull(
        self, answer: dict[str, Any], asked: _Asked, arrays: transfer.TransferConnection
    ) -> Blocks:
        """The arrays of an answer, on one device. Raises TimeoutError."""
        sharding = SingleDeviceSharding(self._device)
        sizes = prefill_wire.block_sizes(asked.pages)
        wanted = [
            jax.ShapeDtypeStruct((size, stop - start, *x.shape[2:]), x.dtype, sharding=sharding)
            for size in sizes
            for x, cuts in zip(self._shapes, answer["cuts"], strict=True)
            for start, stop in cuts
        ]
        pulled = arrays.pull(answer["uuid"], wanted)
        # ``pull`` would wait for a dead process for ever (``weights.transfer_subscriber``).
        if not asked.deadline.wait(lambda: all(x.is_ready() for x in pulled), poll_s=0.002):
            raise TimeoutError("pages did not arrive in time")
        return blocks_of(jax.block_until_ready(pulled), answer["cuts"], len(sizes))


def blocks_of(
    pieces: Sequence[jax.Array], cuts: Sequence[Sequence[Sequence[int]]], count: int
) -> Blocks:
    """``count`` blocks from pieces on one device, as ``prefill_server.pieces_of`` cuts them."""
    left = iter(pieces)
    blocks = []
    for _ in range(count):
        parts = [[next(left) for _ in own] for own in cuts]
        blocks.append([x[0] if len(x) == 1 else jnp.concatenate(x, axis=1) for x in parts])
    return blocks
