"""The loss of indexers that choose keys (``attention.indexer``): their divergence from attention.

It is the mean over the tokens of a batch and over the layers whose indexers learn, times
``DSA.index_loss``. It reaches the parameters of indexers alone, and nothing else reaches these.

Dimensions: L layers whose indexers learn, B rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_code.learner.objective import Terms


def with_divergence(
    value: jax.Array,
    terms: Terms,
    model: Any,
    divergence: Float[Array, "L B"] | None,
    tokens: jax.Array,
) -> tuple[jax.Array, Terms]:
    """The loss and the terms of a micro-batch with those of its indexers added.

    divergence: sums over tokens in nats; None for a model without such layers. tokens: of the whole
    batch, all that are no padding. The metric indexer/loss is without its weight.
    """
    if divergence is None:
        return value, terms
    indexers = [method for method in model.config.attention if method.indexes]
    weight = max(method.index_loss for method in indexers)  # those that learn have the same
    loss = jnp.sum(jnp.mean(divergence, axis=0)) / tokens
    means = {"indexer/loss": jax.lax.stop_gradient(loss)}
    return value + weight * loss, dataclasses.replace(terms, means=terms.means | means)
