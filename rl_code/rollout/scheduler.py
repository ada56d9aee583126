"""Runs groups of episodes through the engine: who decodes, who waits for a tool, who comes next.

The host loop alternates three things and blocks on none while any row can decode: results of tools that have arrived
are appended to their rows (only the new tokens are prefilled), waiting episodes take free slots, and one dispatch
decodes every row that is ready. Tools and grading run in worker threads.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import jax
import numpy as np

from models.tokenizer import Tokenizer
from models.transformer import Transformer
from rl_code.environment.episode import Episode
from rl_code.environment.protocol import stop_length
from rl_code.rollout.engine import DecodeInput, Engine, KVCache
from rl_code.types import Group, Task, Trajectory

_DECODE_FIELDS = ("tokens", "positions", "budgets", "groups", "samples")


class RolloutTimeout(RuntimeError):
    """No tool answered within the deadline; names the episodes that were waited for."""


@dataclasses.dataclass
class _Row:
    """An episode and where it stands.

    cached: tokens of it that are in the cache. pending: those that follow and are not, the last of which is fed to the
    decoder; empty while a tool runs. message, logprobs: what was sampled of the current assistant message.
    """

    episode: Episode
    number: int
    shard: int
    slot: int = -1
    cached: int = 0
    pending: list[int] = dataclasses.field(default_factory=list)
    message: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Prompt:
    """A group's prompt in a row of the prompt cache, with the samples that have not taken a slot yet."""

    rows: collections.deque[_Row]
    pending: list[int]
    cached: int = 0


class _Shard:
    """The groups of one shard of the engine: waiting, with a prompt in the cache, and running in slots."""

    def __init__(self, engine: Engine, groups: list[list[_Row]]):
        self.groups = collections.deque(groups)
        self.prompts: list[_Prompt | None] = [None] * engine.config.prompts
        self.rows: list[_Row | None] = [None] * engine.config.slots

    @property
    def busy(self) -> bool:
        return bool(self.groups) or any(self.prompts) or any(self.rows)


@dataclasses.dataclass
class RolloutStats:
    """Counts of one call of ``rollout``; seconds are wall-clock.

    sampled_tokens; prefilled_tokens: real ones, without padding; shared_tokens: prompt tokens that were copied instead
    of prefilled. decode_s and prefill_s: dispatch to result. wait_s: nothing could decode and a tool was waited for.
    occupancy: mean share of slots that decoded, per dispatch.
    """

    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    shared_tokens: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    wait_s: float = 0.0
    total_s: float = 0.0
    dispatches: int = 0
    active_rows: int = 0
    slots: int = 0

    @property
    def occupancy(self) -> float:
        return self.active_rows / max(1, self.dispatches * self.slots)


class Scheduler:
    """Drives episodes through an engine. Owns the worker threads and the caches, which live across calls.

    tool_timeout_s: raises RolloutTimeout when nothing can decode and no tool answers for this long.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, workers: int, tool_timeout_s: float):
        self.engine = engine
        self._tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="episode")
        self._timeout_s = tool_timeout_s
        self._caches: tuple[KVCache, KVCache] | None = None

    def close(self) -> None:
        """Waits for running tools; the scheduler cannot be used afterwards."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._caches = None

    def rollout(
        self,
        model: Transformer,
        tasks: Sequence[Task],
        make_episode: Callable[[Task, int, int], Episode],
        *,
        group_size: int,
        version: int,
        key: jax.Array,
        first_group: int = 0,
        on_finished: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> tuple[list[Group], RolloutStats]:
        """Plays ``group_size`` episodes of every task and returns the groups in the order of ``tasks``.

        make_episode(task, group, index) builds an episode; groups are numbered from ``first_group`` and the random
        stream of a token depends on (key, group, index, position) only. on_finished runs in this thread.
        Raises ValueError for a prompt that is longer than the engine's prompt_length.
        """
        run = _Run(self, model, version, key, on_finished)
        shards = self.engine.shards
        groups = [
            [
                _Row(make_episode(task, first_group + g, i), number=g * group_size + i, shard=g % shards)
                for i in range(group_size)
            ]
            for g, task in enumerate(tasks)
        ]
        start = time.perf_counter()
        slots, prompts = self._caches or self.engine.init()
        self._caches = None
        try:
            slots, prompts = run.play([_Shard(self.engine, groups[s::shards]) for s in range(shards)], slots, prompts)
        except BaseException:
            for row in (row for group in groups for row in group):
                row.episode.close()
            raise
        self._caches = (slots, prompts)
        run.stats.total_s = time.perf_counter() - start
        trajectories = [run.trajectories[number] for number in range(len(tasks) * group_size)]
        return [
            Group(task, tuple(trajectories[g * group_size : (g + 1) * group_size])) for g, task in enumerate(tasks)
        ], run.stats


class _Run:
    """The state of one call of ``Scheduler.rollout``."""

    def __init__(self, scheduler: Scheduler, model, version: int, key: jax.Array, on_finished):
        self.engine = scheduler.engine
        self.config = scheduler.engine.config
        self.model, self.version, self.key = model, version, key
        self.tokenizer, self.executor = scheduler._tokenizer, scheduler._executor
        self.timeout_s = scheduler._timeout_s
        self.on_finished = on_finished
        self.trajectories: dict[int, Trajectory] = {}
        self.stepping: dict[Future, _Row] = {}
        self.finishing: dict[Future, _Row] = {}
        self.stats = RolloutStats(slots=self.engine.shards * self.config.slots)

    def play(self, shards: list[_Shard], slots: KVCache, prompts: KVCache) -> tuple[KVCache, KVCache]:
        """Until every episode is finished; returns the caches."""
        while True:
            self._collect(shards)
            for shard in shards:
                self._open_groups(shard)
            prompts = self._prefill(prompts, [shard.prompts for shard in shards])
            slots = self._admit(shards, slots, prompts)
            slots = self._prefill(slots, [shard.rows for shard in shards])
            if any(self._ready(row) for shard in shards for row in shard.rows):
                slots = self._decode(shards, slots)
            elif self.stepping or self.finishing:
                self._wait()
            elif not any(shard.busy for shard in shards):
                return slots, prompts

    @staticmethod
    def _ready(row: _Row | None) -> bool:
        return row is not None and len(row.pending) == 1

    def _wait(self) -> None:
        start = time.perf_counter()
        done, _ = wait([*self.stepping, *self.finishing], timeout=self.timeout_s, return_when=FIRST_COMPLETED)
        self.stats.wait_s += time.perf_counter() - start
        if not done:
            waiting = sorted(row.episode.task.id for row in (*self.stepping.values(), *self.finishing.values()))
            raise RolloutTimeout(f"no tool answered within {self.timeout_s} s; waiting for tasks {waiting}")

    def _collect(self, shards: list[_Shard]) -> None:
        """Take what the worker threads have finished; an episode that is over leaves its slot and is graded."""
        for future in [future for future in self.stepping if future.done()]:
            row = self.stepping.pop(future)
            observation = future.result()
            if observation is None:
                shards[row.shard].rows[row.slot] = None
                self.finishing[self.executor.submit(row.episode.finish)] = row
            else:
                row.pending = [row.message[-1], *observation]
                row.message, row.logprobs = [], []
        for future in [future for future in self.finishing if future.done()]:
            row = self.finishing.pop(future)
            self.trajectories[row.number] = future.result()
            self.on_finished(self.trajectories[row.number])

    def _open_groups(self, shard: _Shard) -> None:
        """Give waiting groups the free rows of the prompt cache."""
        for place, prompt in enumerate(shard.prompts):
            if prompt is None and shard.groups:
                rows = shard.groups.popleft()
                tokens, *_ = [row.episode.start() for row in rows]
                if len(tokens) > self.config.prompt_length:
                    raise ValueError(
                        f"task {rows[0].episode.task.id}: its prompt of {len(tokens)} tokens is longer than "
                        f"prompt_length={self.config.prompt_length}"
                    )
                shard.prompts[place] = _Prompt(collections.deque(rows), list(tokens))

    def _prefill(self, cache: KVCache, shards: Sequence[Sequence[_Row | _Prompt | None]]) -> KVCache:
        """Put all pending tokens but the last into the cache, one chunk per row and dispatch."""
        num_rows, chunk = self.config.prefill_rows, self.config.prefill_tokens
        start = time.perf_counter()
        while True:
            due = [[(i, x) for i, x in enumerate(s) if x is not None and len(x.pending) > 1][:num_rows] for s in shards]
            if not any(due):
                break
            places = np.full((len(shards), num_rows), len(shards[0]), np.int32)
            tokens = np.zeros((len(shards), num_rows, chunk), np.int32)
            starts = np.zeros((len(shards), num_rows), np.int32)
            for s, entries in enumerate(due):
                for r, (place, entry) in enumerate(entries):
                    count = min(chunk, len(entry.pending) - 1)
                    places[s, r], starts[s, r] = place, entry.cached
                    tokens[s, r, :count] = entry.pending[:count]
                    entry.cached, entry.pending = entry.cached + count, entry.pending[count:]
                    self.stats.prefilled_tokens += count
            cache = self.engine.prefill(
                self.model, cache, places.reshape(-1), tokens.reshape(-1, chunk), starts.reshape(-1)
            )
        self.stats.prefill_s += time.perf_counter() - start
        return cache

    def _admit(self, shards: list[_Shard], slots: KVCache, prompts: KVCache) -> KVCache:
        """Fill free slots with samples of prompts that are in the cache, by copying the prompt's keys and values."""
        size = self.config.slots
        targets = np.full((len(shards), size), size, np.int32)
        sources = np.zeros((len(shards), size), np.int32)
        for s, shard in enumerate(shards):
            free = collections.deque(slot for slot, row in enumerate(shard.rows) if row is None)
            entries = 0
            for place, prompt in enumerate(shard.prompts):
                while prompt is not None and prompt.rows and free:
                    row = prompt.rows.popleft()
                    row.slot, row.cached, row.pending = free.popleft(), prompt.cached, list(prompt.pending)
                    shard.rows[row.slot] = row
                    targets[s, entries], sources[s, entries] = row.slot, place
                    entries += 1
                    self.stats.shared_tokens += prompt.cached
                if prompt is not None and not prompt.rows:
                    shard.prompts[place] = None
        if np.all(targets == size):
            return slots
        return self.engine.admit(slots, prompts, targets.reshape(-1), sources.reshape(-1))

    def _decode(self, shards: list[_Shard], slots: KVCache) -> KVCache:
        """One dispatch for all rows that are ready; messages that ended go to the worker threads."""
        rows = [row for shard in shards for row in shard.rows]
        active = np.array([self._ready(row) for row in rows])
        inputs = {name: np.zeros(len(rows), np.int32) for name in _DECODE_FIELDS}
        for i, row in enumerate(rows):
            if row is not None:
                # Also for a row that waits: the decoder writes to every slot, and here nothing is lost.
                inputs["positions"][i] = row.cached
            if active[i]:
                inputs["tokens"][i] = row.pending[0]
                inputs["budgets"][i] = row.episode.budget - len(row.message)
                inputs["groups"][i], inputs["samples"][i] = row.episode.group, row.episode.index
        start = time.perf_counter()
        slots, tokens, logprobs, counts = self.engine.decode(
            self.model, slots, DecodeInput(active=active, **inputs), self.key
        )
        tokens, logprobs, counts = jax.device_get((tokens, logprobs, counts))
        self.stats.decode_s += time.perf_counter() - start
        self.stats.dispatches += 1
        self.stats.active_rows += int(active.sum())
        for i, row in enumerate(rows):
            if active[i]:
                self._take(row, tokens[i, : counts[i]].tolist(), logprobs[i, : counts[i]].tolist())
        return slots

    def _take(self, row: _Row, tokens: list[int], logprobs: list[float]) -> None:
        """Append what was sampled; cut it where the protocol's rule on text ends the message."""
        before = len(row.message)
        message = row.message + tokens
        end = stop_length(row.episode.protocol, self.tokenizer, message)
        over = end is not None or len(message) == row.episode.budget
        row.message = message[:end]
        row.logprobs = (row.logprobs + logprobs)[:end]
        row.cached += len(row.message) - before
        row.pending = [] if over else [row.message[-1]]
        self.stats.sampled_tokens += len(row.message) - before
        if over:
            future = self.executor.submit(row.episode.step, row.message, row.logprobs, self.version)
            self.stepping[future] = row
