"""Which groups and episodes have pages: who is opened next, and who gives way when pages run out.

A group waits in the queue until its prompt has pages, then among the prompts until all its episodes
are open, and an open episode is a row until it is over. Older ones come first: the youngest give
their pages to older ones that need more, so that something always gets to its end.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from attention.cache.pages import OutOfPages
from rl_code.environment.episode import Episode
from rl_code.rollout.page_pool import PagePool, Span
from rl_code.rollout.stats import RolloutStats
from rl_code.types import Task, Trajectory


@dataclasses.dataclass(eq=False)
class Row(Span):
    """An episode and where it stands; ``tokens`` are all that are known of it."""

    episode: Episode | None = None
    # The group this episode belongs to.
    group: OpenGroup | None = None
    # The words of its random key.
    key: tuple[int, ...] = (0, 0)
    # Whether it waits for a tool.
    waiting: bool = False
    # What was sampled of the current message.
    message: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Whether it can decode: the last token goes through the decoder itself."""
        return not self.waiting and self.held and self.missing == 1

    @property
    def to_prefill(self) -> bool:
        """Whether it has pages and more than its last token is not in the cache."""
        return self.held and not self.waiting and self.missing > 1


@dataclasses.dataclass(eq=False)
class OpenGroup(Span):
    """A group that is not finished, and its prompt: ``tokens`` are the prompt but its last one,
    which each row feeds to the decoder itself.
    """

    tag: Any = None
    task: Task | None = None
    # Of all its episodes.
    rows: list[Row] = dataclasses.field(default_factory=list)
    # Those that have no pages yet; the prompt keeps its own until none is left.
    unopened: list[Row] = dataclasses.field(default_factory=list)
    # Whether the prompt's pages are where rows decode.
    decodable: bool = False
    # Prompt tokens that another group had computed; None before the first look.
    found: int | None = None
    # Of its finished episodes, by their index.
    trajectories: dict[int, Trajectory] = dataclasses.field(default_factory=dict)
    on_finished: Callable[[Trajectory], None] = lambda trajectory: None


class Admission:
    """Gives pages to groups and rows, and takes them back."""

    def __init__(self, pool: PagePool, prompt_pool: PagePool, episodes: int):
        """
        pool: where rows decode. prompt_pool: where prompts are prefilled; the same, or another.
        episodes: most that are open at once.
        """
        self._pool = pool
        self._prompt_pool = prompt_pool
        self._episodes = episodes
        self.stats = RolloutStats()
        self.clear()

    def clear(self) -> None:
        """Forgets every group and row, and what the pools hold."""
        # groups whose prompt has no pages yet
        self.queue: collections.deque[OpenGroup] = collections.deque()
        # groups with episodes that are not open yet, oldest first
        self.prompts: list[OpenGroup] = []
        # open episodes, oldest first
        self.rows: list[Row] = []
        self._pool.clear()
        self._prompt_pool.clear()

    @property
    def room(self) -> int:
        """Episodes that could be handed in and opened at once, if there were pages for them."""
        unopened = sum(len(group.unopened) for group in (*self.queue, *self.prompts))
        return self._episodes - len(self.rows) - unopened

    @property
    def prefill_due(self) -> bool:
        """Whether a prompt or a row with pages has tokens to prefill."""
        return any(group.missing for group in self.prompts) or any(
            row.to_prefill for row in self.rows
        )

    def new_weights(self, *, recompute: bool) -> None:
        """Prompts are shared with those of the new weights only; recompute: open episodes compute
        their keys anew.
        """
        self._pool.new_weights()
        self._prompt_pool.new_weights()
        if recompute:
            for row in self.rows:
                self._pool.forget(row)
            for group in reversed(list(self.prompts)):
                self._put_off(group)

    def close(self, row: Row) -> None:
        """Takes the pages of an episode that is over."""
        self._pool.release(row)
        self.rows.remove(row)

    def reopen(self) -> None:
        """Gives pages to episodes that have none, oldest first: pre-empted ones and those to be
        computed anew.
        """
        for row in self.rows:
            if not row.held and not row.waiting:
                try:
                    self._pool.restore(row)
                except OutOfPages:
                    return

    def open(self) -> None:
        """Opens episodes of prompts that are in the cache, then prompts, while there are pages and
        room for them.
        """
        if not all(row.held or row.waiting for row in self.rows):
            return  # those without pages come first
        while True:
            try:
                self._open_while_pages_last()
                return
            except OutOfPages:
                if self.rows or any(group.missing for group in self.prompts):
                    return  # who is at work gives pages back
                if len(self.prompts) < 2:
                    raise
                # only prompts that are done hold pages, so the youngest has to give way
                self._put_off(self.prompts[-1])

    def _open_while_pages_last(self) -> None:
        room = self._episodes - len(self.rows)
        for group in [group for group in self.prompts if not group.missing]:
            if not group.decodable:
                self._hand_over(group)
            while group.unopened and room > 0:
                self._pool.fork(group, group.unopened[-1])
                first = len(group.unopened) == len(group.rows)
                self.rows.append(group.unopened.pop())
                self.stats.needed_tokens += len(group.tokens)
                self.stats.found_in_tasks += group.found if first else 0
                self.stats.found_in_groups += 0 if first else len(group.tokens)
                room -= 1
            if not group.unopened:
                self._pool.release(group)
                self.prompts.remove(group)
        room -= sum(len(group.unopened) for group in self.prompts)
        while self.queue and room > 0:
            group = self.queue[0]
            self._prompt_pool.open(group)
            group.found = group.cached if group.found is None else group.found
            group.decodable = self._prompt_pool is self._pool
            self.prompts.append(self.queue.popleft())
            room -= len(group.unopened)

    def _hand_over(self, group: OpenGroup) -> None:
        """Brings a prompt's pages from the devices that prefilled it to those that decode. Raises
        OutOfPages.
        """
        if group.saved is None:
            self._prompt_pool.save(group, on_device=True)
        self._pool.restore(group)
        group.decodable = True

    def _put_off(self, group: OpenGroup) -> None:
        """Takes a prompt's pages; it is prefilled again later."""
        self.prompts.remove(group)
        (self._pool if group.decodable else self._prompt_pool).forget(group)
        self.queue.appendleft(group)

    def have_pages(self, row: Row, length: int) -> bool:
        """Gives a row pages for ``length`` tokens, taken from younger ones if need be; False when
        it lost its own.
        """
        while row.held:
            try:
                self._pool.reserve(row, length)
                return True
            except OutOfPages:
                self.stats.preempted += 1
                # pages of another shard are of no use to this row
                prompts = [
                    group for group in self.prompts if group.decodable and group.shard == row.shard
                ]
                if prompts:
                    self._put_off(prompts[-1])
                else:
                    holders = [
                        other for other in self.rows if other.held and other.shard == row.shard
                    ]
                    self._pool.save(holders[-1], on_device=False)
        return False
