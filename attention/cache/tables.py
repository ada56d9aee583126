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
    """Which page of each array a page of a row is, -1 for none; the same for all arrays unless the
    cache is in tiers.
    """

    # Of "main".
    main: Int[Array, "B P"]
    # Of the arrays that only the last pages of a row need: the window's keys, and those to be
    # compressed.
    recent: Int[Array, "B P"]
    # Of the compressed keys. None where each row's lie one after another and what a row has not
    # written is finite.
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
    # Of every place, segment 0 where it is empty; a token's order is its place.
    tokens: Tokens
    # Those that RoPE rotates by.
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
