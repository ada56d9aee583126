"""The arrays of one decode dispatch: rows in slots, their pages, and the tiles of rows that share a
prefix.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from attention.cache import gathered
from attention.cache.tables import Runs
from rl_code.rollout.engine_config import EngineConfig
from rl_code.rollout.own_way import OwnWays, empty_ways


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeInput:
    """Input of one decode dispatch of each row; int32 [slots] unless said otherwise."""

    # The last token of the row, which is not in the cache yet.
    tokens: jax.Array
    # The place of that token, counted from the start of the row.
    places: jax.Array
    # bool, whether the slot holds a row.
    active: jax.Array
    # How many tokens the row may sample in this dispatch. It has pages for them.
    budgets: jax.Array
    # uint32 [slots, 2], the words of the random key. Together with the next two fields and the
    # position it fixes each random number.
    keys: jax.Array
    # The number of the row's group.
    groups: jax.Array
    # The index of the row's trajectory in its group.
    samples: jax.Array
    # [slots, table], the row's pages; -1 for none.
    tables: jax.Array
    # The same pages for decoding from a view, with shared prefixes apart.
    rows: gathered.SharedRows
    # What the pages of ``tables`` hold; None in a run without documents.
    runs: Runs | None
    # [slots, draft_room + length], what drafts are copied from (``drafts.DraftTexts``); None for a
    # dispatch without drafts.
    texts: jax.Array | None
    # Which adapter of a model that has several (``models.adapter_rows``) computes the row; -1 for
    # none. Rows may share pages only if they have the same one. None for a model without several.
    adapters: jax.Array | None = None
    # How the tokens of each row are drawn; None for a dispatch of rows that are drawn as the config
    # says.
    ways: OwnWays | None = None


def empty_input(
    config: EngineConfig, shards: int, several: bool = False, vocab: int | None = None
) -> DecodeInput:
    """Numpy arrays for a dispatch in which no row is active.

    several: whether the model has several adapters. vocab: tokens of the model, for a dispatch of
    rows with ways of their own; None for one of the others.
    """
    rows = shards * config.slots

    def ints(*shape: int, fill: int = -1) -> np.ndarray:
        return np.full(shape, fill, np.int32)

    zeros = {
        name: ints(rows, fill=0) for name in ("tokens", "places", "budgets", "groups", "samples")
    }
    documents = config.longest_document is not None
    return DecodeInput(
        **zeros,
        active=np.zeros(rows, bool),
        keys=np.zeros((rows, 2), np.uint32),
        tables=ints(rows, config.table),
        runs=empty_runs(config, rows),
        texts=ints(rows, config.draft_room + config.length) if config.draft_tokens else None,
        adapters=ints(rows) if several else None,
        ways=None if vocab is None else empty_ways(rows, vocab),
        rows=gathered.SharedRows(
            own=ints(rows, config.table),
            starts=ints(rows, fill=0),
            tiles=ints(rows, config.tile),
            prefixes=ints(rows, config.prefix_table),
            num_tiles=ints(shards, fill=0),
            # not 0: an empty slot sees one key, since attention to no key at all is 0 / 0
            own_filled=ints(rows, config.table, fill=config.page) if documents else None,
            prefixes_filled=ints(rows, config.prefix_table, fill=0) if documents else None,
        ),
    )


def empty_runs(config: EngineConfig, rows: int) -> Runs | None:
    """Numpy arrays of rows that each hold one sequence; None in a run without documents."""
    if config.longest_document is None:
        return None
    shape = (rows, config.table)
    return Runs(
        documents=np.zeros(shape, np.int32),
        filled=np.full(shape, config.page, np.int32),
        shifts=np.zeros(shape, np.int32),
    )
