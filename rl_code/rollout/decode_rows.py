"""The rows that decode together, laid out as the arrays of one dispatch (``DecodeInput``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl_code.rollout.decode_input import DecodeInput, empty_input
from rl_code.rollout.drafts import DraftTexts
from rl_code.rollout.engine import Engine
from rl_code.rollout.engine_config import EngineConfig
from rl_code.rollout.page_pool import PagePool
from rl_code.rollout.spans import Span


def decode_input(
    engine: Engine,
    pool: PagePool,
    chosen: Sequence[Sequence[Span]],
    budgets: Sequence[Sequence[int]],
    texts: DraftTexts,
    drafts: bool,
    several: bool,
    own: bool = False,
) -> DecodeInput:
    """The arrays for one dispatch of the ``chosen`` rows of every shard.

    Each row must hold pages for what it may sample. It has the words of its random ``key``, and an
    ``episode`` with the other numbers that fix its random stream. budgets: the most tokens that
    each row may sample. texts: what drafts are copied from. drafts: whether tokens are guessed.
    several: whether the model has several adapters. own: whether the rows have ways of their own
    (``Row.own``).
    """
    c = engine.config if drafts else engine.config.without_drafts()
    inputs = empty_input(c, engine.shards, several, engine.vocab if own else None)
    for shard, rows in enumerate(chosen):
        sharing: dict[tuple[int, ...], list[int]] = {}
        for place, row in enumerate(rows):
            at = shard * c.slots + place  # rows of all shards stand one after another
            pages = pool.pages(row)
            inputs.active[at] = True
            inputs.keys[at] = row.key
            inputs.tokens[at] = row.tokens[-1]
            inputs.places[at] = len(row.tokens) - 1
            inputs.budgets[at] = min(budgets[shard][place], c.dispatch_tokens)
            inputs.groups[at] = row.episode.group
            inputs.samples[at] = row.episode.index
            inputs.tables[at, : len(pages)] = pages
            if inputs.adapters is not None:
                inputs.adapters[at] = row.adapter
            if inputs.texts is not None:
                texts.put(row, inputs.texts[at])
            if (ways := inputs.ways) is not None:
                ways.temperatures[at] = row.own.temperature
                ways.top_ps[at] = row.own.top_p
                row.own.prepare(row.message, ways.biases[at], ways.allowed[at])
                inputs.keys[at, 1] += np.uint32(row.own.redrawn)
            # The pages of the shared prefix go into a tile, which several rows read together. Those
            # behind it are the row's own, and ``starts`` is the place at which they begin.
            shared = pool.shared_pages(row)
            inputs.rows.own[at, : len(pages) - shared] = pages[shared:]
            inputs.rows.starts[at] = shared * c.page
            if row.runs is not None:
                row.runs.put(inputs.runs, at)
                inputs.rows.own_filled[at, : c.table - shared] = row.runs.pages[1, shared:]
            if shared:
                sharing.setdefault(tuple(pages[:shared]), []).append(place)
        _fill_tiles(inputs, shard, c, sharing)
    return inputs


def _fill_tiles(
    inputs: DecodeInput, shard: int, c: EngineConfig, sharing: dict[tuple[int, ...], list[int]]
) -> None:
    """Writes the tiles of a shard: groups of at most ``tile`` rows that share a prefix.

    sharing: the pages of each prefix -> the slots, within the shard, of the rows that share it.
    """
    rows = inputs.rows
    for prefix, places in sharing.items():
        for first in range(0, len(places), c.tile):
            members = places[first : first + c.tile]
            tile = shard * c.slots + rows.num_tiles[shard]
            rows.tiles[tile, : len(members)] = members
            rows.prefixes[tile, : len(prefix)] = prefix
            if inputs.runs is not None:  # of the first row, since all of them have the same pages
                filled = inputs.runs.filled[shard * c.slots + places[0]]
                rows.prefixes_filled[tile, : len(prefix)] = filled[: len(prefix)]
            rows.num_tiles[shard] += 1
