"""The side that prefills prompts for actors in other processes; ``prefill_wire`` says how it works.

It has an engine as the actors have, and a page pool: prompts with a common beginning share pages
here, whoever asked for them. A prompt that is prefilled is copied out of its pages and waits on the
devices until its actor pulls it, or until that actor has stopped waiting.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import jax
from absl import logging

from attention.cache.pages import OutOfPages
from models.unstacked import Unstacked
from rl_code.rollout import prefill_wire
from rl_code.rollout.engine import Engine
from rl_code.rollout.page_pool import PagePool
from rl_code.rollout.spans import Span
from rl_code.weights.layout import own_parts
from rl_code.weights.transfer_files import new_ticket, start_server
from rl_code.weights.version_records import write_json
from rl_code.weights.versions import Subscriber, WeightError
from rl_code.weights.waiting import GRACE_S

_WAITING = 256  # connections that may wait to be accepted


@dataclasses.dataclass(eq=False)
class _Request:
    """A prompt that an actor has asked for."""

    number: int
    version: int
    span: Span
    # The actor's stream.
    end: Connection
    # On the clock of this machine: when the actor stops waiting.
    until: float


@dataclasses.dataclass
class PrefillStats:
    """Counts since they were last taken."""

    # Prompts whose pages were handed over, their tokens, and those of them that were prefilled: the
    # others were in the cache already.
    prompts: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    # Bytes of the pages.
    bytes: int = 0
    # Requests that were refused, and those whose actor had stopped waiting.
    refused: int = 0
    late: int = 0

    def metrics(self) -> dict[str, float]:
        """``prefill/prompts`` and so on."""
        return {f"prefill/{name}": float(value) for name, value in vars(self).items()}


class PrefillServer:
    """Prefills what actors ask for, with the weights that they name.

    Args:
      weights: where versions come from.
      workdir: of the run; ``prefill_wire.offer_path`` is written there.
      host: address of this machine, in numbers, by which actors reach it.
      deadline_s: seconds that a version may take to come.
      on_loaded: called with a version that was just loaded, before anything is done with it.
    """

    def __init__(
        self,
        engine: Engine,
        weights: Subscriber,
        workdir: Path,
        *,
        host: str,
        deadline_s: float,
        on_loaded: Callable[[int], None] = lambda version: None,
    ):
        self._on_loaded = on_loaded
        self._pool = PagePool(engine)
        self._weights, self._deadline_s = weights, deadline_s
        self._model: Unstacked | None = None
        self.version: int | None = None
        self._arrived: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        # Requests that hold no pages yet, and those that are being prefilled, oldest first.
        self._waiting: list[_Request] = []
        self._open: list[_Request] = []
        self._stats = PrefillStats()
        self._server = start_server(host)
        key = secrets.token_bytes(16)
        self._listener = Listener((host, 0), backlog=_WAITING, authkey=key)
        self._closed = False
        threading.Thread(target=self._accept, name="prefill-accept", daemon=True).start()
        self._offer = prefill_wire.offer_path(workdir)
        self._offer.parent.mkdir(parents=True, exist_ok=True)
        self._content = {
            "pid": os.getpid(),
            "address": list(self._listener.address),
            "key": key.hex(),
            "transfer": self._server.address(),
            "kind": prefill_wire.kind_of(engine),
        }
        write_json(self._offer, self._content)

    def turn(self, wait_s: float) -> None:
        """Prefills a chunk of what was asked for and hands over what is whole; waits for a request,
        at most ``wait_s`` seconds, where there is none.
        """
        self._take(wait_s)
        self._drop_late()
        if not self._open and self._waiting:
            self._choose_version()
        self._open_spans()
        if self._open:
            spans = [request.span for request in self._open]
            self._stats.prefilled_tokens += self._pool.prefill(self._model, spans)
        for request in [request for request in self._open if not request.span.missing]:
            self._open.remove(request)
            self._hand_over(request)

    def take_stats(self) -> PrefillStats:
        """The counts since the last call."""
        stats, self._stats = self._stats, PrefillStats()
        return stats

    def close(self) -> None:
        """Says that this process prefills no more."""
        self._closed = True
        self._offer.unlink(missing_ok=True)
        self._listener.close()

    # --- Requests ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Runs in a thread: a reader for every actor that comes."""
        while not self._closed:
            try:
                end = self._listener.accept()
            except Exception as error:  # one that failed to say who it is must not keep others out
                if not self._closed:
                    logging.warning("the prefill process could not accept an actor: %r", error)
                    time.sleep(0.1)
                continue
            threading.Thread(target=self._read, args=(end,), daemon=True).start()

    def _read(self, end: Connection) -> None:
        """Runs in a thread: takes an actor's requests until it has gone."""
        while True:
            try:
                content = prefill_wire.receive(end)
                span = self._span(content["tokens"], content["kinds"])
                until = time.monotonic() + content["within_s"]
                request = _Request(content["id"], content["version"], span, end, until)
            except Exception:  # gone, or nothing that this version understands
                end.close()
                return
            self._arrived.put(request)

    def _span(self, tokens: list[int], kinds: list[int] | None) -> Span:
        # All tokens are prefilled, so the span's prompt has one more.
        span = Span(prompt=len(tokens) + 1)
        span.runs = self._pool.runs()
        span.add(tokens, kinds)
        return span

    def _take(self, wait_s: float) -> None:
        idle = not self._open and not self._waiting
        try:
            self._waiting.append(self._arrived.get(timeout=wait_s if idle else 0.0))
            while True:
                self._waiting.append(self._arrived.get_nowait())
        except queue.Empty:
            pass

    def _drop_late(self) -> None:
        """Forgets requests whose actors have gone or stopped waiting."""
        now = time.monotonic()
        for requests in (self._waiting, self._open):
            for request in list(requests):
                if request.end.closed or now > request.until:
                    requests.remove(request)
                    self._pool.release(request.span)
                    self._stats.late += 1

    def _choose_version(self) -> None:
        """Loads the oldest version that is asked for, if it is not older than the one that is
        loaded; requests of older ones are refused.
        """
        loaded = -1 if self.version is None else self.version
        for request in [request for request in self._waiting if request.version < loaded]:
            self._waiting.remove(request)
            self._answer(request, {"refused": f"has version {loaded} of the weights now"})
        wanted = min((request.version for request in self._waiting), default=loaded)
        if wanted == loaded:
            return
        try:
            self.version, model = self._weights.wait(exactly=wanted, deadline_s=self._deadline_s)
            self._model = self._pool.engine.own(model)
            self._pool.new_weights()
            self._on_loaded(self.version)
        except WeightError as error:
            for request in [request for request in self._waiting if request.version == wanted]:
                self._waiting.remove(request)
                self._answer(request, {"refused": f"cannot load version {wanted}: {error}"})

    def _open_spans(self) -> None:
        """Gives pages to requests of the loaded version while there are some."""
        for request in [one for one in self._waiting if one.version == self.version]:
            try:
                self._pool.open(request.span)
            except OutOfPages:
                return
            self._waiting.remove(request)
            self._open.append(request)

    # --- Pages ------------------------------------------------------------------------------------

    def _hand_over(self, request: _Request) -> None:
        """Makes the pages of a prompt ready to be pulled, and says so."""
        pieces, cuts = pieces_of(self._pool, request.span)
        self._stats.prompts += 1
        self._stats.prompt_tokens += len(request.span.tokens)
        self._stats.bytes += sum(piece.nbytes for piece in pieces)
        self._pool.release(request.span)
        uuid = new_ticket()
        # Not for longer than the actor waits: they stay in the memory of the devices until then.
        ready_s = max(0.0, request.until - time.monotonic()) + GRACE_S
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ready_s)
        self._server.await_pull(uuid, pieces, timeout=until)
        self._answer(request, {"uuid": uuid, "cuts": cuts})

    def _answer(self, request: _Request, content: Mapping[str, Any]) -> None:
        self._stats.refused += "refused" in content
        try:
            prefill_wire.send(request.end, {"id": request.number, **content})
        except OSError:
            request.end.close()  # the actor has gone


def pieces_of(pool: PagePool, span: Span) -> tuple[list[jax.Array], list[list[list[int]]]]:
    """(the arrays that hold a span's pages, each on one device; for each array of the cache the
    [start, stop] of its pieces along the heads).

    The arrays come by block, array of the cache, and piece.
    """
    pieces = []
    cuts: list[list[list[int]]] = []
    for content in pool.read(span):
        first = span.shard * len(content[0]) // pool.engine.shards
        cuts = []
        for x in content:
            own = [(box, part) for box, part in own_parts(x) if box[0][0] == first]
            own.sort(key=lambda pair: pair[0])
            cuts.append([list(box[1]) for box, _ in own])
            pieces += [part for _, part in own]
    return pieces, cuts
