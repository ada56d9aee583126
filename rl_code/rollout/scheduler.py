"""Continuous batching: decides in every round which episodes prefill, decode, or wait for a tool.

Groups of episodes are handed in at any time, and come back when all their episodes are graded. One
round of the host loop does this:

  1. It takes what tools have answered, and may wait for some more of them.
  2. It opens groups while there are pages for them.
  3. It prefills a chunk of every row that has new tokens; a few chunks while many slots are free.
  4. It decodes one dispatch of all rows that are ready.

So neither a slow tool nor a long prompt holds up the other episodes. The prompt of a group is
prefilled once, and its episodes share the pages. An episode keeps its pages from turn to turn. When
pages run out, those of the youngest episode go to host memory and come back later: nothing fails,
and nothing is sampled twice. Prompts may be prefilled on devices of their own, from which their
pages are handed over, or by another process (``prefill_wire``).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import jax

from models.adapter_rows import num_adapters
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from models.unstacked import Unstacked
from rl_code.environment.episode import Episode
from rl_code.environment.frames import Elsewhere
from rl_code.rollout.admission import Admission
from rl_code.rollout.contexts import with_choices, with_keys
from rl_code.rollout.decoder import Decoder
from rl_code.rollout.disk_pages import DiskPages
from rl_code.rollout.drafts import DraftTexts
from rl_code.rollout.engine import Engine
from rl_code.rollout.forks import ForksConfig, fork, group_of
from rl_code.rollout.own_way import OwnWay
from rl_code.rollout.page_pool import PagePool
from rl_code.rollout.prefill_client import PrefillClient
from rl_code.rollout.rows import OpenGroup, Row
from rl_code.rollout.stats import RolloutStats
from rl_code.types import Group, Task, Trajectory

# Most prefills in a row while any row can decode and a quarter of the slots is free.
_PREFILLS = 4
# The longest wait for the pages of a prompt before tools are asked again.
_PAGES_S = 0.02


class RolloutTimeout(RuntimeError):
    """No worker came back within the deadline; names the episodes that were waited for."""


class Scheduler:
    """Drives episodes through an engine. It owns the worker threads and the caches, which live as
    long as it does.

    Args:
      workers: threads in which episodes carry out calls and are graded.
      worker_deadline_s: seconds after which ``step`` raises RolloutTimeout if nothing can decode
        and no worker comes back.
      gather_s: seconds that a round waits for tools, at most, while more episodes wait for them
        than can go on. A dispatch of few rows costs almost as much as one of many.
      prefiller: an engine of the same config that prefills prompts on other devices. None to
        prefill on the devices that decode.
      remote: another process that prefills prompts; what it does not is prefilled here. None for
        none.
      disk: keeps the keys of documents in files, for schedulers to come too. None for none.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        workers: int,
        worker_deadline_s: float,
        gather_s: float = 0.0,
        prefiller: Engine | None = None,
        remote: PrefillClient | None = None,
        disk: DiskPages | None = None,
    ):
        self.engine = engine
        self._config = engine.config
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="episode")
        self._timeout_s = worker_deadline_s
        self._gather_s = gather_s
        self._pool = PagePool(engine, disk)
        self._prompt_pool = PagePool(prefiller) if prefiller else self._pool
        episodes = engine.shards * engine.config.episodes
        self._remote = remote
        self._open = Admission(self._pool, self._prompt_pool, episodes, remote)
        self._texts = DraftTexts(engine.config)
        self._decoder = Decoder(engine, self._pool, self._open, self._texts, tokenizer)
        # The model that was loaded, and its copies on the devices that decode and that prefill.
        # It is not kept alive: the engines sample from copies of its layers.
        self._given: weakref.ref[Transformer] | None = None
        self._model: Unstacked | None = None
        self._prompt_model: Unstacked | None = None
        self.version: int | None = None
        # Called with the open rows before each dispatch to the devices. It may load other weights
        # and set ``Row.most``, as is done to sample a trajectory again (``again``).
        self.before_dispatch: Callable[[Sequence[Row]], None] = lambda rows: None
        self._reset()

    def close(self) -> None:
        """Waits for running tools; the scheduler cannot be used afterwards."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._reset()

    def load(self, model: Transformer, version: int, *, recompute: bool = False) -> None:
        """Samples with these weights from the next dispatch on, in the middle of messages too.

        recompute: whether episodes in progress compute their keys anew. False keeps the keys of
        older weights. New groups share prompts only with groups that the same weights (the same
        object) prefilled.

        Raises ValueError where the weights lack an adapter of a group that is not finished.
        """
        if self._given is None or self._given() is not model:
            for group in self._groups:
                _check_adapter(model, group.adapter)
            self._given = weakref.ref(model)
            # the old copies go before the new ones come
            self._model = self._prompt_model = None
            # weights that the learner cuts over ``fsdp``
            cut = self.engine.mesh.shape["fsdp"] > 1
            placed = self._pool.place(model) if cut else model
            self._open.new_weights(version, recompute=recompute)
            self._pool.identify(placed)
            self._model = self.engine.own(placed)
            self._prompt_model = self._model
            if self._prompt_pool is not self._pool:
                prompt = self._prompt_pool
                self._prompt_model = prompt.engine.own(prompt.place(model))
        self.version = version

    @property
    def weights(self) -> Unstacked | None:
        """The weights that sample; None before any are loaded."""
        return self._model

    def submit(
        self,
        task: Task,
        make_episode: Callable[[Task, int, int], Episode],
        *,
        group: int,
        group_size: int,
        key: Sequence[int],
        tag: Any = None,
        adapter: int = -1,
        owner: str = "",
        ways: Sequence[OwnWay] | None = None,
        forks: ForksConfig | None = None,
        on_finished: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> None:
        """Hands in ``group_size`` episodes of a task; ``step`` returns their group, with ``tag``,
        when it is finished.

        The random stream of a token depends only on (key, group, index, position).

        Args:
          make_episode: (task, group, index) -> a new episode.
          key: the two words of a random key.
          adapter: which adapter of weights that have several (``models.adapter_rows``) plays the
            group, counted from 0; -1 for none of them. Groups of all of them decode together.
          owner: whom the tokens belong to. Pages of prompts and documents are shared with groups
            of the same owner alone.
          ways: how the tokens of each episode are drawn; None for as the engine's config says.
          forks: where the episodes are forked. The group is finished with all its continuations
            (``Group.continuations``). None for no forks.
          on_finished: called with each finished trajectory that is no continuation, in the thread
            that calls ``step``.

        Raises ValueError for a prompt that is longer than the engine's prompt_length, and for an
        adapter that the weights do not have.
        """
        if self._model is not None:
            _check_adapter(self._model, adapter)
        rows = [Row(episode=make_episode(task, group, index)) for index in range(group_size)]
        own = OpenGroup(tag=tag, key=tuple(key), task=task, rows=rows, unopened=rows[::-1])
        own.on_finished = on_finished
        own.forks = forks
        own.adapter, own.owner = adapter, owner
        for row in rows:
            row.group = own
            row.key = own.key
            row.adapter, row.owner = adapter, owner
        for row, way in zip(rows, ways or (), strict=ways is not None):
            row.own = way
        if all(row.episode.starts_at_once for row in rows):
            prompts = [row.episode.start() for row in rows]
            if len(prompts[0]) > self._config.prompt_length:
                for row in rows:
                    row.episode.close()
                raise ValueError(
                    f"task {task.id}: its prompt of {len(prompts[0])} tokens is longer than "
                    f"prompt_length={self._config.prompt_length}"
                )
            self._open.add(own, prompts)
        else:
            self._unstarted.append(own)
        self._groups[own] = None

    def resume(
        self, episode: Episode, before: Sequence[Row], *, key: Sequence[int], tag: Any = None
    ) -> None:
        """Hands in one episode that is forked already; ``step`` returns a group that has it as its
        only continuation.

        before: as for ``forks.group_of``. key: of ``submit``.
        """
        own = OpenGroup(tag=tag, key=tuple(key), task=episode.task)
        self._continue(group_of([episode], own, before))
        self._groups[own] = None

    @property
    def groups(self) -> int:
        """Groups handed in and not finished."""
        return len(self._groups)

    @property
    def room(self) -> int:
        """Episodes that could be handed in and opened at once, if there were pages for them."""
        return self._room - sum(len(group.rows) for group in self._unstarted)

    def step(self) -> list[tuple[Any, Group]]:
        """One round; returns (tag, group) for each group that was finished. If there is nothing
        else to do, it waits for a tool.
        """
        start = time.perf_counter()
        self._start()
        finished = self._gather()
        self._open.receive()
        self._open.reopen()
        self._open.open()
        self._prefill()
        if any(row.ready for row in self._open.rows):
            self._decode()
        elif not finished and not self._open.prefill_due:
            if self._open.asked:
                self._await_pages()
            elif self._worked_on:
                self._wait()
        self._open.stats.total_s += time.perf_counter() - start
        return finished

    def take_stats(self) -> RolloutStats:
        """The counts since the last call."""
        # The learner's thread may ask while the actor's thread counts. The object is exchanged as a
        # whole, so the counts of an answer belong together.
        stats = self._open.stats
        self._open.stats = RolloutStats()
        for pool in {self._pool, self._prompt_pool}:
            stats = pool.add_stats(stats)
        return stats

    def give_up(self, tag: Any) -> list[Row]:
        """Gives up the groups that were handed in with a tag. Their pages are free at once, and
        ``step`` will not return them.

        Returns the rows whose message was not over, with what was sampled of it. Messages that are
        over are still carried out.
        """
        cut_off = []
        for group in [group for group in self._groups if group.tag == tag]:
            del self._groups[group]
            self._unstarted = [one for one in self._unstarted if one is not group]
            for future in self._starting.pop(group, ()):
                future.cancel()
            done = group.trajectories.keys() | group.continuations.keys()
            rows = [row for part in group.whole for row in part.rows]
            over = [row for row in rows if row.episode.index in done]
            for futures in (self._stepping, self._finishing):
                for future, row in list(futures.items()):
                    if row.group in group.whole:
                        del futures[future]
                        over.append(row)
            for part in group.whole:
                self._open.withdraw(part)
            cut_off += [row for row in rows if row not in over]
            group.let_go()
        return cut_off

    def abort(self) -> None:
        """Gives up every episode and forgets the caches."""
        for future in self._worked_on:
            future.cancel()
        for group in self._groups:
            for row in [row for part in group.whole for row in part.rows]:
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
        adapters: Sequence[int] | None = None,
        on_finished: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> tuple[list[Group], RolloutStats]:
        """Plays ``group_size`` episodes of every task and returns the groups in the order of
        ``tasks``.

        Groups are numbered from ``first_group``; arguments as ``load`` and ``submit`` take them.
        adapters: of each task; None for none.
        """
        self.load(model, version)
        self.take_stats()
        words = jax.random.key_data(key).tolist()
        groups: dict[int, Group] = {}
        try:
            chosen = [-1] * len(tasks) if adapters is None else adapters
            each = zip(tasks, chosen, strict=True)
            for number, (task, adapter) in enumerate(each, first_group):
                way = dict(
                    group=number,
                    group_size=group_size,
                    key=words,
                    tag=number,
                    adapter=adapter,
                    on_finished=on_finished,
                )
                self.submit(task, make_episode, **way)
            while self.groups:
                groups |= self.step()
        except BaseException:  # Ctrl-C too: no sandbox and no program stays open behind it
            self.abort()
            raise
        return [
            groups[number] for number in range(first_group, first_group + len(tasks))
        ], self.take_stats()

    # --- A round ----------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._groups: dict[OpenGroup, None] = {}  # not finished
        # Groups whose episodes have something to start, a program of their own say, oldest first.
        self._unstarted: list[OpenGroup] = []
        # Groups whose episodes wait for their first request, with what gives their prompts.
        self._starting: dict[OpenGroup, list[Future]] = {}
        self._stepping: dict[Future, Row] = {}
        self._finishing: dict[Future, Row] = {}
        self._open.clear()
        self._open.stats = RolloutStats()

    @property
    def _worked_on(self) -> list[Future]:
        """Work of the worker threads that must be done before a group may start."""
        starting = [future for futures in self._starting.values() for future in futures]
        undone = [future for future in starting if not future.done()]
        return [*self._stepping, *self._finishing, *undone]

    @property
    def _room(self) -> int:
        """Episodes that could be opened beside those that are open, or are being started."""
        return self._open.room - sum(len(group.rows) for group in self._starting)

    def _start(self) -> None:
        """Starts the episodes of groups that can be opened as soon as they have asked: each may
        hold a process, so no more of them are started than may be open.
        """
        while self._unstarted:
            group = self._unstarted[0]
            # one with more episodes than may be open is started alone
            alone = len(self._groups) == len(self._unstarted)
            if self._room < len(group.rows) and not alone:
                return
            del self._unstarted[0]
            self._starting[group] = [self._executor.submit(row.episode.start) for row in group.rows]

    def _await_pages(self) -> None:
        """Waits a moment for the pages of a prompt."""
        start = time.perf_counter()
        self._remote.wait(_PAGES_S)
        self._open.stats.pages_wait_s += time.perf_counter() - start

    def _wait(self) -> None:
        start = time.perf_counter()
        done, _ = wait(
            self._worked_on,
            timeout=self._timeout_s,
            return_when=FIRST_COMPLETED,
        )
        self._open.stats.wait_s += time.perf_counter() - start
        if not done:
            rows = [*self._stepping.values(), *self._finishing.values()]
            rows += [row for group in self._starting for row in group.rows]
            waiting = sorted(row.episode.task.id for row in rows)
            raise RolloutTimeout(
                f"no worker came back within worker_deadline_s={self._timeout_s:g}; "
                f"waiting for tasks {waiting}"
            )

    def _gather(self) -> list[tuple[Any, Group]]:
        """Takes what the worker threads have finished, as ``_collect``, and what they finish while
        few episodes can go on.
        """
        finished = self._collect()
        start = time.perf_counter()
        end = start + self._gather_s
        while self._few_go_on() and (left := end - time.perf_counter()) > 0:
            wait(self._stepping, timeout=left, return_when=FIRST_COMPLETED)
            finished += self._collect()
        self._open.stats.gather_s += time.perf_counter() - start
        return finished

    def _few_go_on(self) -> bool:
        """True if more open episodes wait for tools than for the engine."""
        go_on = sum(not row.waiting for row in self._open.rows)
        slots = self.engine.shards * self._config.slots
        return go_on < min(slots, len(self._stepping))

    def _collect(self) -> list[tuple[Any, Group]]:
        """Takes what the worker threads have finished; returns (tag, group) for each group that is
        finished with it.
        """
        for group, futures in list(self._starting.items()):
            if all(future.done() for future in futures):
                del self._starting[group]
                self._open.add(group, [future.result() for future in futures])
        for future in [future for future in self._stepping if future.done()]:
            row = self._stepping.pop(future)
            following, episodes = future.result()
            row = self._go_on(row, following)
            if episodes:
                self._continue(group_of(episodes, row.group, row.contexts or [row]))
        finished = []
        for future in [future for future in self._finishing if future.done()]:
            group = self._record(self._finishing.pop(future), future.result())
            if group.finished:
                del self._groups[group]
                parts = group.forks is not None or group.parts
                whole = Group(
                    group.task,
                    _in_order(group.trajectories),
                    _in_order(group.continuations) if parts else None,
                )
                finished.append((group.tag, whole))
                group.let_go()
        return finished

    def _step(self, row: Row) -> tuple[list[int] | Elsewhere | None, list[Episode]]:
        """Carries out a message of an episode, in a worker thread, and forks the episode where the
        group's settings say so. Returns what follows, as ``Episode.step`` does, and the forks.
        """
        episode = row.episode
        following = episode.step(row.message, row.logprobs, row.versions)
        forks = row.group.forks
        if forks is None or not episode.forkable:
            return following, []
        turn = episode.border.turn
        if not forks.chooses(episode.index, turn):
            return following, []
        return following, fork(episode, forks.indices(episode.index, turn, len(row.group.rows)))

    def _continue(self, group: OpenGroup) -> None:
        """Continuations of an episode wait for pages."""
        prompts = [row.episode.at_work[1] for row in group.rows]
        # Documents must not be cut, and behind the task's own prompt none need be.
        whole = self._config.longest_document is None
        self._open.add(group, prompts, None if whole else group.rows[0].episode.prompt_length)

    def _go_on(self, row: Row, following: list[int] | Elsewhere | None) -> Row:
        """Goes on with an episode after a message; returns the row of the context that is then at
        work. One that is over gives up its pages, and is then graded in a worker thread.

        following: as ``Episode.step`` returns it.
        """
        row.waiting = False
        if following is None:
            self._open.close(row)
            self._texts.keep(row)
            self._finishing[self._executor.submit(row.episode.finish)] = row
            return row
        if isinstance(following, Elsewhere):
            row = self._open.move(row, following)
            following = following.tokens
        row.add(following, row.kinds())
        # New lists: the worker thread's episode may have kept the old ones.
        row.message = []
        row.logprobs = []
        row.versions = []
        self._open.stats.needed_tokens += len(row.tokens) - 1
        self._open.stats.found_in_turns += row.cached
        return row

    def _record(self, row: Row, trajectory: Trajectory) -> OpenGroup:
        """Keeps the trajectory of an episode with what the sampler knows of it; returns its group,
        of a continuation the one that it belongs to.
        """
        group = row.group
        contexts = row.contexts or [row]
        # A tree that a program of others made has one row. It cannot be sampled again, since the
        # program decided what was asked, so it needs no keys.
        for context in contexts if len(contexts) == len(trajectory.contexts) else ():
            trajectory = with_keys(trajectory, context.keys, context.context)
            trajectory = with_choices(trajectory, context.choices, context.context)
        if group.parent is not None:
            group.parent.continuations[row.episode.index] = trajectory
            return group.parent
        group.trajectories[row.episode.index] = trajectory
        group.on_finished(trajectory)
        return group

    def _prefill(self) -> None:
        """Prefills a chunk of every row and prompt that has tokens to prefill, and further chunks
        while few rows can decode: a dispatch that decodes few rows costs almost as much as a full
        one.
        """
        start = time.perf_counter()
        dispatches = 0
        while self._open.prefill_due:
            self.before_dispatch(self._open.rows)
            prompts = [group for group in self._open.prompts if group.missing]
            rows = [row for row in self._open.rows if row.to_prefill]
            # A row that gets pages may take them from a younger row or prompt on these lists, so
            # ``held`` is asked again for each.
            rows = [row for row in rows if row.held and self._open.have_pages(row, len(row.tokens))]
            prompts = [group for group in prompts if group.held]
            if self._prompt_pool is self._pool:
                count = self._pool.prefill(self._model, [*rows, *prompts])
            else:
                count = self._pool.prefill(self._model, rows)
                count += self._prompt_pool.prefill(self._prompt_model, prompts)
            self._open.stats.prefilled_tokens += count
            self._open.open()
            ready = sum(row.ready for row in self._open.rows)
            dispatches = dispatches + 1
            full = 4 * ready >= 3 * self.engine.shards * self._config.slots
            if full or (ready and dispatches == _PREFILLS):
                break
        if dispatches and self._prompt_pool is self._pool:
            # Otherwise the decoding that follows would wait for it, and be charged its time.
            self._pool.wait()
        self._open.stats.prefill_s += time.perf_counter() - start

    def _decode(self) -> None:
        """Decodes the rows that are ready. Messages that have ended go to the worker threads."""
        for kind in self._decoder.kinds():
            self.before_dispatch(self._open.rows)
            for row in self._decoder.dispatch(self._model, self.version, kind):
                # From here on the worker thread owns the episode. This thread looks at the row
                # again when the future is done (``_collect``).
                row.waiting = True
                self._stepping[self._executor.submit(self._step, row)] = row


def _in_order(trajectories: dict[int, Trajectory]) -> tuple[Trajectory, ...]:
    """The trajectories in order of their index."""
    return tuple(trajectories[index] for index in sorted(trajectories))


def _check_adapter(model: Transformer, adapter: int) -> None:
    """Raises ValueError where weights do not have this adapter; -1 for none of several."""
    count = num_adapters(model)
    if not -1 <= adapter < count:
        raise ValueError(
            f"{adapter=} must be -1 or one of the {count} adapters of the weights, counted from 0"
        )
