"""Attention over paged keys in plain jnp: the pages that queries need are laid side by side.

Runs in float64 too.

Dimensions: B rows, T queries, P pages of a table, S = P page places, N query heads, K key/value
heads, H head size, C lists of picks per query (K or N), n picks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.finite import kept
from pallas_kernels.paged.lists import lookup
from pallas_kernels.softmax import masked_attention

# A page past all others: a write to it is dropped.
NO_PAGE = jnp.iinfo(jnp.int32).max


def where(tables: jax.Array, places: jax.Array, page: int) -> tuple[jax.Array, jax.Array]:
    """(page, offset) [B, n] of places [B, n] of rows with these tables; NO_PAGE where a place is
    negative or has no page.
    """
    found = lookup(tables, jnp.where(places < 0, -1, places // page))
    return jnp.where(found < 0, NO_PAGE, found), places % page


def put(pages, new, page: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Pages of keys and of values with the new ones [B, T, K, H] at (page, offset) [B, T]; NO_PAGE
    is not written.

    Where a value is not finite, its key is written with a NaN and the value with zeros. Kernels
    that read pages where they lie then need not look at values: see ``finite``.
    """
    new = kept(*new)

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        return x.at[page, :, offset].set(y.astype(x.dtype), mode="drop")

    return one(pages[0], new[0]), one(pages[1], new[1])


def dense(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    tables: jax.Array,
    q_places: jax.Array,
    lengths: jax.Array,
    filled: jax.Array | None = None,
    *,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """``api.paged_attention`` with all scores in memory; differentiable by JAX."""
    page = k_pages.shape[2]
    numbers = jnp.broadcast_to(jnp.arange(tables.shape[1]), tables.shape)
    ids = tables
    if window is not None:
        numbers = _window_pages(q_places, window, page, tables.shape[1])
        ids = lookup(tables, numbers)
    places = (numbers[..., None] * page + jnp.arange(page)).reshape(numbers.shape[0], -1)
    real = jnp.repeat(ids >= 0, page, axis=1) & (places < lengths[:, None])
    if filled is not None:
        real &= places % page < jnp.repeat(lookup(filled, numbers), page, axis=1)
    k, v = (_joined(x, ids, real, q.dtype) for x in (k_pages, v_pages))
    mask = real[:, None] & (places[:, None] <= q_places[..., None])
    if window is not None:
        mask &= places[:, None] > q_places[..., None] - window
    return masked_attention(q, k, v, mask)


def selected(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    picks: jax.Array,
    tables: jax.Array,
    q_places: jax.Array,
    lengths: jax.Array,
    filled: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """``api.selected_paged_attention`` with all scores in memory; reads only the picked pages."""
    batch, count, _, size = q.shape
    page = k_pages.shape[2]
    lists = picks.shape[2]
    ids = lookup(tables, picks)
    places = picks[..., None] * page + jnp.arange(page)
    real = (ids >= 0)[..., None] & (places < lengths[:, None, None, None, None])
    if filled is not None:
        real &= jnp.arange(page) < lookup(filled, picks)[..., None]
    seen = real & (places <= q_places[..., None, None, None])
    # the key/value head of each list
    heads = jnp.arange(lists) * k_pages.shape[1] // lists
    rows = batch * count * lists
    at = jnp.maximum(ids, 0)
    real = real.reshape(rows, -1, 1, 1)
    seen = seen.reshape(rows, 1, -1)
    k, v = (
        jnp.where(real, x[at, heads[:, None]].reshape(rows, -1, 1, size).astype(q.dtype), 0)
        for x in (k_pages, v_pages)
    )
    out, lse = masked_attention(q.reshape(rows, 1, -1, size), k, v, seen)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def _window_pages(q_places: jax.Array, window: int, page: int, pages: int) -> jax.Array:
    """Numbers [B, W] of consecutive pages that hold every key that some query of a row sees."""
    # T consecutive queries see this many places together; unaligned, they touch ``count`` pages
    span = window + q_places.shape[1] - 1
    count = min((span + page - 2) // page + 1, pages)
    first = jnp.maximum(q_places[:, :1] - window + 1, 0) // page
    return jnp.minimum(first, pages - count) + jnp.arange(count)


def _joined(pages: jax.Array, ids: jax.Array, real: jax.Array, dtype) -> jax.Array:
    """The pages [pages, K, page, H] with numbers ids [B, P] side by side, [B, S, K, H].

    Places that are not real read as zeros. What a page held there before may not be finite, and 0
    times it would be NaN.
    """
    x = pages[jnp.maximum(ids, 0)].transpose(0, 1, 3, 2, 4)
    x = x.reshape(x.shape[0], -1, *x.shape[3:]).astype(dtype)
    return jnp.where(real[..., None, None], x, 0)
