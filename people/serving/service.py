"""One set of weights in the engine: requests are episodes of one message.

A thread of its own is the only one that touches the scheduler. What others want of it is a function
that it calls between two rounds.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol as Interface

import numpy as np
from absl import logging

from models.transformer import Transformer
from rl_code.environment.documents import OUTSIDE
from rl_code.environment.protocols.protocol import Protocol
from rl_code.environment.sampled_episode import SampledEpisode
from rl_code.harness.endpoint.fields import ApiError, Request
from rl_code.harness.endpoint.stops import stopping
from rl_code.rollout.own_way import OwnWay
from rl_code.rollout.sampling import SamplingConfig
from rl_code.rollout.scheduler import Scheduler
from rl_code.types import Context, Reward, Task, Trajectory

_IDLE_S = 0.5

TASK = Task(id="served", messages=())

# What the scheduler gets for an episode whose record is kept elsewhere.
_NOTHING = Trajectory(
    task_id=TASK.id,
    group=0,
    index=0,
    contexts=(
        Context(
            tokens=np.zeros(0, np.int32),
            sampled=np.zeros(0, bool),
            logprobs=np.zeros(0, np.float32),
            versions=np.zeros(0, np.int32),
        ),
    ),
    prompt_length=0,
    turns=(),
    status="submitted",
    reward=Reward(0.0, {}),
)


class EngineRequest(Interface):
    """A request for the engine. Its methods are called in threads of the engine's."""

    request: Request
    # The tokens that each of its answers follows.
    prompts: Sequence[list[int]]
    # What each token of each prompt is (``Context.documents``); None where none is in a document.
    kinds: Sequence[list[int]] | None
    # Number of the adapter of the weights that answers; -1 for none.
    adapter: int
    # Whom the prompts belong to; nobody else shares their pages.
    owner: str
    # Sampling of each of its answers; None for the server's own sampling.
    ways: Sequence[OwnWay] | None

    def sampled(self, index: int, tokens: Sequence[int]) -> None:
        """All tokens of an answer so far."""
        ...

    def answered(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """An answer is whole."""
        ...

    def cut_off(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """An answer ends with what there is of it, since it was cancelled or the engine ends."""
        ...


class Served(SampledEpisode):
    """One answer as an episode of one message."""

    def __init__(self, job: EngineRequest, index: int, protocol: Protocol, length: int):
        super().__init__(TASK, 0, index)
        self._job = job
        self.protocol = stopping(protocol, job.request)
        prompt = job.prompts[index]
        self.documents = [OUTSIDE] * len(prompt) if job.kinds is None else job.kinds[index]
        room = length - len(prompt)
        # The most tokens that the message may have.
        self.budget = min(room, job.request.max_tokens or room)

    def start(self) -> list[int]:
        """The whole prompt."""
        return self._job.prompts[self.index]

    def sampling(self, tokens: Sequence[int]) -> None:
        """The tokens so far, for a stream."""
        self._job.sampled(self.index, tokens)

    def step(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """The message is whole."""
        self._job.answered(self.index, tokens, logprobs)

    def finish(self) -> Trajectory:
        """Nothing is graded; the record is kept by the job."""
        return _NOTHING


class Service:
    """Runs jobs in a thread of its own. A context manager, which ends it.

    scheduler: which nobody else uses. protocol: says where messages end.
    """

    def __init__(
        self, scheduler: Scheduler, weights: Transformer, *, version: int, protocol: Protocol
    ):
        engine = scheduler.engine
        self.length: int = engine.config.length
        self.page: int = engine.config.page
        self.prefill_tokens: int = engine.config.prefill_tokens
        self.pages: int = engine.shards * engine.config.pages
        # The most tokens of a document; None for a model without documents.
        self.longest_document: int | None = engine.config.longest_document
        self.sampling: SamplingConfig = engine.sampling
        self._protocol = protocol
        self._scheduler = scheduler
        self._version = version
        # Running jobs by their tags.
        self._jobs: dict[int, EngineRequest] = {}
        self._tags = itertools.count()
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self.error: BaseException | None = None
        scheduler.load(weights, version)
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)
        self._thread.start()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cuts off what is in progress, and frees the cache."""
        self._stop.set()
        self._thread.join()

    def submit(self, job: EngineRequest) -> Future:
        """Hands in a job, from any thread. The result raises what is wrong with it, and ApiError
        where the engine has ended.
        """
        return self._call(lambda: self._begin(job))

    def cancel(self, job: EngineRequest) -> Future:
        """Cuts a job off, from any thread; what has ended already has ended."""
        return self._call(lambda: self._cancel(job))

    def cut_off(self, adapter: int) -> Future:
        """Cuts off all jobs that an adapter answers, from any thread."""

        def cancel() -> None:
            for job in [job for job in self._jobs.values() if job.adapter == adapter]:
                self._cancel(job)

        return self._call(cancel)

    def load(self, weights: Transformer) -> Future:
        """Puts other weights in place of those there are, between two rounds and in the middle of
        messages: those with other adapters beside the ones that are in use.
        """
        return self._call(lambda: self._scheduler.load(weights, self._version))

    def _call(self, function: Callable[[], None]) -> Future:
        future: Future = Future()
        self._calls.put((function, future))
        if not self._thread.is_alive():
            self._refuse()  # the thread may have missed it
        return future

    def _begin(self, job: EngineRequest) -> None:
        tag = next(self._tags)
        seed = secrets.randbits(64) if job.request.seed is None else job.request.seed
        self._scheduler.submit(
            TASK,
            lambda task, group, index: Served(job, index, self._protocol, self.length),
            group=0,
            group_size=len(job.prompts),
            key=(seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF),
            tag=tag,
            adapter=job.adapter,
            owner=job.owner,
            ways=job.ways,
        )
        self._jobs[tag] = job

    def _cancel(self, job: EngineRequest) -> None:
        for tag in [tag for tag, running in self._jobs.items() if running is job]:
            del self._jobs[tag]
            for row in self._scheduler.give_up(tag):
                job.cut_off(row.episode.index, row.message, row.logprobs)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._take(wait=self._scheduler.groups == 0)
                if self._scheduler.groups:
                    for tag, _ in self._scheduler.step():
                        del self._jobs[tag]
        except BaseException as error:  # a thread has nobody to raise it to
            self.error = error
            logging.exception("the engine has stopped")
        finally:
            for job in list(self._jobs.values()):
                self._cancel(job)
            self._scheduler.close()
            self._refuse()

    def _refuse(self) -> None:
        """Ends what nobody will do any more."""
        why = f": {self.error}" if self.error else ""
        ended = ApiError(f"the engine has stopped{why}", status=503, kind="server_error")
        while True:
            try:
                _, future = self._calls.get_nowait()
            except queue.Empty:
                return
            future.set_exception(ended)

    def _take(self, *, wait: bool) -> None:
        """Does what others want."""
        try:
            while True:
                function, future = (
                    self._calls.get(timeout=_IDLE_S) if wait else self._calls.get_nowait()
                )
                wait = False
                try:
                    function()
                except (ValueError, ApiError) as error:
                    future.set_exception(error)
                else:
                    future.set_result(None)
        except queue.Empty:
            pass
