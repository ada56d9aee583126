"""What a cache in tiers runs on the device: the two halves of a layer's step, and blocks on their
way in and out.

Slots are the places for blocks on the device; a row's table says which slot each of its blocks is
in, -1 for none. Compressed keys of all of a row's pages lie one after another, the window's in a
ring of pages for each row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from attention.cache.paged import LayerPages, NewKeys, PagedCache, Pair, Rotate, Tables, write
from attention.cache.paged_attention import Pages, attend_selected, select
from pallas_kernels.tokens import Tokens, sequences


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a step. slots: of every block. lengths: with the new tokens. documents: of every
    block, or TAIL.

    places: of the new tokens, -1 for padding.
    """

    slots: Int[Array, "B P"]
    lengths: Int[Array, " B"]
    documents: Int[Array, "B P"]
    places: Int[Array, "B T"]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of a layer. compress: (parameters of a layer, k, v) to what ``paged.write`` asks
    of compress.

    rotate: as there. ring: pages of a row's window. page: tokens of a block.
    """

    compress: Callable[[object, jax.Array, jax.Array], Pair]
    rotate: Rotate
    ring: int
    page: int

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def first(self, cache: PagedCache, rows: Rows, q, new: NewKeys, parameters):
        """(the cache with the new tokens, the result over compressed keys, the chosen blocks)."""
        pages, q_tokens = self._pages(rows)
        compress = functools.partial(self.compress, parameters)
        cache = write(
            cache, 0, pages.tables, rows.places, new, compress=compress, rotate=self.rotate
        )
        # without it XLA would write twice, once for the result and once for what reads it, into
        # copies of the keys
        cache = jax.lax.optimization_barrier(cache)
        return cache, *select(cache, 0, q, q_tokens, pages)

    @functools.partial(jax.jit, static_argnums=0)
    def second(self, cache: PagedCache, rows: Rows, q, compressed, picks, gates, out, queries):
        """``out`` with the results of some queries, bool [B, T], whose chosen blocks are there."""
        pages, q_tokens = self._pages(rows)
        found = attend_selected(cache, 0, q, q_tokens, pages, compressed, picks, gates)
        return jnp.where(queries[..., None, None], found, out)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def load(self, cache: PagedCache, row, first, document: LayerPages) -> tuple[PagedCache, Pair]:
        """(the cache with a document's compressed keys and window from page ``first`` of a row, its
        blocks rotated).
        """
        old = cache.layers[0]
        count = document.main[0].shape[0]
        of_row = old.compressed[0].shape[0] // self._count(cache)
        new = self._turned(document.compressed, first, old.compressed[0].dtype)
        at = (row * of_row + first, 0, 0, 0)
        compressed = tuple(
            jax.lax.dynamic_update_slice(x, y, at) for x, y in zip(old.compressed, new, strict=True)
        )
        late = min(count, self.ring)  # pages that are still in the ring afterwards
        new = self._turned(document.window, first, old.window[0].dtype)
        ring = row * self.ring + (first + jnp.arange(count - late, count)) % self.ring
        window = tuple(
            x.at[ring].set(y[count - late :]) for x, y in zip(old.window, new, strict=True)
        )
        cache = dataclasses.replace(
            cache, layers=(dataclasses.replace(old, compressed=compressed, window=window),)
        )
        return cache, self._turned(document.main, first, old.main[0].dtype)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def clear(self, cache: PagedCache, row) -> PagedCache:
        """The cache with zeros for a row's compressed keys and what is to be compressed: they may
        not be finite.
        """
        old = cache.layers[0]
        rows = self._count(cache)

        def zero(pair: Pair) -> Pair:
            return tuple(
                x.reshape(rows, -1, *x.shape[1:]).at[row].set(0).reshape(x.shape) for x in pair
            )

        parts = {name: zero(getattr(old, name)) for name in ("compressed", "recent")}
        return dataclasses.replace(cache, layers=(dataclasses.replace(old, **parts),))

    def _count(self, cache: PagedCache) -> int:
        return cache.layers[0].window[0].shape[0] // self.ring

    def _turned(self, pages: Pair, first, dtype) -> Pair:
        """Pages from page ``first`` of a row on, keys rotated as the last token of each asks."""
        k, v = pages
        count, heads, each, size = k.shape
        every = self.page // each
        positions = first * self.page + (jnp.arange(count * each) + 1) * every - 1
        k = self.rotate(k.transpose(0, 2, 1, 3).reshape(1, -1, heads, size), positions[None])
        return k.reshape(count, each, heads, size).transpose(0, 2, 1, 3).astype(dtype), v.astype(
            dtype
        )

    def _pages(self, rows: Rows) -> tuple[Pages, Tokens]:
        """The rows as attention sees them, and the tokens of the queries."""
        count, pages = rows.slots.shape
        number = jnp.arange(pages)[None]
        last = (rows.lengths[:, None] - 1) // self.page
        recent = jnp.arange(count)[:, None] * self.ring + number % self.ring
        recent = jnp.where((number > last - self.ring) & (number <= last), recent, -1)
        tokens = sequences(rows.lengths, pages * self.page)
        tokens = dataclasses.replace(
            tokens, documents=jnp.repeat(rows.documents, self.page, axis=1)
        )
        view = Pages(Tables(rows.slots, recent, None), tokens, tokens.order)
        return view, view.at(rows.places)[0]


@jax.jit
def take(main: Pair, slots: Int[Array, " n"]) -> Pair:
    """The blocks in some slots."""
    return tuple(x[slots] for x in main)


@functools.partial(jax.jit, donate_argnums=0)
def place(main: Pair, slots: Int[Array, " n"], parts: Sequence[Pair]) -> Pair:
    """Blocks put into their slots; one past the end is dropped. parts: n blocks, one or several
    together.
    """

    def put(x, *parts):
        return x.at[slots].set(
            jnp.concatenate([y.reshape(-1, *x.shape[1:]) for y in parts]), mode="drop"
        )

    return tuple(put(x, *ys) for x, *ys in zip(main, *parts, strict=True))
