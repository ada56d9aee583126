"""Episodes whose messages vLLM samples; all else about them is as with this project's engine.

A message is one request: all tokens before it go in, and the sampled tokens come out with their
log-probabilities and the versions of the weights. Requests of one version of the weights share the
keys of what they have in common, so the prompt of a group is computed once. In every round tools
are collected, episodes opened, and messages asked for and taken.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from models import huggingface
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from rl_code.environment.protocols.protocol import stop_length
from rl_code.rollout.engine_config import EngineConfig
from rl_code.rollout.open_rows import OpenRows
from rl_code.rollout.own_way import OwnWay
from rl_code.rollout.playing import Playing
from rl_code.rollout.rows import Row
from rl_code.rollout.sampling import SamplingConfig
from rl_code.rollout.vllm_client import Cancelled, Request, Sampled, VllmClient, VllmError
from rl_code.types import Group

# The longest wait for messages before the actor looks for new weights.
_ROUND_S = 0.25


class VllmRows(OpenRows):
    """Opens episodes while there is room; vLLM keeps their keys."""

    def open(self) -> None:
        """Opens episodes of the groups in the queue, oldest first."""
        while self.queue and len(self.rows) < self._episodes:
            group = self.queue[0]
            self.rows.append(group.unopened.pop())
            if not group.unopened:
                self.queue.popleft()


class VllmScheduler(Playing[VllmRows]):
    """Drives episodes through a server of vLLM. It owns the worker threads, and those that wait for
    the server.

    Args:
      client: the server. Nobody else pushes weights to it.
      config: prompt_length, length, slots and episodes are read.
      sampling: its log-probabilities are those of the trainer; top-k and top-p are not for vLLM.
      stop_ids: tokens that end a message.
      folder: for weights that are on their way.
      workers, worker_deadline_s, gather_s: as of ``Playing``.
    """

    def __init__(
        self,
        client: VllmClient,
        config: EngineConfig,
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        tokenizer: Tokenizer,
        folder: Path,
        *,
        workers: int,
        worker_deadline_s: float,
        gather_s: float = 0.0,
    ):
        self._client = client
        self._sampling = sampling
        self._stop_ids = sorted(stop_ids)
        self._tokenizer = tokenizer
        self._folder = folder
        # Labels and requests of this object are no others: a server may have served before.
        self._name = uuid.uuid4().hex[:12]
        self._label = ""
        self._versions: dict[str, int] = {}
        self._pushes = itertools.count()
        self._requests = itertools.count()
        self._streams = ThreadPoolExecutor(config.slots, thread_name_prefix="vllm")
        # messages that are being sampled
        self._asked: dict[Future[Sampled], tuple[Row, Request]] = {}
        rows = VllmRows(config.episodes, config.prompt_length)
        threads = dict(workers=workers, worker_deadline_s=worker_deadline_s, gather_s=gather_s)
        super().__init__(config, rows, slots=config.slots, **threads)

    def close(self) -> None:
        """As the base class; messages that are being sampled are given up."""
        super().close()
        self._streams.shutdown(wait=True, cancel_futures=True)

    def load(self, model: Transformer, version: int, *, recompute: bool = False) -> None:
        """Pushes weights to the server, which samples with them from then on.

        recompute: whether messages in progress compute their keys anew. False keeps the keys of
        older weights to the end of a message; the next message of an episode finds none of them.

        Raises VllmError where the server did not take them, or has others afterwards.
        """
        label = f"{self._name}.{next(self._pushes)}.{version}"
        folder = self._folder / label
        try:
            huggingface.save(folder, model, max_positions=self.config.length)
            self._client.push(folder, label, recompute=recompute)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._versions[label] = version
        self._label, self.version = label, version
        self._open.loaded(version)

    @property
    def weights(self) -> None:
        """None: they are in another process."""
        return None

    def step(self) -> list[tuple[Any, Group]]:
        """One round; returns (tag, group) for each group that was finished. Where there is nothing
        else to do it waits for a tool, or for a moment for messages.

        Raises VllmError where the server fails.
        """
        start = time.perf_counter()
        self._start()
        finished = self._gather()
        self._open.open()
        self._ask()
        if not finished:
            self._await()
        self._take()
        self._open.stats.total_s += time.perf_counter() - start
        return finished

    def give_up(self, tag: Any) -> list[Row]:
        """As the base class; what was sampled of a message is not there."""
        cut_off = super().give_up(tag)
        for row, request in self._asked.values():
            if row not in self._open.rows:
                request.cancel()
        return cut_off

    def _reset(self) -> None:
        for future, (_, request) in self._asked.items():
            future.cancel()
            request.cancel()
        self._asked.clear()
        super()._reset()

    def _check(self, adapter: int, ways: Sequence[OwnWay] | None) -> None:
        if adapter != -1:
            raise ValueError(f"{adapter=}: vLLM is pushed whole weights, without adapters")
        if ways is not None:
            raise ValueError("ways: vLLM draws all rows alike")

    def _ask(self) -> None:
        """Asks for the messages of the rows that have none, oldest first. None waits for a slot: it
        would share the keys of weights that are older than those that then sample it.
        """
        asked = {id(row) for row, _ in self._asked.values()}
        for row in self._open.rows:
            if len(self._asked) == self.slots:
                return
            if row.waiting or id(row) in asked:
                continue
            request = self._request(row)
            self._asked[self._streams.submit(self._client.sample, request)] = row, request

    def _request(self, row: Row) -> Request:
        episode = row.episode
        return Request(
            f"{self._name}-{next(self._requests)}",
            row.tokens,
            {
                "temperature": self._sampling.temperature,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "max_tokens": episode.budget,
                "stop_token_ids": self._stop_ids,
                "ignore_eos": True,
                "logprobs": 0,  # of the sampled token alone
                "seed": _seed(row),
                "detokenize": False,
            },
            self._label,
            lambda tokens: stop_length(episode.protocol, self._tokenizer, tokens),
            self.config.decode_steps,
        )

    def _await(self) -> None:
        """Waits a moment for messages and tools; for tools alone as long as they may take."""
        if not self._asked:
            if self._worked_on:
                self._wait()
            return
        start = time.perf_counter()
        wait([*self._asked, *self._worked_on], timeout=_ROUND_S, return_when=FIRST_COMPLETED)
        self._open.stats.decode_s += time.perf_counter() - start

    def _take(self) -> None:
        """Takes the messages that are sampled; the worker threads carry them out."""
        for future in [future for future in self._asked if future.done()]:
            row, _ = self._asked.pop(future)
            try:
                sampled = future.result()
            except Cancelled:
                continue
            row.message = sampled.tokens
            row.logprobs = sampled.logprobs
            row.versions = [self._version_of(label) for label in sampled.labels]
            self._count(row, sampled)
            row.add(sampled.tokens)
            row.episode.sampling(row.message)
            row.waiting = True
            self._stepping[self._executor.submit(self._step, row)] = row

    def _version_of(self, label: str) -> int:
        """The version of the weights with a label. Raises VllmError for one that was not pushed
        here.
        """
        if label not in self._versions:
            raise VllmError(
                f"{self._client.address}: a token was sampled by weights {label!r}, which this "
                "actor did not push; each actor needs a server of its own"
            )
        return self._versions[label]

    def _count(self, row: Row, sampled: Sampled) -> None:
        stats = self._open.stats
        stats.sampled_tokens += len(sampled.tokens)
        stats.prefilled_tokens += len(row.tokens) - sampled.cached
        first = len(row.tokens) == row.prompt
        if first:
            stats.needed_tokens += len(row.tokens)
            stats.found_in_groups += sampled.cached
        else:  # what a turn adds is counted where it is added
            stats.found_in_turns += sampled.cached


def _seed(row: Row) -> int:
    """A seed for the sampling of a message, from the key, the episode and the place. The server
    draws the same tokens by it only where its numbers are the same, too.
    """
    words = [*row.key, row.episode.group, row.episode.index, len(row.tokens)]
    content = np.array(words, np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest()) >> 1
