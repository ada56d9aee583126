"""Pages side by side give what the pages give, token after token, however rows share
prefixes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.cache import gathered
from attention.cache.paged import init_cache
from attention.methods.dense import Dense
from pallas_kernels.paged.api import paged_attention
from tests.attention.rows import normal

PAGE, KV_HEADS, HEADS, SIZE, BLOCK = 4, 2, 6, 8, 8
gather = jax.jit(gathered.gather, static_argnums=(1, 3))
write = jax.jit(gathered.write)
attend = jax.jit(gathered.attend)
put_back = jax.jit(gathered.put_back, static_argnums=(1, 6))
from_pages = jax.jit(functools.partial(paged_attention, implementation="reference"))
# Per row: pages shared with its group, group, tokens after them.
ROWS = ((3, 0, 1), (3, 0, 9), (3, 0, 14), (2, 1, 5), (0, 2, 7), (3, 0, 2))


def _cache(seed: int):
    shape = functools.partial(init_cache, [Dense()], 40, KV_HEADS, SIZE, jnp.float32, page=PAGE)
    cache = jax.eval_shape(shape)
    rng = np.random.default_rng(seed)
    main = tuple(
        jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in cache.layers[0]["main"]
    )
    return jax.tree.unflatten(jax.tree.structure(cache), main)


def _unwritten(cache, tables, lengths, value: float):
    """The cache with a value that is not finite in every place that no row has written."""
    written = np.zeros((cache.num_pages, PAGE), bool)
    for table, length in zip(np.asarray(tables), np.asarray(lengths), strict=True):
        for place in range(length):
            written[table[place // PAGE], place % PAGE] = True
    written = written[:, None, :, None]
    value = np.float32(value)
    return jax.tree.map(lambda x: jnp.asarray(np.where(written, x, value)), cache)


def _rows(steps: int, tile: int):
    """(rows of the view, all their tables [B, P], tokens of each)."""
    fresh = iter(np.random.default_rng(0).permutation(40).tolist())
    groups = {group: [next(fresh) for _ in range(3)] for group in (0, 1, 2)}
    tables = np.full((len(ROWS), 8), -1, np.int32)
    own = np.full((len(ROWS), 8), -1, np.int32)
    tiles = np.full((6, tile), -1, np.int32)
    prefixes = np.full((6, 3), -1, np.int32)
    sharing = {}
    for row, (shared, group, tokens) in enumerate(ROWS):
        pages = [next(fresh) for _ in range(-(-(tokens + steps) // PAGE))]
        own[row, : len(pages)] = pages
        tables[row, : shared + len(pages)] = groups[group][:shared] + pages
        if shared:
            sharing.setdefault((shared, group), []).append(row)
    members = [
        (key, rows[at : at + tile])
        for key, rows in sharing.items()
        for at in range(0, len(rows), tile)
    ]
    for number, ((shared, group), found) in enumerate(members):
        tiles[number, : len(found)] = found
        prefixes[number, :shared] = groups[group][:shared]
    starts = np.array([shared * PAGE for shared, _, _ in ROWS], np.int32)
    rows = gathered.SharedRows(own, starts, tiles, prefixes, np.array([len(members)], np.int32))
    return (
        jax.tree.map(jnp.asarray, rows),
        jnp.asarray(tables),
        starts + [tokens for _, _, tokens in ROWS],
    )


@pytest.mark.parametrize("tile", [2, 1, 8])
@pytest.mark.quick(first=1)
def test_decoding_in_gathered_pages_equals_decoding_from_pages(tile):
    steps = 5
    cache = _cache(0)
    rows, tables, lengths = _rows(steps, tile)
    rng = np.random.default_rng(1)
    firsts = jnp.asarray(lengths)
    cache = _unwritten(cache, tables, lengths, np.nan if tile == 1 else np.inf)
    seen = gather(cache, 0, rows, BLOCK, jnp.int32(30), firsts)
    pages = [np.array(x) for x in cache.layers[0]["main"]]
    counts = np.array([5, 3, 5, 0, 5, 1])
    for step in range(steps):
        places = np.where(step < counts, lengths + step, -1)
        q, k, v = (
            rng.normal(size=(len(ROWS), n, SIZE)).astype(np.float32)
            for n in (HEADS, KV_HEADS, KV_HEADS)
        )
        for row, place in enumerate(places):
            if place >= 0:
                for x, new in zip(pages, (k, v), strict=True):
                    x[tables[row, place // PAGE], :, place % PAGE] = new[row]
        at = places[:, None]
        seen = write(seen, rows, at, (k[:, None], v[:, None]))
        out = attend(seen, rows, q[:, None], at)
        expected = from_pages(q[:, None], *pages, tables, at, places + 1)[0]
        active = places >= 0
        np.testing.assert_allclose(
            np.asarray(out)[active], np.asarray(expected)[active], rtol=2e-5, atol=2e-6
        )
    back = put_back(cache, 0, seen, rows, lengths, counts, steps)
    for x, expected in zip(back.layers[0]["main"], pages, strict=True):
        np.testing.assert_array_equal(np.asarray(x), expected)


def test_a_rows_numbers_do_not_depend_on_the_other_rows():
    cache = _cache(2)
    rows, _, lengths = _rows(1, 2)
    q, *new = normal(3, (len(ROWS), 1, HEADS, SIZE), *[(len(ROWS), 1, KV_HEADS, SIZE)] * 2)
    new = tuple(new)

    @jax.jit
    def attended(places):
        reach = jnp.max(places - rows.starts)  # blocks past the furthest row are not there
        at = places[:, None]
        seen = gathered.write(
            gathered.gather(cache, 0, rows, BLOCK, reach, jnp.asarray(lengths)), rows, at, new
        )
        return gathered.attend(seen, rows, q, at)

    together = np.asarray(attended(jnp.asarray(lengths)))
    for row in range(len(ROWS)):
        alone = np.asarray(
            attended(jnp.asarray(np.where(np.arange(len(ROWS)) == row, lengths, -1)))
        )
        np.testing.assert_array_equal(alone[row], together[row])
