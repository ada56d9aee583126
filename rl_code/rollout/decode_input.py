"""The arrays of one decode dispatch: rows in slots, their pages, and the tiles of rows that share a
prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

from attention.cache.gathered import SharedRows
from rl_code.rollout.engine import DecodeInput, Engine, EngineConfig, empty_input
from rl_code.rollout.page_pool import PagePool, Span


def decode_input(
    engine: Engine,
    pool: PagePool,
    chosen: Sequence[Sequence[Span]],
    budgets: Sequence[Sequence[int]],
) -> DecodeInput:
    """The arrays for one dispatch of the ``chosen`` rows of every shard.

    Each row must hold pages for what it may sample. It has the words of its random ``key``, and an
    ``episode`` with the other numbers that fix its random stream. budgets: the most tokens that
    each row may sample.
    """
    c = engine.config
    inputs = empty_input(c, engine.shards)
    for shard, rows in enumerate(chosen):
        sharing: dict[tuple[int, ...], list[int]] = {}
        for place, row in enumerate(rows):
            at = shard * c.slots + place  # rows of all shards stand one after another
            pages = pool.pages(row)
            inputs.active[at] = True
            inputs.keys[at] = row.key
            inputs.tokens[at] = row.tokens[-1]
            inputs.places[at] = len(row.tokens) - 1
            inputs.budgets[at] = min(budgets[shard][place], c.decode_steps)
            inputs.groups[at] = row.episode.group
            inputs.samples[at] = row.episode.index
            inputs.tables[at, : len(pages)] = pages
            # The pages of the shared prefix go into a tile, which several rows read together. Those
            # behind it are the row's own, and ``starts`` is the place at which they begin.
            shared = pool.shared_pages(row)
            inputs.rows.own[at, : len(pages) - shared] = pages[shared:]
            inputs.rows.starts[at] = shared * c.page
            if shared:
                sharing.setdefault(tuple(pages[:shared]), []).append(place)
        _fill_tiles(inputs.rows, shard, c, sharing)
    return inputs


def _fill_tiles(
    rows: SharedRows, shard: int, c: EngineConfig, sharing: dict[tuple[int, ...], list[int]]
) -> None:
    """Writes the tiles of a shard: groups of at most ``tile`` rows that share a prefix.

    sharing: the pages of each prefix -> the slots, within the shard, of the rows that share it.
    """
    for prefix, places in sharing.items():
        for first in range(0, len(places), c.tile):
            members = places[first : first + c.tile]
            tile = shard * c.slots + rows.num_tiles[shard]
            rows.tiles[tile, : len(members)] = members
            rows.prefixes[tile, : len(prefix)] = prefix
            rows.num_tiles[shard] += 1
