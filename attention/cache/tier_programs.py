"""The programs of a cache in tiers on the device: the two halves of a layer's step, and the moving
of blocks in and out.

A slot is a place for one block on the device. A row's table says in which slot each of its blocks
is, -1 for none. The compressed keys of all pages of a row lie one after another. The window's keys
lie in a ring of pages for each row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from attention.cache.paged import PagedCache, attend_chosen, choose_pages, write
from attention.cache.tables import Pages, Tables
from attention.methods.method import Keys, LayerPages, Pair, Parameters, Rotate
from pallas_kernels.tokens import Tokens, sequences


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TierRows:
    """The rows of a step."""

    # The slot of every block, -1 for none.
    slots: Int[Array, "B P"]
    # Tokens of each row, counting the new ones.
    lengths: Int[Array, " B"]
    # The document of every block, or TAIL.
    documents: Int[Array, "B P"]
    # The places of the new tokens, -1 for padding.
    places: Int[Array, "B T"]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of a layer."""

    # How keys are rotated, as for ``paged.write``.
    rotate: Rotate
    # Pages of a row's window.
    ring: int
    # Tokens of a block.
    page: int

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def first(self, cache: PagedCache, rows: TierRows, q, new: Keys, parameters: Parameters):
        """(the cache with the new tokens, what ``choose_pages`` found, the chosen blocks)."""
        pages, q_tokens = self._pages(rows)
        cache = write(
            cache, 0, pages.tables, rows.places, new, parameters=parameters, rotate=self.rotate
        )
        # Without the barrier XLA would write twice, once for the result and once for what reads it,
        # and would copy the keys to do so.
        cache = jax.lax.optimization_barrier(cache)
        return cache, *choose_pages(cache, 0, q, q_tokens, pages)

    @functools.partial(jax.jit, static_argnums=0)
    def second(self, cache: PagedCache, rows: TierRows, q, found, picks, inputs, out, queries):
        """``out`` with the results of those queries whose chosen blocks are on the device.

        queries: bool [B, T], which ones these are.
        """
        pages, q_tokens = self._pages(rows)
        result = attend_chosen(cache, 0, q, q_tokens, pages, found, picks, inputs=inputs)
        return jnp.where(queries[..., None, None], result, out)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def load(self, cache: PagedCache, row, first, document: LayerPages) -> tuple[PagedCache, Pair]:
        """Puts a document into a row from page ``first`` on.

        Returns (the cache with what always stays on the device, the document's blocks rotated).
        """
        pages = dict(cache.layers[0])
        tiers = cache.methods[0].tiers()
        rows = self._rows(cache)
        for name, pair in document.items():
            if tiers[name] == "all":
                pages[name] = self._load_all(pages[name], pair, rows, row, first)
            elif tiers[name] == "recent":
                pages[name] = self._load_recent(pages[name], pair, row, first)
        main = self._turned(document["main"], first, pages["main"][0].dtype)
        return cache.with_layer(0, pages), main

    def _load_all(self, old: Pair, pair: Pair, rows: int, row, first) -> Pair:
        """Writes arrays of which all pages of a row are kept, one after another."""
        at = (row * (old[0].shape[0] // rows) + first, 0, 0, 0)
        new = self._turned(pair, first, old[0].dtype)
        update = jax.lax.dynamic_update_slice
        return tuple(update(x, y, at) for x, y in zip(old, new, strict=True))

    def _load_recent(self, old: Pair, pair: Pair, row, first) -> Pair:
        """Writes arrays of which only the last pages of a row are kept, in a ring."""
        count = pair[0].shape[0]
        late = min(count, self.ring)  # pages that are still in the ring afterwards
        new = self._turned(pair, first, old[0].dtype)
        ring = row * self.ring + (first + jnp.arange(count - late, count)) % self.ring
        return tuple(x.at[ring].set(y[count - late :]) for x, y in zip(old, new, strict=True))

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def clear(self, cache: PagedCache, row) -> PagedCache:
        """The cache with zeros in everything that a row keeps on the device, except its blocks.

        What is there may not be finite.
        """
        rows = self._rows(cache)

        def zero(pair: Pair) -> Pair:
            return tuple(
                x.reshape(rows, -1, *x.shape[1:]).at[row].set(0).reshape(x.shape) for x in pair
            )

        tiers = cache.methods[0].tiers()
        pages = {
            name: pair if tiers[name] == "chosen" else zero(pair)
            for name, pair in cache.layers[0].items()
        }
        return cache.with_layer(0, pages)

    def _rows(self, cache: PagedCache) -> int:
        """The number of rows that the cache holds."""
        tiers = cache.methods[0].tiers()
        recent = next(name for name, kind in tiers.items() if kind == "recent")
        return cache.layers[0][recent][0].shape[0] // self.ring

    def _turned(self, pages: Pair, first, dtype) -> Pair:
        """Keys and values of pages from page ``first`` of a row on, with the keys rotated.

        A key that stands for several tokens is rotated by the position of the last of them.
        """
        k, v = pages
        count, heads, each, size = k.shape
        # tokens for each key of a page: 1, or the stride of compressed keys
        every = self.page // each
        positions = first * self.page + (jnp.arange(count * each) + 1) * every - 1
        k = self.rotate(k.transpose(0, 2, 1, 3).reshape(1, -1, heads, size), positions[None])
        return k.reshape(count, each, heads, size).transpose(0, 2, 1, 3).astype(dtype), v.astype(
            dtype
        )

    def _pages(self, rows: TierRows) -> tuple[Pages, Tokens]:
        """The rows as attention sees them, and the tokens of the queries."""
        count, pages = rows.slots.shape
        # page ``number`` of a row is in its ring only while it is one of the last ``ring`` pages
        number = jnp.arange(pages)[None]
        last = (rows.lengths[:, None] - 1) // self.page
        recent = jnp.arange(count)[:, None] * self.ring + number % self.ring
        recent = jnp.where((number > last - self.ring) & (number <= last), recent, -1)
        tokens = sequences(rows.lengths, pages * self.page)
        tokens = dataclasses.replace(
            tokens, documents=jnp.repeat(rows.documents, self.page, axis=1)
        )
        found = Pages(Tables(rows.slots, recent, None), tokens, tokens.order)
        return found, found.at(rows.places)[0]


@jax.jit
def take(main: Pair, slots: Int[Array, " n"]) -> Pair:
    """The blocks in some slots."""
    return tuple(x[slots] for x in main)


@functools.partial(jax.jit, donate_argnums=0)
def place(main: Pair, slots: Int[Array, " n"], parts: Sequence[Pair]) -> Pair:
    """Puts n blocks into their slots; a block for a slot past the end is dropped.

    parts: the blocks, each by itself or several stacked together.
    """

    def put(x, *parts):
        return x.at[slots].set(
            jnp.concatenate([y.reshape(-1, *x.shape[1:]) for y in parts]), mode="drop"
        )

    return tuple(put(x, *ys) for x, *ys in zip(main, *parts, strict=True))
