"""Tables that say which page of a cache holds which part of a row.

A row's table lists its pages: the token at place p lies in page table[p // page] at p % page.

A row may hold documents: runs of tokens that see only themselves and fill whole pages. ``Runs``
says what every page of such a row holds.

Dimensions: B rows, T tokens, P pages of a table, S = P page places.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.paged.lists import lookup
from pallas_kernels.tokens import Tokens, sequences


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Runs:
    """The content of each page of rows with documents. A page has tokens of one run only."""

    # The number of the page's document, from 1, or TAIL for tokens outside of documents. 0
    # throughout in a row that is nothing but one document, or one sequence without any.
    documents: Int[Array, "B P"]
    # Tokens of the page. The places behind them are padding, which nobody sees. The whole page for
    # the last page that a row has begun: its tokens end where the row does.
    filled: Int[Array, "B P"]
    # The place of each token of the page, less the position that RoPE rotates it by.
    shifts: Int[Array, "B P"]

    def positions(self, places: Int[Array, "B T"], page: int) -> Int[Array, "B T"]:
        """The positions that RoPE rotates by; 0 for a place of -1."""
        shifts = lookup(self.shifts, jnp.where(places < 0, -1, places // page))
        return jnp.where(places < 0, 0, places - shifts)

    def together(
        self, first: Int[Array, "B T"], last: Int[Array, "B T"], page: int
    ) -> Bool[Array, "B T"]:
        """True where two places of neighbouring pages, or of one, are of the same run."""
        # Between two runs outside of documents there is a document, so neighbouring pages of equal
        # numbers are of one run.
        return lookup(self.documents, first // page) == lookup(self.documents, last // page)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """Rows of a paged cache as attention sees them."""

    # The pages of each row, -1 for none.
    tables: Int[Array, "B P"]
    # The token in every place, segment 0 where it is empty. A token's order is its place.
    tokens: Tokens
    # The positions that RoPE rotates by.
    positions: Int[Array, "B S"]
    # What every page of the tables holds; None where no row has documents.
    runs: Runs | None = None

    @property
    def filled(self) -> Int[Array, "B P"] | None:
        """``Runs.filled``; None where no row has documents."""
        return None if self.runs is None else self.runs.filled

    def at(self, places: Int[Array, "B T"]) -> tuple[Tokens, Int[Array, "B T"]]:
        """(tokens, positions) of the given places; segment 0 where the place is -1."""

        def take(x):
            return jnp.where(places < 0, 0, jnp.take_along_axis(x, jnp.maximum(places, 0), axis=1))

        return self.tokens.map(take), take(self.positions)


def sequence_pages(
    tables: Int[Array, "B P"], lengths: Int[Array, " B"], page: int, runs: Runs | None = None
) -> Pages:
    """Rows that hold one sequence each.

    lengths: places of each row, counting those that are about to be written. runs: what their pages
    hold, where they may have documents.
    """
    tokens = sequences(lengths, tables.shape[1] * page)
    if runs is None:
        return Pages(tables, tokens, tokens.order)

    def each(x):
        return jnp.repeat(x, page, axis=1)

    padding = tokens.order % page >= each(runs.filled)
    tokens = dataclasses.replace(
        tokens,
        segments=jnp.where(padding, 0, tokens.segments),
        documents=each(runs.documents),
    )
    return Pages(tables, tokens, tokens.order - each(runs.shifts), runs)
