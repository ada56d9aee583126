"""Episodes of groups, played in turns with whatever engine samples their messages.

Groups of episodes are handed in at any time, and come back when all their episodes are graded.
Messages are carried out, and episodes graded, by worker threads. So a slow tool does not hold up
the other episodes. An engine adds its rounds (``Playing.step``): which episodes are opened, and how
their messages are sampled.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import jax

from models.transformer import Transformer
from models.unstacked import Unstacked
from rl_code.environment.episode import Episode
from rl_code.environment.frames import Elsewhere
from rl_code.rollout.engine_config import EngineConfig
from rl_code.rollout.forks import fork, group_of
from rl_code.rollout.forks_config import ForksConfig
from rl_code.rollout.open_rows import OpenRows
from rl_code.rollout.own_way import OwnWay
from rl_code.rollout.rows import OpenGroup, Row
from rl_code.rollout.stats import RolloutStats
from rl_code.types import Group, Task, Trajectory


class RolloutTimeout(RuntimeError):
    """No worker came back within the deadline; names the episodes that were waited for."""


class Playing[Rows: OpenRows](abc.ABC):
    """Drives episodes through an engine. It owns the worker threads, which live as long as it does.

    Args:
      config: shapes of the engine; of them only prompt_length and longest_document are read here.
      rows: the open episodes.
      slots: rows that the engine samples together.
      workers: threads in which episodes carry out calls and are graded.
      worker_deadline_s: seconds after which ``step`` raises RolloutTimeout if nothing can be
        sampled and no worker comes back.
      gather_s: seconds that a round waits for tools, at most, while more episodes wait for them
        than can go on. A dispatch of few rows costs almost as much as one of many.
    """

    def __init__(
        self,
        config: EngineConfig,
        rows: Rows,
        *,
        slots: int,
        workers: int,
        worker_deadline_s: float,
        gather_s: float = 0.0,
    ):
        self.config = config
        self.slots = slots
        self._open = rows
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="episode")
        self._timeout_s = worker_deadline_s
        self._gather_s = gather_s
        # of the weights that sample; None before any are loaded
        self.version: int | None = None
        self._reset()

    def close(self) -> None:
        """Waits for running tools; it cannot be used afterwards."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._reset()

    @abc.abstractmethod
    def load(self, model: Transformer, version: int, *, recompute: bool = False) -> None:
        """Samples with these weights from now on, in the middle of messages too.

        recompute: whether episodes in progress compute their keys anew. False keeps the keys of
        older weights. New groups share prompts only with groups that the same weights prefilled.
        """

    @property
    @abc.abstractmethod
    def weights(self) -> Unstacked | None:
        """The weights that sample, on devices of this process; None where there are none."""

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

        Raises ValueError for a prompt that is longer than the engine's prompt_length, for an
        adapter that the weights do not have, and for ways that the engine does not.
        """
        self._check(adapter, ways)
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
            if len(prompts[0]) > self.config.prompt_length:
                for row in rows:
                    row.episode.close()
                raise ValueError(
                    f"task {task.id}: its prompt of {len(prompts[0])} tokens is longer than "
                    f"prompt_length={self.config.prompt_length}"
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

    @abc.abstractmethod
    def step(self) -> list[tuple[Any, Group]]:
        """One round; returns (tag, group) for each group that was finished. If there is nothing
        else to do, it waits for a tool.
        """

    def take_stats(self) -> RolloutStats:
        """The counts since the last call."""
        # The learner's thread may ask while the actor's thread counts. The object is exchanged as a
        # whole, so the counts of an answer belong together.
        stats = self._open.stats
        self._open.stats = RolloutStats()
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
        """Gives up every episode."""
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

    # --- What engines differ in -------------------------------------------------------------------

    @abc.abstractmethod
    def _check(self, adapter: int, ways: Sequence[OwnWay] | None) -> None:
        """Raises ValueError where the engine has no such adapter, or cannot draw in these ways."""

    def _noted(self, trajectory: Trajectory, rows: Sequence[Row]) -> Trajectory:
        """A trajectory with what the sampler knows of it. rows: of its contexts, in order."""
        return trajectory

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
        return go_on < min(self.slots, len(self._stepping))

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
        whole = self.config.longest_document is None
        self._open.add(group, prompts, None if whole else group.rows[0].episode.prompt_length)

    def _go_on(self, row: Row, following: list[int] | Elsewhere | None) -> Row:
        """Goes on with an episode after a message; returns the row of the context that is then at
        work. One that is over gives up its pages, and is then graded in a worker thread.

        following: as ``Episode.step`` returns it.
        """
        row.waiting = False
        if following is None:
            self._open.close(row)
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
        if len(contexts) == len(trajectory.contexts):
            trajectory = self._noted(trajectory, contexts)
        if group.parent is not None:
            group.parent.continuations[row.episode.index] = trajectory
            return group.parent
        group.trajectories[row.episode.index] = trajectory
        group.on_finished(trajectory)
        return group


def _in_order(trajectories: dict[int, Trajectory]) -> tuple[Trajectory, ...]:
    """The trajectories in order of their index."""
    return tuple(trajectories[index] for index in sorted(trajectories))
