"""Continuous batching: which episode decodes, which waits for a tool, which pages it has, and who
comes next.

Groups of episodes are handed in at any time and come back when all their episodes are graded. A
round of the host loop takes what tools have answered, opens groups while there are pages for them,
prefills a chunk of every row that has new tokens (a few chunks while many slots are free) and
decodes one dispatch of all rows that are ready, so that neither a slow tool nor a long prompt holds
up the others. A prompt is prefilled once for its group and shared by page; an episode keeps its
pages from turn to turn. When pages run out, the youngest episode's go to host memory and come back
later; nothing fails and nothing is sampled twice. Prompts may be prefilled on devices of their own,
from which their pages are handed over.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import jax

from attention.cache.pages import OutOfPages
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from rl_code.environment.episode import Episode
from rl_code.environment.protocols.protocol import stop_length
from rl_code.rollout.decode_input import decode_input
from rl_code.rollout.engine import Engine
from rl_code.rollout.page_pool import PagePool, Span
from rl_code.types import Group, Task, Trajectory

# Most prefills in a row while any row can decode and a quarter of the slots is free.
_PREFILLS = 4


class RolloutTimeout(RuntimeError):
    """No tool answered within the deadline; names the episodes that were waited for."""


@dataclasses.dataclass(eq=False)
class _Row(Span):
    """An episode and where it stands; ``tokens`` are all that are known of it.

    group: it belongs to. key: words of its random key. waiting: for a tool. message, logprobs,
    versions: what was sampled of the current message.
    """

    episode: Episode | None = None
    group: _Group | None = None
    key: tuple[int, ...] = (0, 0)
    waiting: bool = False
    message: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class _Group(Span):
    """A group and its prompt: ``tokens`` are the prompt but its last one, which each row feeds to
    the decoder itself.

    rows: of all its episodes. unopened: those that have no pages yet; the prompt keeps its own
    until none is left. decodable: whether the prompt's pages are where rows decode. found: prompt
    tokens that another group had computed.
    """

    tag: Any = None
    task: Task | None = None
    rows: list[_Row] = dataclasses.field(default_factory=list)
    unopened: list[_Row] = dataclasses.field(default_factory=list)
    decodable: bool = False
    found: int | None = None
    trajectories: dict[int, Trajectory] = dataclasses.field(default_factory=dict)
    on_finished: Callable[[Trajectory], None] = lambda trajectory: None


@dataclasses.dataclass
class RolloutStats:
    """Counts since they were last taken; seconds are wall-clock.

    sampled_tokens; prefilled_tokens: real ones, without padding. needed_tokens: context before
    every message, of which were in the cache found_in_tasks (prompts, from another group),
    found_in_groups (prompts, from the group's first episode) and found_in_turns (an episode's own
    from before). decode_s and prefill_s: dispatch to result; on devices of their own prefills are
    not waited for. wait_s: nothing could decode and a tool was waited for. slot_steps: slots times
    decoding steps run; row_steps: those in which a row gained a token. preempted: episodes that
    gave up their pages. kv_bytes: most that the pages in use had.
    """

    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    needed_tokens: int = 0
    found_in_tasks: int = 0
    found_in_groups: int = 0
    found_in_turns: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    wait_s: float = 0.0
    total_s: float = 0.0
    slot_steps: int = 0
    row_steps: int = 0
    preempted: int = 0
    kv_bytes: int = 0

    @property
    def occupancy(self) -> float:
        """Mean share of the slots that gained a token in a decoding step."""
        return self.row_steps / max(1, self.slot_steps)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the context tokens that were found in the cache."""
        return (self.found_in_tasks + self.found_in_groups + self.found_in_turns) / max(
            1, self.needed_tokens
        )


class Scheduler:
    """Drives episodes through an engine. Owns the worker threads and the caches, which live across
    calls.

    prefiller: an engine for prompts on other devices, of the same config; None to prefill where
    rows decode. tool_timeout_s: raises RolloutTimeout when nothing can decode and no tool answers
    for this long.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        workers: int,
        tool_timeout_s: float,
        prefiller: Engine | None = None,
    ):
        self.engine = engine
        self._config = engine.config
        self._tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="episode")
        self._timeout_s = tool_timeout_s
        self._pool = PagePool(engine)
        self._prompt_pool = PagePool(prefiller) if prefiller else self._pool
        self._model: Transformer | None = None
        self._prompt_model: Transformer | None = None
        self.version: int | None = None
        self._reset()

    def close(self) -> None:
        """Waits for running tools; the scheduler cannot be used afterwards."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._reset()

    def load(self, model: Transformer, version: int, *, recompute: bool = False) -> None:
        """Samples with these weights from the next dispatch on, in the middle of messages too.

        recompute: whether episodes in progress compute their keys anew; else those of older weights
        are kept. New groups share prompts that the same weights (the same object) computed.
        """
        if self._model is not model:
            self._model = model
            separate = self._prompt_pool is not self._pool
            self._prompt_model = self._prompt_pool.place(model) if separate else model
            self._pool.new_weights()
            self._prompt_pool.new_weights()
            if recompute:
                for row in self._rows:
                    self._pool.forget(row)
                for group in reversed(list(self._prompts)):
                    self._put_off(group)
        self.version = version

    def submit(
        self,
        task: Task,
        make_episode: Callable[[Task, int, int], Episode],
        *,
        group: int,
        group_size: int,
        key: Sequence[int],
        tag: Any = None,
        on_finished: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> None:
        """Hands in ``group_size`` episodes of a task; ``step`` returns their group, with ``tag``,
        when it is finished.

        make_episode(task, group, index) builds an episode. The random stream of a token depends on
        (key, group, index, position) only; key: the two words of a random key. on_finished runs in
        the thread that calls ``step``. Raises ValueError for a prompt that is longer than the
        engine's prompt_length.
        """
        rows = [_Row(episode=make_episode(task, group, index)) for index in range(group_size)]
        prompt, *_ = [row.episode.start() for row in rows]
        if len(prompt) > self._config.prompt_length:
            for row in rows:
                row.episode.close()
            raise ValueError(
                f"task {task.id}: its prompt of {len(prompt)} tokens is longer than "
                f"prompt_length={self._config.prompt_length}"
            )
        own = _Group(prompt[:-1], len(prompt), tag=tag, task=task, rows=rows, unopened=rows[::-1])
        own.on_finished = on_finished
        for row in rows:
            row.group = own
            row.tokens = list(prompt)
            row.prompt = len(prompt)
            row.key = tuple(key)
        self._groups[own] = None
        self._queue.append(own)

    @property
    def groups(self) -> int:
        """Groups handed in and not finished."""
        return len(self._groups)

    @property
    def room(self) -> int:
        """Episodes that could be handed in and opened at once, if there were pages for them."""
        queued = sum(len(group.unopened) for group in (*self._queue, *self._prompts))
        return self.engine.shards * self._config.episodes - len(self._rows) - queued

    def step(self) -> list[tuple[Any, Group]]:
        """One round; returns (tag, group) of those that were finished. Waits for a tool if there is
        nothing to do.
        """
        start = time.perf_counter()
        finished = self._collect()
        self._reopen()
        self._open()
        self._prefill()
        if any(self._ready(row) for row in self._rows):
            self._decode()
        elif not finished and (self._stepping or self._finishing) and not self._prefill_due():
            self._wait()
        self.stats.total_s += time.perf_counter() - start
        return finished

    def take_stats(self) -> RolloutStats:
        """The counts since the last call."""
        stats, self.stats = self.stats, RolloutStats()
        pools = {self._pool, self._prompt_pool}
        return dataclasses.replace(stats, kv_bytes=sum(pool.take_peak_bytes() for pool in pools))

    def abort(self) -> None:
        """Gives up every episode and forgets the caches."""
        for future in (*self._stepping, *self._finishing):
            future.cancel()
        for group in self._groups:
            for row in group.rows:
                row.episode.close()
        self._reset()

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
        """Plays ``group_size`` episodes of every task and returns the groups in the order of
        ``tasks``.

        Groups are numbered from ``first_group``; arguments as ``load`` and ``submit`` take them.
        """
        self.load(model, version)
        self.take_stats()
        words = jax.random.key_data(key).tolist()
        groups: dict[int, Group] = {}
        try:
            for number, task in enumerate(tasks, first_group):
                way = dict(
                    group=number,
                    group_size=group_size,
                    key=words,
                    tag=number,
                    on_finished=on_finished,
                )
                self.submit(task, make_episode, **way)
            while self.groups:
                groups |= self.step()
        except BaseException:
            self.abort()
            raise
        return [
            groups[number] for number in range(first_group, first_group + len(tasks))
        ], self.take_stats()

    # --- A round ----------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._groups: dict[_Group, None] = {}  # not finished
        # whose prompt has no pages yet
        self._queue: collections.deque[_Group] = collections.deque()
        self._prompts: list[_Group] = []  # with episodes that are not open yet, oldest first
        self._rows: list[_Row] = []  # open episodes, oldest first
        self._stepping: dict[Future, _Row] = {}
        self._finishing: dict[Future, _Row] = {}
        self._pool.clear()
        self._prompt_pool.clear()
        self.stats = RolloutStats()

    @staticmethod
    def _ready(row: _Row) -> bool:
        return not row.waiting and row.held and row.missing == 1

    def _prefill_due(self) -> bool:
        return any(group.missing for group in self._prompts) or any(
            row.held and not row.waiting and row.missing > 1 for row in self._rows
        )

    def _wait(self) -> None:
        start = time.perf_counter()
        done, _ = wait(
            [*self._stepping, *self._finishing],
            timeout=self._timeout_s,
            return_when=FIRST_COMPLETED,
        )
        self.stats.wait_s += time.perf_counter() - start
        if not done:
            waiting = sorted(
                row.episode.task.id for row in (*self._stepping.values(), *self._finishing.values())
            )
            raise RolloutTimeout(
                f"no tool answered within {self._timeout_s} s; waiting for tasks {waiting}"
            )

    def _collect(self) -> list[tuple[Any, Group]]:
        """Take what the worker threads have finished; an episode that is over gives up its pages
        and is graded.
        """
        for future in [future for future in self._stepping if future.done()]:
            row = self._stepping.pop(future)
            observation = future.result()
            row.waiting = False
            if observation is None:
                self._pool.release(row)
                self._rows.remove(row)
                self._finishing[self._executor.submit(row.episode.finish)] = row
            else:
                row.tokens += observation
                row.message = []
                row.logprobs = []
                row.versions = []
                self.stats.needed_tokens += len(row.tokens) - 1
                self.stats.found_in_turns += row.cached
        finished = []
        for future in [future for future in self._finishing if future.done()]:
            row = self._finishing.pop(future)
            group = row.group
            trajectory = future.result()
            group.trajectories[row.episode.index] = trajectory
            group.on_finished(trajectory)
            if len(group.trajectories) == len(group.rows):
                del self._groups[group]
                trajectories = tuple(
                    group.trajectories[index] for index in sorted(group.trajectories)
                )
                finished.append((group.tag, Group(group.task, trajectories)))
        return finished

    def _reopen(self) -> None:
        """Give pages to episodes that have none, oldest first: pre-empted ones and those to be
        computed anew.
        """
        for row in self._rows:
            if not row.held and not row.waiting:
                try:
                    self._pool.restore(row)
                except OutOfPages:
                    return

    def _open(self) -> None:
        """Open episodes of prompts that are in the cache, then prompts, while there are pages and
        room for them.
        """
        if not all(row.held or row.waiting for row in self._rows):
            return  # those without pages come first
        while True:
            try:
                self._open_while_pages_last()
                return
            except OutOfPages:
                if self._rows or any(group.missing for group in self._prompts):
                    return  # who is at work gives pages back
                if len(self._prompts) < 2:
                    raise
                self._put_off(self._prompts[-1])

    def _open_while_pages_last(self) -> None:
        room = self.engine.shards * self._config.episodes - len(self._rows)
        for group in [group for group in self._prompts if not group.missing]:
            if not group.decodable:
                self._hand_over(group)
            while group.unopened and room > 0:
                self._pool.fork(group, group.unopened[-1])
                first = len(group.unopened) == len(group.rows)
                self._rows.append(group.unopened.pop())
                self.stats.needed_tokens += len(group.tokens)
                self.stats.found_in_tasks += group.found if first else 0
                self.stats.found_in_groups += 0 if first else len(group.tokens)
                room -= 1
            if not group.unopened:
                self._pool.release(group)
                self._prompts.remove(group)
        room -= sum(len(group.unopened) for group in self._prompts)
        while self._queue and room > 0:
            group = self._queue[0]
            self._prompt_pool.open(group)
            group.found = group.cached if group.found is None else group.found
            group.decodable = self._prompt_pool is self._pool
            self._prompts.append(self._queue.popleft())
            room -= len(group.unopened)

    def _hand_over(self, group: _Group) -> None:
        """Brings a prompt's pages from the devices that prefilled it to those that decode. Raises
        OutOfPages.
        """
        if group.saved is None:
            self._prompt_pool.save(group, on_device=True)
        self._pool.restore(group)
        group.decodable = True

    def _put_off(self, group: _Group) -> None:
        """Takes a prompt's pages; it is prefilled again later."""
        self._prompts.remove(group)
        (self._pool if group.decodable else self._prompt_pool).forget(group)
        self._queue.appendleft(group)

    def _prefill(self) -> None:
        """A chunk of rows with tokens to prefill, and more while few can decode: a dispatch costs
        almost the same.
        """
        start = time.perf_counter()
        dispatches = 0
        while self._prefill_due():
            prompts = [group for group in self._prompts if group.missing]
            rows = [row for row in self._rows if row.held and not row.waiting and row.missing > 1]
            rows = [row for row in rows if row.held and self._have_pages(row, len(row.tokens))]
            prompts = [group for group in prompts if group.held]
            if self._prompt_pool is self._pool:
                count = self._pool.prefill(self._model, [*rows, *prompts])
            else:
                count = self._pool.prefill(self._model, rows)
                count += self._prompt_pool.prefill(self._prompt_model, prompts)
            self.stats.prefilled_tokens += count
            self._open()
            ready = sum(self._ready(row) for row in self._rows)
            dispatches = dispatches + 1
            full = 4 * ready >= 3 * self.engine.shards * self._config.slots
            if full or (ready and dispatches == _PREFILLS):
                break
        if dispatches and self._prompt_pool is self._pool:
            self._pool.wait()  # decoding would, and its time would count the prefill's
        self.stats.prefill_s += time.perf_counter() - start

    def _have_pages(self, row: _Row, length: int) -> bool:
        """Gives a row pages for ``length`` tokens, taken from younger ones if need be; False when
        it lost its own.
        """
        while row.held:
            try:
                self._pool.reserve(row, length)
                return True
            except OutOfPages:
                self.stats.preempted += 1
                prompts = [
                    group for group in self._prompts if group.decodable and group.shard == row.shard
                ]
                if prompts:
                    self._put_off(prompts[-1])
                else:
                    youngest = [
                        other for other in self._rows if other.held and other.shard == row.shard
                    ][-1]
                    self._pool.save(youngest, on_device=False)
        return False

    def _decode(self) -> None:
        """One dispatch for the rows that are ready, oldest first; messages that ended go to the
        worker threads.
        """
        chosen: list[list[_Row]] = [[] for _ in range(self.engine.shards)]
        for row in list(self._rows):
            if self._ready(row) and len(chosen[row.shard]) < self._config.slots:
                steps = min(self._config.decode_steps, self._budget(row))
                if self._have_pages(row, len(row.tokens) - 1 + steps):
                    chosen[row.shard].append(row)
        if not any(chosen):
            return
        start = time.perf_counter()
        inputs = decode_input(
            self.engine,
            self._pool,
            chosen,
            [[self._budget(row) for row in rows] for rows in chosen],
        )
        tokens, logprobs, counts = self._pool.decode(self._model, inputs)
        self.stats.decode_s += time.perf_counter() - start
        self.stats.slot_steps += len(counts) * int(counts.max())
        self.stats.row_steps += int(counts.sum())
        for place, row in self._places(chosen):
            count = counts[place]
            self._take(row, tokens[place, :count].tolist(), logprobs[place, :count].tolist())

    def _places(self, chosen: list[list[_Row]]) -> Iterator[tuple[int, _Row]]:
        for shard, rows in enumerate(chosen):
            for place, row in enumerate(rows):
                yield shard * self._config.slots + place, row

    @staticmethod
    def _budget(row: _Row) -> int:
        return row.episode.budget - len(row.message)

    def _take(self, row: _Row, tokens: list[int], logprobs: list[float]) -> None:
        """Append what was sampled; cut it where the protocol's rule on text ends the message."""
        before = len(row.message)
        message = row.message + tokens
        end = stop_length(row.episode.protocol, self._tokenizer, message)
        over = end is not None or len(message) == row.episode.budget
        row.message = message[:end]
        fresh = len(row.message) - before
        row.logprobs = (row.logprobs + logprobs)[: len(row.message)]
        row.versions += [self.version] * fresh
        row.tokens += row.message[before:]
        row.cached += fresh
        self.stats.sampled_tokens += fresh
        if over:
            row.waiting = True
            self._stepping[
                self._executor.submit(row.episode.step, row.message, row.logprobs, row.versions)
            ] = row
