"""Reading a layer's pages.

Few queries read the pages that they need from where they lie. For many queries all pages of a row
are laid side by side.

Dimensions: B rows, T queries, P pages of a table, S = P page places, N query heads, K key/value
heads, H head size.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention.blocks import Blocks, in_place
from attention.blockwise import dense_attention
from attention.cache.tables import Pages
from attention.cache.writer import PageWriter
from attention.keys import Pair
from pallas_kernels.latent.api import latent_attention
from pallas_kernels.paged.api import append_attention, paged_attention, selected_paged_attention
from pallas_kernels.paged.lists import lookup
from pallas_kernels.tokens import Tokens

# Most queries of a row that read their own pages each.
FEW = 16


@dataclasses.dataclass(frozen=True)
class PageReader:
    """Keys and values of a layer's pages.

    Empty places read as zeros. What a page held there before may not be finite, and 0 times it
    would be NaN.
    """

    # The rows' tables, and the tokens of their places.
    pages: Pages
    # Tokens of a page.
    page: int
    # The dtype of the queries, in which keys and values are given.
    dtype: jnp.dtype

    @staticmethod
    def few(q: Float[Array, "B T N H"]) -> bool:
        """True for queries so few that they read their pages from where they lie."""
        return q.shape[1] <= FEW

    def rows(self, pair: Pair) -> Pair:
        """Keys and values at all places of the rows, [B, S, K, H]."""
        k, v = (self.joined(x, self.pages.tokens) for x in pair)
        return k, v

    def joined(self, x: Float[Array, "pages K each H"], tokens: Tokens) -> Float[Array, "B S K H"]:
        """The pages of every row side by side, zeros where ``tokens`` [B, S] are empty."""
        x = x[jnp.maximum(self.pages.tables, 0)].transpose(0, 1, 3, 2, 4)
        x = x.reshape(tokens.shape[0], -1, *x.shape[3:]).astype(self.dtype)
        return jnp.where((tokens.segments > 0)[..., None, None], x, 0)

    def dense(
        self,
        pair: Pair,
        q: Float[Array, "B T N H"],
        q_tokens: Tokens,
        window: int | None = None,
    ) -> Float[Array, "B T N H"]:
        """Attention to every place that a query may see, perhaps in a window."""
        return self.dense_lse(pair, q, q_tokens, window)[0]

    def dense_lse(
        self,
        pair: Pair,
        q: Float[Array, "B T N H"],
        q_tokens: Tokens,
        window: int | None = None,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
        """``dense``, and the log-sum-exp of the logits, float32."""
        if not self.few(q):
            k, v = self.rows(pair)
            return dense_attention(q, k, v, q_tokens, self.pages.tokens, window=window)
        # a kernel reads the pages that the queries need from where they lie
        rows = (self.pages.tables, *self._sequences(q_tokens))
        return paged_attention(q, *pair, *rows, window=window, filled=self.pages.filled)

    def latent(
        self,
        kept: Float[Array, "pages 1 page E"],
        rank: int,
        q: Float[Array, "B T N E"],
        q_tokens: Tokens,
    ) -> Float[Array, "B T N V"]:
        """Attention of few queries to every vector that they may see, whose first ``rank`` elements
        are the value.
        """
        rows = (self.pages.tables, *self._sequences(q_tokens))
        return latent_attention(q, kept, rank, *rows, filled=self.pages.filled)[0]

    def append_lse(
        self,
        pair: Pair,
        new: Pair,
        at: PageWriter,
        q: Float[Array, "B T N H"],
        q_tokens: Tokens,
        window: int | None = None,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"], Pair]:
        """``dense_lse`` of new tokens whose keys and values are to be written first, and the pages
        with them.

        new: [B, T, K, H], of the rows of ``at``.
        """
        if at.places.shape[1] != 1 or q.shape[1] != 1:
            # tokens see those of their row before them, which all have to be there
            pair = at.put(pair, new)
            reader = self if window is None else self.in_window(q, q_tokens, window)
            return *reader.dense_lse(pair, q, q_tokens, window), pair
        rows = (self.pages.tables, at.places)
        filled = self.pages.filled
        out, lse, k, v = append_attention(q, *pair, *new, *rows, window=window, filled=filled)
        return out, lse, (k, v)

    def windowed(
        self, pair: Pair, q: Float[Array, "B T N H"], q_tokens: Tokens, window: int
    ) -> Float[Array, "B T N H"]:
        """``dense`` in a window; reads only the pages that hold the last ``window`` keys of some
        query.
        """
        return self.in_window(q, q_tokens, window).dense(pair, q, q_tokens, window)

    def in_window(self, q: Float[Array, "B T N H"], q_tokens: Tokens, window: int) -> PageReader:
        """The reader of the pages that queries with a window need."""
        # the paged kernel, which few queries take, skips the other pages itself
        return self if self.few(q) else self._recent_pages(q_tokens, window)

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
        rows = (self.pages.tables, *self._sequences(q_tokens))
        return selected_paged_attention(q, *pair, picks, *rows, filled=self.pages.filled)[0]

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
        if self.pages.runs is None:
            return places, jnp.sum(real, axis=1, dtype=jnp.int32)
        # places before the last one may be empty
        return places, jnp.max(jnp.where(real, self.pages.tokens.order + 1, 0), axis=1)

    def _recent_pages(self, q_tokens: Tokens, window: int) -> PageReader:
        """The reader of the pages that hold the last ``window`` keys of some query."""
        # T consecutive queries see this many places together; unaligned, they touch ``count`` pages
        span = window + q_tokens.shape[1] - 1
        count = (span + self.page - 2) // self.page + 1
        if count >= self.pages.tables.shape[1]:
            return self
        return self._part(jnp.maximum(q_tokens.order[:, 0] - window + 1, 0) // self.page, count)

    def _part(self, first: Int[Array, " B"], count: int) -> PageReader:
        """The reader of ``count`` pages from page ``first`` of each table."""
        index = first[:, None] + jnp.arange(count)
        tables = lookup(self.pages.tables, index)
        # a page that is none starts so far below 0 that the maximum makes all its places -1
        places = jnp.where(tables < 0, -self.page, index * self.page)[..., None]
        places = jnp.maximum(places + jnp.arange(self.page), -1).reshape(index.shape[0], -1)
        return dataclasses.replace(self, pages=Pages(tables, *self.pages.at(places)))
