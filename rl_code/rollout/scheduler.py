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
pages are handed over, or by another process (``prefill_wire``). The half that has nothing to do
with an engine is in ``playing``.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from models.adapter_rows import num_adapters
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from models.unstacked import Unstacked
from rl_code.environment.frames import Elsewhere
from rl_code.rollout.admission import Admission
from rl_code.rollout.contexts import with_choices, with_keys
from rl_code.rollout.decoder import Decoder
from rl_code.rollout.disk_pages import DiskPages
from rl_code.rollout.drafts import DraftTexts
from rl_code.rollout.engine import Engine
from rl_code.rollout.own_way import OwnWay
from rl_code.rollout.page_pool import PagePool
from rl_code.rollout.playing import Playing
from rl_code.rollout.prefill_client import PrefillClient
from rl_code.rollout.rows import Row
from rl_code.rollout.stats import RolloutStats
from rl_code.types import Group, Trajectory

# Most prefills in a row while any row can decode and a quarter of the slots is free.
_PREFILLS = 4
# The longest wait for the pages of a prompt before tools are asked again.
_PAGES_S = 0.02


class Scheduler(Playing[Admission]):
    """Drives episodes through this project's engine. It owns the worker threads and the caches,
    which live as long as it does.

    Args:
      workers, worker_deadline_s, gather_s: as of ``Playing``.
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
        self._pool = PagePool(engine, disk)
        self._prompt_pool = PagePool(prefiller) if prefiller else self._pool
        episodes = engine.shards * engine.config.episodes
        self._remote = remote
        rows = Admission(self._pool, self._prompt_pool, episodes, remote)
        self._texts = DraftTexts(engine.config)
        self._decoder = Decoder(engine, self._pool, rows, self._texts, tokenizer)
        # The model that was loaded, and its copies on the devices that decode and that prefill.
        # It is not kept alive: the engines sample from copies of its layers.
        self._given: weakref.ref[Transformer] | None = None
        self._model: Unstacked | None = None
        self._prompt_model: Unstacked | None = None
        # Called with the open rows before each dispatch to the devices. It may load other weights
        # and set ``Row.most``, as is done to sample a trajectory again (``again``).
        self.before_dispatch: Callable[[Sequence[Row]], None] = lambda rows: None
        threads = dict(workers=workers, worker_deadline_s=worker_deadline_s, gather_s=gather_s)
        slots = engine.shards * engine.config.slots
        super().__init__(engine.config, rows, slots=slots, **threads)

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
        stats = super().take_stats()
        for pool in {self._pool, self._prompt_pool}:
            stats = pool.add_stats(stats)
        return stats

    # --- A round ----------------------------------------------------------------------------------

    def _check(self, adapter: int, ways: Sequence[OwnWay] | None) -> None:
        if self._model is not None:
            _check_adapter(self._model, adapter)

    def _go_on(self, row: Row, following: list[int] | Elsewhere | None) -> Row:
        if following is None:
            self._texts.keep(row)
        return super()._go_on(row, following)

    def _noted(self, trajectory: Trajectory, rows: Sequence[Row]) -> Trajectory:
        """Adds the versions that computed the keys of each context, and its choices."""
        for row in rows:
            trajectory = with_keys(trajectory, row.keys, row.context)
            trajectory = with_choices(trajectory, row.choices, row.context)
        return trajectory

    def _await_pages(self) -> None:
        """Waits a moment for the pages of a prompt."""
        start = time.perf_counter()
        self._remote.wait(_PAGES_S)
        self._open.stats.pages_wait_s += time.perf_counter() - start

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
            full = 4 * ready >= 3 * self.slots
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


def _check_adapter(model: Transformer, adapter: int) -> None:
    """Raises ValueError where weights do not have this adapter; -1 for none of several."""
    count = num_adapters(model)
    if not -1 <= adapter < count:
        raise ValueError(
            f"{adapter=} must be -1 or one of the {count} adapters of the weights, counted from 0"
        )
