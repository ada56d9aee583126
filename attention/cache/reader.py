"""Reading a layer's pages.

Few queries read the pages that they need from where they lie. For many queries all pages of a row
are laid side by side.

Dimensions: B rows, T queries, P pages of a table, S = P page places, N query heads, K key/value
heads, H head size.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention.blocks import Blocks, in_place
from attention.blockwise import dense_attention
from attention.cache.tables import Pages
from attention.methods.method import Pair, Rotate
from pallas_kernels.paged.api import paged_attention, selected_paged_attention
from pallas_kernels.paged.lists import Turns, lookup, turn_rows, turns_of
from pallas_kernels.softmax import masked_attention
from pallas_kernels.tokens import Tokens, visible

# Most queries of a row that read their own pages each.
FEW = 16


@dataclasses.dataclass(frozen=True)
class PageReader:
    """Keys and values of a layer's pages, with the keys rotated.

    Empty places read as zeros. What a page held there before may not be finite, and 0 times it
    would be NaN.
    """

    # The rows' tables, and the tokens of their places.
    pages: Pages
    # Tokens of a page.
    page: int
    # How keys are rotated on use; None in a cache of rotated keys.
    rotate: Rotate | None
    # The dtype of the queries, in which keys and values are given.
    dtype: jnp.dtype

    def rows(self, pair: Pair, table: Int[Array, "B P"] | None = None) -> Pair:
        """Keys and values at all places of the rows, [B, S, K, H].

        table: the table of these arrays; None for that of "main".
        """
        table = self.pages.tables.main if table is None else table
        k, v = (self.joined(x, table, self.pages.tokens) for x in pair)
        if self.rotate is not None:
            k = self.rotate(k, self.pages.positions)
        return k, v

    def joined(
        self,
        x: Float[Array, "pages K each H"],
        table: Int[Array, "B P"] | None,
        tokens: Tokens,
    ) -> Float[Array, "B S K H"]:
        """The pages of every row side by side, zeros where ``tokens`` [B, S] are empty.

        table: None where each row's pages lie one after another and are finite.
        """
        batch = tokens.shape[0]
        x = x.reshape(batch, -1, *x.shape[1:]) if table is None else x[jnp.maximum(table, 0)]
        x = x.transpose(0, 1, 3, 2, 4)
        x = x.reshape(batch, -1, *x.shape[3:]).astype(self.dtype)
        return x if table is None else jnp.where((tokens.segments > 0)[..., None, None], x, 0)

    def dense(
        self,
        pair: Pair,
        q: Float[Array, "B T N H"],
        q_tokens: Tokens,
        window: int | None = None,
        table: Int[Array, "B P"] | None = None,
    ) -> Float[Array, "B T N H"]:
        """Attention to every place that a query may see, perhaps in a window."""
        table = self.pages.tables.main if table is None else table
        if q.shape[1] > FEW:
            k, v = self.rows(pair, table)
            return dense_attention(q, k, v, q_tokens, self.pages.tokens, window=window)[0]
        return self._few(pair, q, q_tokens, window, table, (self, table))

    def _few(
        self,
        pair: Pair,
        q: Float[Array, "B T N H"],
        q_tokens: Tokens,
        window: int | None,
        table: Int[Array, "B P"],
        part: tuple[PageReader, Int[Array, "B p"]],
    ) -> Float[Array, "B T N H"]:
        """``dense`` of few queries: a kernel reads the pages that they need from where they lie.

        part: the reader of the pages that are laid side by side where no kernel rotates keys, and
        their table.
        """
        rows = (table, *self._sequences(q_tokens))
        if self.rotate is None:
            return paged_attention(q, *pair, *rows, window=window, filled=self.pages.filled)[0]

        def in_xla():
            read, own_table = part
            k, v = read.rows(pair, own_table)
            return masked_attention(q, k, v, visible(q_tokens, read.pages.tokens, window))

        how = self._unrotated(q_tokens, q.shape[3])
        return paged_attention(q, *pair, *rows, window=window, **how, fallback=in_xla)[0]

    def windowed(
        self, pair: Pair, q: Float[Array, "B T N H"], q_tokens: Tokens, window: int
    ) -> Float[Array, "B T N H"]:
        """``dense`` in a window, by the table of recent pages.

        Reads only the pages that hold the last ``window`` keys of some query.
        """
        recent = self._recent_pages(q_tokens, window)
        recent_table = recent.pages.tables.recent
        if q.shape[1] > FEW:
            return recent.dense(pair, q, q_tokens, window, recent_table)
        # the paged kernel skips the other pages itself
        table = self.pages.tables.recent
        return self._few(pair, q, q_tokens, window, table, (recent, recent_table))

    def chosen(
        self,
        pair: Pair,
        q: Float[Array, "B T N H"],
        q_tokens: Tokens,
        picks: Int[Array, "B T C n"],
    ) -> Float[Array, "B T N H"]:
        """``selected_attention`` over pages; only the chosen ones are read.

        picks: numbers of pages. C is K or N, as there.
        """
        rows = (self.pages.tables.main, *self._sequences(q_tokens))
        if self.rotate is None:
            filled = self.pages.filled
            return selected_paged_attention(q, *pair, picks, *rows, filled=filled)[0]
        in_xla = functools.partial(self._chosen, pair, q, q_tokens, picks)
        how = self._unrotated(q_tokens, q.shape[3])
        return selected_paged_attention(q, *pair, picks, *rows, **how, fallback=in_xla)[0]

    def _chosen(
        self, pair: Pair, q: Float[Array, "B T N H"], q_tokens: Tokens, picks
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
        """``chosen`` in XLA, of keys that are not rotated: (out, lse)."""
        batch, count, num_heads, size = q.shape
        # Keys are rotated on use, so each query's chosen pages are laid side by side and rotated.
        # The places of a pick that is none are all -1.
        choosers = picks.shape[2]
        places = jnp.where(picks < 0, -self.page, picks * self.page)[..., None]
        places = jnp.maximum(places + jnp.arange(self.page), -1)
        places = places.reshape(batch, -1)  # [B, T C n page]
        tokens, positions = self.pages.at(places)
        flat = (batch * count * choosers, -1)
        seen = (places >= 0) & (tokens.segments > 0)
        seen = seen.reshape(batch, count, -1) & (
            tokens.order.reshape(batch, count, -1) <= q_tokens.order[..., None]
        )
        heads = jnp.arange(choosers) * pair[0].shape[1] // choosers
        at = jnp.maximum(lookup(self.pages.tables.main, picks), 0)
        real = (tokens.segments > 0).reshape(*flat, 1, 1)
        k, v = (
            jnp.where(real, x[at, heads[:, None]].reshape(*flat, 1, size).astype(q.dtype), 0)
            for x in pair
        )
        assert self.rotate is not None  # nobody else asks
        k = self.rotate(k, positions.reshape(flat))
        q = q.reshape(flat[0], 1, -1, size)
        out, lse = masked_attention(q, k, v, seen.reshape(flat)[:, None])
        return out.reshape(batch, count, num_heads, size), lse.reshape(batch, count, num_heads)

    def blocks(self, q_tokens: Tokens) -> Blocks:
        """The pages as blocks to choose from."""
        # rows of a cache have no copied prompts: no branch has blocks of its own
        most = jnp.full(q_tokens.shape, jnp.iinfo(jnp.int32).max)
        return dataclasses.replace(
            in_place(self.pages.tokens, self.page), own_from=most, causal=False
        )

    def _sequences(self, q_tokens: Tokens) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
        """(places of the queries, -1 for padding; where the tokens of each row end)."""
        places = jnp.where(q_tokens.segments > 0, q_tokens.order, -1)
        real = self.pages.tokens.segments > 0
        if self.pages.runs is None and self.rotate is None:
            return places, jnp.sum(real, axis=1, dtype=jnp.int32)
        # places before the last one may be empty
        return places, jnp.max(jnp.where(real, self.pages.tokens.order + 1, 0), axis=1)

    def _unrotated(self, q_tokens: Tokens, size: int) -> dict[str, Any]:
        """Rotation tables of a paged kernel for rows whose keys are not rotated.

        size: of a head.
        """
        tokens = self.pages.tokens
        pages = tokens.shape[1] // self.page
        real = (tokens.segments > 0).reshape(-1, pages, self.page)
        # A query of a document sees the document alone, from its first place on; all others see
        # from the row's start. In a cache no document follows tokens that all may see.
        own = tokens.documents[:, None] == q_tokens.documents[..., None]
        first = jnp.argmax(own, axis=-1).astype(jnp.int32)
        table = turns_of(self.rotate, turn_rows(pages, self.page), size)
        return {
            "filled": jnp.sum(real, axis=2, dtype=jnp.int32),
            "firsts": jnp.where(q_tokens.documents > 0, first, 0),
            "turns": Turns(table, self.pages.positions[:, :: self.page]),
        }

    def _recent_pages(self, q_tokens: Tokens, window: int) -> PageReader:
        """The reader of the pages that hold the last ``window`` keys of some query."""
        # T consecutive queries see this many places together; unaligned, they touch ``count`` pages
        span = window + q_tokens.shape[1] - 1
        count = (span + self.page - 2) // self.page + 1
        if count >= self.pages.tables.recent.shape[1]:
            return self
        return self._part(jnp.maximum(q_tokens.order[:, 0] - window + 1, 0) // self.page, count)

    def _part(self, first: Int[Array, " B"], count: int) -> PageReader:
        """The reader of ``count`` pages from page ``first`` of each table."""
        index = first[:, None] + jnp.arange(count)
        tables = jax.tree.map(lambda x: lookup(x, index), self.pages.tables)
        # a page that is none starts so far below 0 that the maximum makes all its places -1
        places = jnp.where(tables.recent < 0, -self.page, index * self.page)[..., None]
        places = jnp.maximum(places + jnp.arange(self.page), -1).reshape(index.shape[0], -1)
        return dataclasses.replace(self, pages=Pages(tables, *self.pages.at(places)))
