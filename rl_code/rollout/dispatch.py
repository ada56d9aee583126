"""The arrays of one decode dispatch: rows in slots, their pages, and the tiles of rows that share a prefix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attention.cache.view import Rows
from rl_code.rollout.engine import DecodeInput, Engine
from rl_code.rollout.page_pool import PagePool, Span


def decode_input(
    engine: Engine, pool: PagePool, chosen: Sequence[Sequence[Span]], budgets: Sequence[Sequence[int]]
) -> DecodeInput:
    """The dispatch of ``chosen`` rows of every shard, each with pages for what it may sample.

    A row has the words of its random ``key``, and an ``episode`` with the other numbers of its random stream.
    budgets: most tokens of each.
    """
    c, shards = engine.config, engine.shards
    shape = (shards, c.slots)
    fields = {name: np.zeros(shape, np.int32) for name in ("tokens", "places", "budgets", "groups", "samples")}
    active = np.zeros(shape, bool)
    keys = np.zeros((*shape, 2), np.uint32)
    tables = np.full((*shape, c.table), -1, np.int32)
    for shard, rows in enumerate(chosen):
        for place, row in enumerate(rows):
            at = (shard, place)
            pages = pool.pages(row)
            active[at], keys[at] = True, row.key
            tables[(*at, slice(0, len(pages)))] = pages
            fields["tokens"][at], fields["places"][at] = row.tokens[-1], len(row.tokens) - 1
            fields["budgets"][at] = min(budgets[shard][place], c.decode_steps)
            fields["groups"][at], fields["samples"][at] = row.episode.group, row.episode.index
    rows = _view_rows(engine, pool, chosen) if engine.viewed else _no_rows(shards, c.slots)
    flat = {name: x.reshape(-1) for name, x in fields.items()}
    keys = keys.reshape(-1, 2)
    return DecodeInput(active=active.reshape(-1), keys=keys, tables=tables.reshape(-1, c.table), rows=rows, **flat)


def _view_rows(engine: Engine, pool: PagePool, chosen: Sequence[Sequence[Span]]) -> Rows:
    c, shards = engine.config, engine.shards
    own = np.full((shards, c.slots, c.table), -1, np.int32)
    starts = np.zeros((shards, c.slots), np.int32)
    tiles = np.full((shards, c.slots, c.tile), -1, np.int32)
    prefixes = np.full((shards, c.slots, c.prefix_table), -1, np.int32)
    num_tiles = np.zeros((shards, 1), np.int32)
    for shard, rows in enumerate(chosen):
        sharing: dict[tuple[int, ...], list[int]] = {}
        for place, row in enumerate(rows):
            pages, shared = pool.pages(row), pool.shared_pages(row)
            rest = pages[shared:]
            own[shard, place, : len(rest)], starts[shard, place] = rest, shared * c.page
            if shared:
                sharing.setdefault(tuple(pages[:shared]), []).append(place)
        for prefix, places in sharing.items():
            for first in range(0, len(places), c.tile):
                members, tile = places[first : first + c.tile], num_tiles[shard, 0]
                tiles[shard, tile, : len(members)] = members
                prefixes[shard, tile, : len(prefix)] = prefix
                num_tiles[shard, 0] += 1
    return Rows(
        own=own.reshape(-1, c.table),
        starts=starts.reshape(-1),
        tiles=tiles.reshape(-1, c.tile),
        prefixes=prefixes.reshape(-1, c.prefix_table),
        num_tiles=num_tiles.reshape(-1),
    )


def _no_rows(shards: int, slots: int) -> Rows:
    """For an engine without views."""
    empty = np.full((shards, 1), -1, np.int32)
    return Rows(empty, np.zeros(shards * slots, np.int32), empty, empty, np.zeros(shards, np.int32))
