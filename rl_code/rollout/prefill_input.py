"""The arrays of one prefill: chunks of spans, their pages, and what these hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from attention.cache.tables import Runs
from rl_code.rollout.decode_input import empty_runs
from rl_code.rollout.engine import Engine
from rl_code.rollout.spans import Span

# Tables [R, table], tokens [R, length], their places, what the pages of the tables hold, and the
# adapters of the rows.
PrefillInput = tuple[np.ndarray, np.ndarray, np.ndarray, Runs | None, np.ndarray | None]


def prefill_input(
    engine: Engine,
    pages_of: Callable[[Span], Sequence[int]],
    spans: Sequence[Span],
    rows: int,
    length: int,
    several: bool,
) -> tuple[PrefillInput, dict[Span, int]]:
    """(the arguments of ``Engine.prefill``, the places up to which it writes the spans in it).

    pages_of: the pages that a span holds. spans: as many of the first of every shard are taken as
    there are ``rows``. They must hold pages for their tokens. length: tokens of a row. several:
    whether the model has several adapters.
    """
    used = [0] * engine.shards  # rows of each shard that are taken
    shape = (engine.shards, rows)
    tables = np.full((*shape, engine.config.table), -1, np.int32)
    tokens = np.zeros((*shape, length), np.int32)
    places = np.full((*shape, length), -1, np.int32)
    runs = empty_runs(engine.config, engine.shards * rows)
    adapters = np.full(shape, -1, np.int32)
    ends = {}
    for span in spans:
        at = (span.shard, used[span.shard])
        if at[1] == rows:
            continue
        used[span.shard] += 1
        start = span.cached
        end = ends[span] = span.chunk_end(start + length)
        pages = pages_of(span)
        tables[(*at, slice(0, len(pages)))] = pages
        tokens[(*at, slice(0, end - start))] = span.tokens[start:end]
        places[(*at, slice(0, end - start))] = np.arange(start, end)
        adapters[at] = span.adapter
        if span.runs is not None:
            # rows of all shards stand one after another
            span.runs.put(runs, at[0] * rows + at[1])
    table, token, place = (x.reshape(-1, x.shape[-1]) for x in (tables, tokens, places))
    return (table, token, place, runs, adapters.reshape(-1) if several else None), ends
