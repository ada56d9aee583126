"""Attention of new tokens to a paged cache, by every method.

Few queries (decoding) read the pages that they attend to and no others: those of the window, and
under NSA and MoBA those chosen; in a cache of rotated keys ``pallas_kernels.paged`` reads them,
from where they lie. Many queries (a chunk of a prompt) read their sequences' pages once and attend
as in training.

Dimensions: B rows, T queries, P pages of a table, S = P page places, N query heads, K key/value
heads, H head size.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention.blocks import Blocks, Entries, entries, in_place
from attention.cache.paged import LayerPages, PagedCache, Pair, Rotate, Tables, lookup
from attention.dense import dense_attention
from attention.methods import Dense, Window
from attention.moba import MoBA, moba_attention, pick_blocks
from attention.nsa import NSA, compressed_attention, gated, nsa_attention
from attention.squid import GatedDocuments, gated_documents
from pallas_kernels.paged.api import paged_attention, selected_paged_attention
from pallas_kernels.softmax import masked_attention
from pallas_kernels.tokens import Tokens, sequences, visible

# Most queries of a row that read their own pages each.
FEW = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """Rows of a paged cache as attention sees them.

    tokens: of every place, segment 0 where it is empty; a token's order is its place. positions:
    those that RoPE rotates by.
    """

    tables: Tables
    tokens: Tokens
    positions: Int[Array, "B S"]

    def at(self, places: Int[Array, "B T"]) -> tuple[Tokens, Int[Array, "B T"]]:
        """(tokens, positions) of the given places; segment 0 where the place is -1."""

        def take(x):
            return jnp.where(places < 0, 0, jnp.take_along_axis(x, jnp.maximum(places, 0), axis=1))

        return self.tokens.map(take), take(self.positions)


def sequence_pages(tables: Int[Array, "B P"], lengths: Int[Array, " B"], page: int) -> Pages:
    """Rows that hold one sequence each, of ``lengths`` tokens after what is about to be written."""
    tokens = sequences(lengths, tables.shape[1] * page)
    return Pages(Tables.same(tables), tokens, tokens.order)


def attend(
    cache: PagedCache,
    layer: int,
    q: Float[Array, "B T N H"],
    q_tokens: Tokens,
    pages: Pages,
    *,
    gates: Float[Array, "B T N parts"] | None = None,
    rotate: Rotate | None = None,
) -> Float[Array, "B T N H"]:
    """Attention to the cache, in which the queries' own keys have been written.

    q: rotated. q_tokens: of consecutive places in a row, padding at the end. gates: as in
    ``methods.attend``. rotate: for a cache of keys that are not rotated.
    """
    if not cache.rotated and rotate is None:
        raise ValueError("a cache of keys that are not rotated needs rotate")
    read = _Reader(cache, pages, None if cache.rotated else rotate, q.dtype)
    own = cache.layers[layer]
    method = cache.methods[layer]
    if isinstance(method, Dense):
        return _dense(read, own.main, pages.tables.main, q, q_tokens, None)
    if isinstance(method, GatedDocuments):
        return gated_documents(
            q, *read.rows(own.main, pages.tables.main), q_tokens, pages.tokens, gates
        )
    if isinstance(method, Window):
        return _windowed(read, own.main, q, q_tokens, method.window)
    if isinstance(method, MoBA):
        return _moba(read, own, q, q_tokens, method)
    if q.shape[1] > FEW:
        return _nsa(read, own, q, q_tokens, gates, method)
    out, picks = select(cache, layer, q, q_tokens, pages, rotate=rotate)
    return attend_selected(cache, layer, q, q_tokens, pages, out, picks, gates, rotate=rotate)


def select(
    cache: PagedCache,
    layer: int,
    q: Float[Array, "B T N H"],
    q_tokens: Tokens,
    pages: Pages,
    *,
    rotate: Rotate | None = None,
) -> tuple[Float[Array, "B T N H"], Int[Array, "B T K n"]]:
    """The first half of ``attend`` under NSA, which reads compressed keys only: (their result, the
    chosen pages).
    """
    read = _Reader(cache, pages, None if cache.rotated else rotate, q.dtype)
    method = cache.methods[layer]
    blocks = read.blocks(q_tokens)
    compressed, stretched = read.stretches(cache.layers[layer].compressed, blocks, method)
    out, _, picks = compressed_attention(q, *compressed, q_tokens, blocks, stretched, method)
    return out, picks


def attend_selected(
    cache: PagedCache,
    layer: int,
    q: Float[Array, "B T N H"],
    q_tokens: Tokens,
    pages: Pages,
    compressed: Float[Array, "B T N H"],
    picks: Int[Array, "B T K n"],
    gates: Float[Array, "B T N 3"],
    *,
    rotate: Rotate | None = None,
) -> Float[Array, "B T N H"]:
    """The second half: reads the chosen pages and those of the window, and adds the branches up."""
    read = _Reader(cache, pages, None if cache.rotated else rotate, q.dtype)
    own = cache.layers[layer]
    method = cache.methods[layer]
    selected = _chosen(read, own.main, q, q_tokens, picks)
    return gated(
        compressed, selected, _windowed(read, own.window, q, q_tokens, method.window), gates
    )


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Keys and values of a cache in the order of their places, keys rotated.

    Empty places read as zeros: what a page held before, which may not even be finite, must not
    count times 0.
    """

    cache: PagedCache
    pages: Pages
    rotate: Rotate | None
    dtype: jnp.dtype

    def rows(self, pair: Pair, tables: Int[Array, "B P"]) -> Pair:
        """All places of the tables, [B, S, K, H]."""
        k, v = (self._joined(x, tables, self.pages.tokens) for x in pair)
        if self.rotate is not None:
            k = self.rotate(k, self.pages.positions)
        return k, v

    def _joined(
        self, x: Float[Array, "pages K page H"], tables, tokens: Tokens
    ) -> Float[Array, "B S K H"]:
        batch = tokens.shape[0]
        x = x.reshape(batch, -1, *x.shape[1:]) if tables is None else x[jnp.maximum(tables, 0)]
        x = x.transpose(0, 1, 3, 2, 4)
        x = x.reshape(batch, -1, *x.shape[3:]).astype(self.dtype)
        return x if tables is None else jnp.where((tokens.segments > 0)[..., None, None], x, 0)

    def sequences(self, q_tokens: Tokens) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
        """(places of the queries, -1 for padding, lengths) of rows of one sequence, as all are with
        rotated keys.
        """
        places = jnp.where(q_tokens.segments > 0, q_tokens.order, -1)
        return places, jnp.sum(self.pages.tokens.segments > 0, axis=1, dtype=jnp.int32)

    def part(self, first: Int[Array, " B"], count: int) -> _Reader:
        """The reader of ``count`` pages from page ``first`` of each table."""
        index = first[:, None] + jnp.arange(count)
        tables = jax.tree.map(lambda x: lookup(x, index), self.pages.tables)
        places = jnp.where(tables.recent < 0, -self.cache.page, index * self.cache.page)[..., None]
        places = jnp.maximum(places + jnp.arange(self.cache.page), -1).reshape(index.shape[0], -1)
        return dataclasses.replace(self, pages=Pages(tables, *self.pages.at(places)))

    def blocks(self, q_tokens: Tokens) -> Blocks:
        """The pages as blocks."""
        most = jnp.full(q_tokens.shape, jnp.iinfo(jnp.int32).max)
        return dataclasses.replace(
            in_place(self.pages.tokens, self.cache.page), own_from=most, causal=False
        )

    def stretches(self, pair: Pair, blocks: Blocks, method: NSA) -> tuple[Pair, Entries]:
        """Compressed keys and values as they lie, in the order of their last tokens, [B, S /
        stride, K, H].
        """
        stretched = entries(blocks, method.length, method.stride).by_last(
            method.length // method.stride - 1
        )
        k, v = (self._joined(x, self.pages.tables.compressed, stretched.tokens) for x in pair)
        if self.rotate is not None:
            k = self.rotate(k, self.pages.positions[:, method.stride - 1 :: method.stride])
        return (k, v), stretched


def _dense(read: _Reader, pair: Pair, tables, q, q_tokens, window):
    few = q.shape[1] <= FEW
    if few and read.rotate is None:
        return paged_attention(q, *pair, tables, *read.sequences(q_tokens), window=window)[0]
    k, v = read.rows(pair, tables)
    if few:
        return masked_attention(q, k, v, visible(q_tokens, read.pages.tokens, window))[0]
    return dense_attention(q, k, v, q_tokens, read.pages.tokens, window=window)[0]


def _recent_pages(read: _Reader, q_tokens: Tokens, window: int) -> _Reader:
    """The reader of the pages that hold the last ``window`` keys of some query."""
    page = read.cache.page
    span = window + q_tokens.shape[1] - 1
    count = (span + page - 2) // page + 1
    if count >= read.pages.tables.recent.shape[1]:
        return read
    return read.part(jnp.maximum(q_tokens.order[:, 0] - window + 1, 0) // page, count)


def _windowed(read: _Reader, pair: Pair, q, q_tokens, window):
    if q.shape[1] > FEW or read.rotate is not None:
        read = _recent_pages(read, q_tokens, window)
    return _dense(read, pair, read.pages.tables.recent, q, q_tokens, window)


def _moba(read: _Reader, own: LayerPages, q, q_tokens, method):
    blocks = read.blocks(q_tokens)
    if own.means is None or q.shape[1] > FEW:
        return moba_attention(
            q, *read.rows(own.main, read.pages.tables.main), q_tokens, blocks, method
        )[0]
    means = own.means[jnp.maximum(read.pages.tables.main, 0)]
    return _chosen(read, own.main, q, q_tokens, pick_blocks(q, means, q_tokens, blocks, method))


def _nsa(read: _Reader, own: LayerPages, q, q_tokens, gates, method):
    """Many queries: whole rows."""
    blocks = read.blocks(q_tokens)
    window = _windowed(read, own.window, q, q_tokens, method.window)
    compressed, stretched = read.stretches(own.compressed, blocks, method)
    main = read.rows(own.main, read.pages.tables.main)
    return nsa_attention(q, compressed, main, window, gates, q_tokens, blocks, stretched, method)


def _chosen(
    read: _Reader,
    pair: Pair,
    q: Float[Array, "B T N H"],
    q_tokens: Tokens,
    picks: Int[Array, "B T C n"],
) -> Float[Array, "B T N H"]:
    """``selected_attention`` over pages of the tables; only those chosen are read. C: K or N, as
    there.
    """
    if read.rotate is None:
        return selected_paged_attention(
            q, *pair, picks, read.pages.tables.main, *read.sequences(q_tokens)
        )[0]
    batch, count, num_heads, size = q.shape
    page = read.cache.page
    choosers = picks.shape[2]
    places = jnp.where(picks < 0, -page, picks * page)[..., None] + jnp.arange(page)
    places = jnp.maximum(places, -1).reshape(batch, -1)  # [B, T C n page]
    tokens, positions = read.pages.at(places)
    flat = (batch * count * choosers, -1)
    seen = (places >= 0) & (tokens.segments > 0)
    seen = seen.reshape(batch, count, -1) & (
        tokens.order.reshape(batch, count, -1) <= q_tokens.order[..., None]
    )
    heads = jnp.arange(choosers) * pair[0].shape[1] // choosers
    at = jnp.maximum(lookup(read.pages.tables.main, picks), 0)
    real = (tokens.segments > 0).reshape(*flat, 1, 1)
    k, v = (
        jnp.where(real, x[at, heads[:, None]].reshape(*flat, 1, size).astype(q.dtype), 0)
        for x in pair
    )
    k = read.rotate(k, positions.reshape(flat))
    out, _ = masked_attention(q.reshape(flat[0], 1, -1, size), k, v, seen.reshape(flat)[:, None])
    return out.reshape(batch, count, num_heads, size)
