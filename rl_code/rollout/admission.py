"""Decides which groups and episodes hold pages: which are opened next, and which give way when
pages run out.

A group waits in the queue until its prompt gets pages. Then it stands among the prompts until all
its episodes are open. An open episode is a row until it is over. Older ones come first: when an
older one needs more pages, the youngest gives up its own. So the oldest always gets to its end.

Where another process prefills prompts, it is asked before a prompt gets pages. The group holds none
meanwhile, and comes back to the front of the queue with what the pages are to hold, or to be
prefilled here.
"""

from __future__ import annotations

from attention.cache.pages import OutOfPages
from rl_code.rollout.open_rows import OpenRows
from rl_code.rollout.page_pool import PagePool
from rl_code.rollout.prefill_client import PrefillClient
from rl_code.rollout.rows import OpenGroup, Row
from rl_code.rollout.spans import ContextRuns


class Admission(OpenRows):
    """Gives pages to groups and rows, and takes them back."""

    def __init__(
        self,
        pool: PagePool,
        prompt_pool: PagePool,
        episodes: int,
        remote: PrefillClient | None = None,
    ):
        """
        pool: the pages of the engine that decodes. prompt_pool: the pages of the engine that
        prefills prompts, which may be the same pool. episodes: the most that are open at once.
        remote: another process that prefills prompts; None for none.
        """
        self._remote = remote
        self._pool = pool
        self._prompt_pool = prompt_pool
        super().__init__(episodes, pool.engine.config.prompt_length)

    def clear(self) -> None:
        """Forgets every group and row, and what the pools hold."""
        super().clear()
        # groups whose prompt another process prefills, by the number of the request, oldest first
        self.asked: dict[int, OpenGroup] = {}
        # groups with episodes that are not open yet, oldest first
        self.prompts: list[OpenGroup] = []
        self._pool.clear()
        self._prompt_pool.clear()
        if self._remote is not None:
            self._remote.close()

    @property
    def room(self) -> int:
        """Episodes that could be handed in and opened at once, if there were pages for them."""
        asked = (*self.asked.values(), *self.prompts)
        return super().room - sum(len(group.unopened) for group in asked)

    @property
    def prefill_due(self) -> bool:
        """True if a prompt or a row with pages has tokens to prefill."""
        return any(group.missing for group in self.prompts) or any(
            row.to_prefill for row in self.rows
        )

    def new_weights(self, version: int, *, recompute: bool) -> None:
        """From now on, prompts are shared only with prompts that the new weights prefilled.

        version: of the new weights. recompute: whether open episodes compute their keys anew, too.
        """
        self._version = version
        self._pool.new_weights()
        self._prompt_pool.new_weights()
        for row in [each for one in self.rows for each in one.contexts or [one]]:
            if row.over and not recompute:
                continue  # its keys are gone
            if recompute:
                self._pool.forget(row)
                row.keys = []
            else:
                self._pool.drop_ahead(row)
            row.keys.append((row.cached, version))
        # What another process computes, or has computed, has the old weights.
        for group in self.queue:
            if group.saved is not None:
                self._pool.forget(group)
        for number in reversed(list(self.asked)):
            self._remote.drop(number)
            self.queue.appendleft(self.asked.pop(number))
        # In reverse, since each goes to the front of the queue: the oldest ends up first. A prompt
        # that is not whole yet begins anew in any case, so that one version computes all of it.
        for group in reversed(list(self.prompts)):
            if recompute or group.missing:
                self._put_off(group)

    def receive(self) -> None:
        """Takes what the other process has prefilled, and the prompts that it did not."""
        if self._remote is None or not self.asked:
            return
        arrived = self._remote.collect()
        # In reverse, as in ``new_weights``.
        for number, blocks in sorted(arrived, key=lambda pair: pair[0], reverse=True):
            group = self.asked.pop(number)
            if blocks is None:
                group.by_itself = True
                self.stats.prompts_by_itself += 1
            else:
                self._pool.receive(group, blocks)
                self.stats.received_pages += sum(len(block[0]) for block in blocks)
                self.stats.received_tokens += len(group.tokens)
                self.stats.received_bytes += sum(x.nbytes for block in blocks for x in block)
            self.queue.appendleft(group)

    def close(self, row: Row) -> None:
        """Takes the pages of an episode that is over."""
        self._pool.release(row)
        super().close(row)
        for context in row.contexts:
            context.saved = None

    def withdraw(self, group: OpenGroup) -> None:
        """Takes the pages of a group that is given up, of its prompt and of its open episodes."""
        for number in [number for number, other in self.asked.items() if other is group]:
            self._remote.drop(number)
            del self.asked[number]
        if group in self.prompts:
            self.prompts.remove(group)
            (self._pool if group.decodable else self._prompt_pool).release(group)
        super().withdraw(group)

    def _runs(self) -> ContextRuns | None:
        return self._pool.runs()

    def _forget(self, row: Row) -> None:
        self._pool.forget(row)

    def _set_aside(self, row: Row) -> None:
        if row.held:
            self._pool.save(row, on_device=False)

    def reopen(self) -> None:
        """Gives pages to open episodes that hold none, oldest first: those that were pre-empted,
        and those whose keys are computed anew.
        """
        for row in self.rows:
            if not row.held and not row.waiting:
                try:
                    self._pool.restore(row)
                except OutOfPages:
                    return  # a younger episode must not get ahead, even if it needs fewer pages

    def open(self) -> None:
        """Opens episodes of prompts that are in the cache, then prompts, while there are pages and
        room for them.
        """
        if not all(row.held or row.waiting for row in self.rows):
            return  # open episodes without pages come first
        while True:
            try:
                self._open_while_pages_last()
                return
            except OutOfPages:
                if self.rows or any(group.missing for group in self.prompts):
                    return  # these make progress, and give pages back when they are done
                if len(self.prompts) < 2:
                    raise
                # Nothing is at work: only prompts that are prefilled hold pages, and nobody will
                # give any back. So the youngest has to give way.
                self._put_off(self.prompts[-1])

    def _open_while_pages_last(self) -> None:
        """Opens episodes, then prompts. Raises OutOfPages where pages end; what was opened before
        stays open.
        """
        while self._open_once():
            pass  # prompts came whole, so their episodes can be opened too

    def _open_once(self) -> bool:
        """Opens the episodes of prompts in the cache, then prompts; returns whether any of these
        came from another process. Raises OutOfPages.
        """
        room = self._episodes - len(self.rows)
        for group in [group for group in self.prompts if not group.missing]:
            if not group.decodable:
                self._hand_over(group)
            while group.unopened and room > 0:
                # The fork may raise OutOfPages, so the row leaves ``unopened`` only after it.
                self._pool.fork(group, group.unopened[-1])
                first = len(group.unopened) == len(group.rows)
                row = group.unopened.pop()
                row.keys = [(0, group.version), (row.cached, self._version)]
                self.rows.append(row)
                self.stats.needed_tokens += len(group.tokens)
                self.stats.found_in_tasks += group.found if first else 0
                self.stats.found_in_groups += 0 if first else len(group.tokens)
                room -= 1
            if not group.unopened:
                self._pool.release(group)
                self.prompts.remove(group)
        # A prompt holds pages while it waits. So another one is prefilled only if there is room
        # left beside the episodes of the prompts that are waiting already.
        waiting = (*self.prompts, *self.asked.values())
        room -= sum(len(group.unopened) for group in waiting)
        came = False
        while self.queue and room > 0:
            group = self.queue[0]
            room -= len(group.unopened)
            if group.saved is None and self._ask(group):
                self.queue.popleft()
                continue
            group.version = self._version
            if group.saved is not None:
                self._pool.restore(group)
                group.found, group.decodable, came = 0, True, True
            else:
                self._prompt_pool.open(group)
                group.found = group.cached if group.found is None else group.found
                group.decodable = self._prompt_pool is self._pool
            self.prompts.append(self.queue.popleft())
        return came

    def _ask(self, group: OpenGroup) -> bool:
        """Has another process prefill a prompt; False if it is to be prefilled here, as where the
        prompt has an adapter of several, which that process has not.
        """
        if self._remote is None or group.by_itself or group.adapter >= 0:
            return False
        self.stats.prompts_asked += 1
        number = self._remote.ask(group.tokens, group.kinds(), self._version)
        if number is None:
            group.by_itself = True
            self.stats.prompts_by_itself += 1
            return False
        self.asked[number] = group
        return True

    def _hand_over(self, group: OpenGroup) -> None:
        """Brings a prompt's pages from the devices that prefilled it to those that decode. Raises
        OutOfPages.
        """
        if group.saved is None:
            self._prompt_pool.save(group, on_device=True)
        self._pool.restore(group)
        group.decodable = True

    def _put_off(self, group: OpenGroup) -> None:
        """Takes a prompt's pages and puts its group back at the front of the queue. The prompt is
        prefilled again later.
        """
        self.prompts.remove(group)
        (self._pool if group.decodable else self._prompt_pool).forget(group)
        self.queue.appendleft(group)

    def have_pages(self, row: Row, length: int) -> bool:
        """Gives a row pages for ``length`` tokens, if need be by taking those of younger ones.

        Prompts give way first, the youngest first, then rows. False if the row itself was the
        youngest and lost its pages.
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
                    self._pool.save(self._gives_way(holders, row), on_device=False)
        return False

    def _gives_way(self, holders: list[Row], row: Row) -> Row:
        """The row that loses its pages to ``row``: the youngest. With pages on the
        host it is a younger one that waits for a tool, if there is any, since it needs none now.
        """
        if self._pool.engine.config.host_pages_mb is not None:
            younger = self.rows[self.rows.index(row) + 1 :]
            waiting = [other for other in holders if other.waiting and other in younger]
            if waiting:
                return waiting[-1]
        return holders[-1]
