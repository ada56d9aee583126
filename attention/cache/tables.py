"""Which page of a cache holds what of a row.

A row's table lists its pages: the token at place p lies in page table[p // page] at p % page.

Dimensions: B rows, T tokens, P pages of a table, S = P page places.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.tokens import Tokens, sequences


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """For each array of a layer, which of its pages are the pages of a row; -1 for none.

    The tables of all arrays are the same unless the cache is in tiers.
    """

    # The table of "main".
    main: Int[Array, "B P"]
    # The table of those arrays of which only the last pages of a row are needed: the window's keys,
    # and those to be compressed.
    recent: Int[Array, "B P"]
    # The table of the compressed keys. None where each row's pages lie one after another, and what
    # a row has not written is finite.
    compressed: Int[Array, "B P"] | None

    @classmethod
    def same(cls, tables: Int[Array, "B P"]) -> Tables:
        """One table for all arrays."""
        return cls(tables, tables, tables)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """Rows of a paged cache as attention sees them."""

    tables: Tables
    # The token in every place, segment 0 where it is empty. A token's order is its place.
    tokens: Tokens
    # The positions that RoPE rotates by.
    positions: Int[Array, "B S"]

    def at(self, places: Int[Array, "B T"]) -> tuple[Tokens, Int[Array, "B T"]]:
        """(tokens, positions) of the given places; segment 0 where the place is -1."""

        def take(x):
            return jnp.where(places < 0, 0, jnp.take_along_axis(x, jnp.maximum(places, 0), axis=1))

        return self.tokens.map(take), take(self.positions)


def sequence_pages(tables: Int[Array, "B P"], lengths: Int[Array, " B"], page: int) -> Pages:
    """Rows that hold one sequence each.

    lengths: tokens of each row, counting those that are about to be written.
    """
    tokens = sequences(lengths, tables.shape[1] * page)
    return Pages(Tables.same(tables), tokens, tokens.order)
