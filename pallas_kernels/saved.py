"""Names of results that a backward pass may keep while it computes all others again.

``jax.checkpoint`` finds them by its policies for names (``ModelConfig.remat_keeps``). A name alone
changes nothing of a compiled program.
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

# The result of attention and the log-sum-exps of its scores: with both, the backward pass runs no
# forward kernel.
ATTENTION = "attention"
# Results of the products with a layer's matrices.
PRODUCT = "product"


def attended(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of attention, under their name."""
    return checkpoint_name(out, ATTENTION), checkpoint_name(lse, ATTENTION)
