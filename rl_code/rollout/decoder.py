"""Decodes the rows that are ready, a dispatch at a time, until their messages are over."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from models.adapter_rows import num_adapters
from models.tokenizer import Tokenizer
from models.unstacked import Unstacked
from rl_code.environment.protocols.protocol import stop_length
from rl_code.rollout.admission import Admission
from rl_code.rollout.decode_rows import decode_input
from rl_code.rollout.drafts import DraftTexts
from rl_code.rollout.engine import Engine
from rl_code.rollout.page_pool import PagePool
from rl_code.rollout.rows import Row


class Kind(NamedTuple):
    """A kind of dispatch, by the rows that it takes."""

    # True for rows with ways of their own (``Row.own``).
    own: bool
    # True for rows whose tokens are guessed.
    drafts: bool


class Decoder:
    """Samples what the rows of ``admission`` say next.

    texts: what guesses at tokens are copied from.
    """

    def __init__(
        self,
        engine: Engine,
        pool: PagePool,
        admission: Admission,
        texts: DraftTexts,
        tokenizer: Tokenizer,
    ):
        self._engine = engine
        self._config = engine.config
        self._pool = pool
        self._open = admission
        self._texts = texts
        self._tokenizer = tokenizer

    def kinds(self) -> list[Kind]:
        """The dispatches that the rows that are ready need."""
        return sorted({self._kind(row) for row in self._open.rows if row.ready})

    def dispatch(self, model: Unstacked, version: int, kind: Kind) -> list[Row]:
        """Decodes one dispatch of the rows of a kind that are ready, oldest first. Returns those
        whose message is over.

        version: of the model.
        """
        c = self._config if kind.drafts else self._config.without_drafts()
        chosen: list[list[Row]] = [[] for _ in range(self._engine.shards)]
        for row in list(self._open.rows):
            mine = row.ready and self._kind(row) == kind
            if mine and len(chosen[row.shard]) < c.slots:
                count = min(c.dispatch_tokens, self._budget(row))
                # The cache has all tokens but the last. The dispatch writes that one and every
                # token it samples but the last: ``count`` tokens more.
                if self._open.have_pages(row, len(row.tokens) - 1 + count):
                    chosen[row.shard].append(row)
        if not any(chosen):
            return []
        start = time.perf_counter()
        inputs = decode_input(
            self._engine,
            self._pool,
            chosen,
            [[self._budget(row) for row in rows] for rows in chosen],
            self._texts,
            kind.drafts,
            num_adapters(model) > 0,
            kind.own,
        )
        results = self._pool.decode(model, inputs)
        tokens, logprobs, counts, choices, steps, drafted = results
        stats = self._open.stats
        stats.decode_s += time.perf_counter() - start
        stats.slot_steps += len(steps) * int(steps.max())
        stats.row_steps += int(steps.sum())
        stats.drafted_tokens += int(drafted.sum())
        stats.accepted_tokens += int(counts.sum() - steps.sum())
        over = []
        for place, row in self._places(chosen):
            count = counts[place]
            if row.own is not None:
                count = row.own.kept(tokens[place, :count].tolist())
            chosen_by_model = {name: x[place, :count] for name, x in choices.items()}
            if row.own is not None:
                likely = chosen_by_model.pop("likely")
                row.own.note(chosen_by_model.pop("alternatives"), likely)
            sampled = tokens[place, :count].tolist(), logprobs[place, :count].tolist()
            before = row.cached
            if ended := self._take(row, *sampled, version, chosen_by_model):
                over.append(row)
            # At the end of every message, and not only where tokens are taken back: how far a
            # dispatch went must not decide by which program keys are computed.
            if self._engine.states and (ended or row.cached - before < counts[place]):
                row.back_to(row.cached // c.page * c.page)
        return over

    def _kind(self, row: Row) -> Kind:
        """The dispatch that samples the next tokens of a row."""
        if row.own is not None:
            return Kind(own=True, drafts=False)
        c = self._config
        return Kind(own=False, drafts=row.repeats if c.draft_least else c.draft_tokens > 0)

    def _places(self, chosen: list[list[Row]]) -> Iterator[tuple[int, Row]]:
        """Each chosen row with its index in the arrays of the dispatch, as ``decode_input`` lays
        them out.
        """
        for shard, rows in enumerate(chosen):
            for place, row in enumerate(rows):
                yield shard * self._config.slots + place, row

    def _budget(self, row: Row) -> int:
        """Tokens that the row may still sample in its current message, in its next dispatch."""
        left = row.episode.budget - len(row.message)
        if self._config.draft_least:  # up to where it is looked at again whether it repeats itself
            window = self._config.draft_window
            left = min(left, window - len(row.message) % window)
        if row.own is not None and row.own.one_by_one:
            left = min(left, 1)
        return left if row.most is None else min(left, row.most)

    def _take(
        self,
        row: Row,
        tokens: list[int],
        logprobs: list[float],
        version: int,
        choices: Mapping[str, np.ndarray],
    ) -> bool:
        """Appends what a row has sampled, cut where the protocol's rule on text ends the message.
        Returns whether the message is over.
        """
        before = len(row.message)
        message = row.message + tokens
        end = stop_length(row.episode.protocol, self._tokenizer, message)
        over = end is not None or len(message) == row.episode.budget
        row.message = message[:end]
        fresh = len(row.message) - before
        row.logprobs = (row.logprobs + logprobs)[: len(row.message)]
        row.versions += [version] * fresh
        for name, found in choices.items():
            row.choices.setdefault(name, []).append(found[:fresh])
        row.add(row.message[before:])
        row.episode.sampling(row.message)
        if self._config.draft_least and fresh and len(row.message) % self._config.draft_window == 0:
            row.repeats = self._texts.repeats(row)
        # Each sampled token wrote the key of the token before it, so the row still lacks its last.
        row.cached += fresh
        self._open.stats.sampled_tokens += fresh
        return over
