"""An actor on several hosts: the first process decides, and the others make every call that it
makes on its devices.

A program over the devices of several processes runs when each process calls it, with the same
arguments and in the same order. Therefore only the first process (the leader) has episodes, tools,
pages and the store. It tells the others (the followers) which program comes next and with which
arguments from the host. They make the same call, and they fetch weights at the same moments. Leader
and followers are connected by a stream of their own. The leader may be silent for as long as it has
nothing to sample, and a stream tells at once when either end has died.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import jax
import numpy as np
from absl import logging

from attention.cache.paged import PagedCache
from attention.cache.tables import Runs
from models.transformer import Transformer
from models.unstacked import Unstacked
from rl_code.rollout.decode_input import DecodeInput
from rl_code.rollout.engine import Engine
from rl_code.weights.versions import Subscriber
from rl_code.weights.waiting import agree, within

_KEY_WORDS = 4  # of 31 random bits


class ProcessLost(RuntimeError):
    """Another process of this actor has ended; says which."""


class Channel:
    """The streams from the leader to the followers. All processes make it at the same time.

    host: the IPv4 address of this machine, in numbers. deadline_s: seconds to wait for the other
    processes; then WeightTimeout is raised.
    """

    def __init__(self, host: str, deadline_s: float):
        try:
            address = [*ipaddress.IPv4Address(host).packed]
        except ValueError:
            raise ValueError(
                f"host={host!r} must be an IPv4 address in numbers, as in 10.0.0.7"
            ) from None
        self.leads = jax.process_index() == 0
        listener = None
        port = 0
        key = [0] * _KEY_WORDS
        if self.leads:
            key = [secrets.randbits(31) for _ in range(_KEY_WORDS)]
            listener = Listener((host, 0), backlog=jax.process_count(), authkey=_to_bytes(key))
            port = listener.address[1]
        first = agree(deadline_s, "joining the actor", *address, port, *key)[0]
        address = bytes(first[:4])
        port = first[4]
        key = first[5:]
        followers = jax.process_count() - 1
        if listener is not None:
            accept = lambda: [listener.accept() for _ in range(followers)]  # noqa: E731
            self._ends: list[Connection] = within(
                deadline_s, accept, f"the actor's first process for {followers} more"
            )
            listener.close()
        else:
            self._ends = [
                Client((str(ipaddress.IPv4Address(address)), port), authkey=_to_bytes(key))
            ]
        for end in self._ends:
            _keep_alive(end)

    def tell(self, call: str, *arguments: Any) -> None:
        """For the leader: tells every follower which call it is about to make. Raises
        ProcessLost.
        """
        for end in self._ends:
            try:
                end.send((call, arguments))
            except OSError as error:
                raise ProcessLost(
                    f"a process of this actor has ended before {call!r}: {error}"
                ) from error

    def hear(self) -> tuple[str, tuple[Any, ...]]:
        """For a follower: waits for the leader's next call. Raises ProcessLost."""
        try:
            return self._ends[0].recv()
        except (EOFError, OSError) as error:
            raise ProcessLost("the first process of this actor has ended") from error

    def close(self) -> None:
        """Ends the followers' loops."""
        for end in self._ends:
            end.close()


class LeadingEngine(Engine):
    """The leader's engine. Before each call on the devices it tells the followers to make the same
    call: a program over the devices of all processes runs only when all have called it.
    """

    def __init__(self, *arguments, channel: Channel):
        super().__init__(*arguments)
        self._channel = channel

    def init(self) -> PagedCache:
        self._channel.tell("init")
        return super().init()

    def own(self, model: Transformer) -> Unstacked:
        self._channel.tell("own")
        return super().own(model)

    def prefill(
        self,
        model: Unstacked,
        cache: PagedCache,
        tables,
        tokens,
        places,
        runs: Runs | None,
        adapters: np.ndarray | None = None,
    ) -> PagedCache:
        inputs = (tables, tokens, places, runs, adapters)
        self._channel.tell("prefill", *inputs)
        return super().prefill(model, cache, *inputs)

    def decode(self, model: Unstacked, cache: PagedCache, inputs: DecodeInput):
        self._channel.tell("decode", inputs)
        return super().decode(model, cache, inputs)

    def copy_pages(self, cache: PagedCache, sources, targets) -> PagedCache:
        self._channel.tell("copy_pages", sources, targets)
        return super().copy_pages(cache, sources, targets)

    def read_pages(self, cache: PagedCache, pages) -> list[jax.Array]:
        self._channel.tell("read_pages", pages)
        return super().read_pages(cache, pages)

    def write_pages(self, cache: PagedCache, pages, content: list) -> PagedCache:
        self._channel.tell("write_pages", pages, content)
        return super().write_pages(cache, pages, content)


class LeadingWeights:
    """A Subscriber whose waits the followers join, so that all processes have the same weights."""

    def __init__(self, weights: Subscriber, channel: Channel):
        self._weights, self._channel = weights, channel

    @property
    def fetched(self):
        """As ``Subscriber.fetched``."""
        return self._weights.fetched

    def newest(self) -> int | None:
        """As ``Subscriber.newest``."""
        return self._weights.newest()

    def wait(self, **wanted) -> tuple[int, Transformer]:
        """As ``Subscriber.wait``."""
        self._channel.tell("wait", wanted)
        return self._weights.wait(**wanted)


def follow(engine: Engine, weights: Subscriber, channel: Channel) -> None:
    """Makes the leader's calls until it says "stop"; raises ProcessLost when it has ended
    without.
    """
    given: Transformer | None = None
    model: Unstacked | None = None
    cache: PagedCache | None = None
    while True:
        call, arguments = channel.hear()
        match call:
            case "wait":
                _, given = weights.wait(**arguments[0])
            case "own":
                model = None  # frees the memory of the old copies first
                model = engine.own(given)
                given = None
            case "init":
                cache = None  # frees the memory of the old cache first
                cache = engine.init()
            case "prefill":
                cache = engine.prefill(model, cache, *arguments)
            case "decode":
                cache, *_ = engine.decode(model, cache, *arguments)
            case "copy_pages":
                cache = engine.copy_pages(cache, *arguments)
            case "read_pages":
                engine.read_pages(cache, *arguments)
            case "write_pages":
                cache = engine.write_pages(cache, *arguments)
            case "stop":
                logging.info("the first process of this actor has no more to do")
                return


def _keep_alive(end: Connection) -> None:
    """Has the system find out within a minute or two when the host at the other end is gone without
    a word.
    """
    with socket.socket(fileno=os.dup(end.fileno())) as stream:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, option):
                stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _to_bytes(words) -> bytes:
    return b"".join(int(word).to_bytes(4, "little") for word in words)
