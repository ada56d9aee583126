"""The places of the new tokens of a layer in its pages, and the writing itself.

Dimensions: B rows, T new tokens, P pages of a table, K key/value heads, H head size.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention.cache.tables import Runs
from attention.keys import Pair, Rotate
from pallas_kernels.paged.reference import put, where


@dataclasses.dataclass(frozen=True)
class PageWriter:
    """The places of a layer's new tokens in its pages."""

    # The pages of each row, -1 for none.
    tables: Int[Array, "B P"]
    # Consecutive in a row, then -1 for padding, which is not written.
    places: Int[Array, "B T"]
    # Tokens of a page.
    page: int
    # How keys are rotated by positions.
    rotate: Rotate
    # What the pages hold; None where no row has documents.
    runs: Runs | None = None

    @property
    def first(self) -> Int[Array, "B 1"]:
        """The first place of every row."""
        return self.places[:, :1]

    @property
    def last(self) -> Int[Array, "B 1"]:
        """The last place of every row, -1 in a row of padding."""
        return jnp.max(self.places, axis=1, keepdims=True)

    def positions(self, places: Int[Array, "B n"]) -> Int[Array, "B n"]:
        """The positions that RoPE rotates by."""
        return places if self.runs is None else self.runs.positions(places, self.page)

    def one_run(self, last: Int[Array, "B n"], length: int) -> Bool[Array, "B n"] | bool:
        """True if ``length`` places, at most a page, up to ``last`` are of one run.

        A run is a document, or tokens outside of documents that no document interrupts.
        """
        if self.runs is None:
            return True
        return self.runs.together(last - length + 1, last, self.page)

    def where(self, places: Int[Array, "B n"]):
        """(page, offset) [B, n] of places; NO_PAGE where nothing is to be read or written."""
        return where(self.tables, places, self.page)

    def put(self, pages: Pair, new: Pair) -> Pair:
        """Pages [pages, K, page, H] with the new keys and values [B, T, K, H] in their places."""
        return put(pages, new, *self.where(self.places))

    def put_whole(
        self, pages: Shaped[Array, "pages K page H"], new: Float[Array, "B T K H"]
    ) -> jax.Array:
        """Pages with arrays that are keys and values at once, written as they are."""
        page, offset = self.where(self.places)
        return pages.at[page, :, offset].set(new.astype(pages.dtype), mode="drop")

    def touched(self):
        """(pages that were written to [B, n], their first places [B, n]); NO_PAGE for none."""
        # T consecutive places touch at most this many pages
        count = (self.places.shape[1] + self.page - 2) // self.page + 1
        starts = (self.first // self.page + jnp.arange(count)) * self.page
        page, _ = self.where(jnp.where(starts <= self.last, starts, -1))
        return page, starts
