"""Results of an indexer for the layer that asked it.

Dimensions: B rows, T queries, M noted queries, n picks.
"""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Indexed:
    """Choice and divergence of a layer with an indexer, beside its result."""

    # The slots of whole rows, or the places of pages, that each query attends to, -1 for none; for
    # the layers that share them. None where every query attends to all that it sees.
    picks: Int[Array, "B T n"] | None = None
    # The divergence of each query in nats, float32, 0 for padding; None where it is not computed.
    loss: Float[Array, "B T"] | None = None
    # Where a sampler noted its picks, as ``picks.agreement`` tells it.
    agreement: Float[Array, "B M 1 2"] | None = None
