"""The load of experts: how it is measured, and the two ways to even it out.

By a loss: that of Switch Transformers (2101.03961, equations 4 to 6), whose mean over a batch is
E * sum_e f_e P_e. f_e is the share of the chosen experts that are expert e, P_e the mean of its
share of the scores. It is 1 where all experts have the same load.

By a bias (2408.15664, algorithm 1; DeepSeek-V3, 2412.19437): after an update the bias of an expert
with less than the mean load rises by ``MoE.balance_rate``, and that of one with more falls. The
bias is a parameter without a gradient. So checkpoints hold it, and samplers get it.

Departure: the loss is taken over each packed row by itself, as DeepSeek-V3 takes it over each
sequence (equations 17 to 20), and averaged over the tokens. It is then a sum over rows, and neither
the number of micro-batches nor that of devices changes the update. The bias is moved by the load of
the whole batch.

Dimensions: L layers with experts, B rows, E experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from models.moe import Routing
from rl_code.learner.objective import Terms

# Sums over the batch that ``finished`` makes metrics of.
_COUNTS, _ENTROPY, _LOSS = "experts_counts", "experts_entropy", "experts_loss"


def with_load(
    value: jax.Array, terms: Terms, model: Any, routing: Routing | None, tokens: jax.Array
) -> tuple[jax.Array, Terms]:
    """The loss and the terms of a micro-batch with those of its experts added.

    routing: of all layers with experts; None for a model without any. tokens: of the whole batch,
    all that are no padding.
    """
    if routing is None:
        return value, terms
    moe = model.config.moe
    experts = moe.experts
    # f and P of each row, times the number of its tokens
    chosen = jax.lax.stop_gradient(routing.counts) * (experts / moe.active)
    of_row = jnp.maximum(jnp.sum(routing.counts, axis=-1) / moe.active, 1.0)
    loss = jnp.sum(chosen * routing.shares, axis=-1) / of_row
    loss = jnp.sum(jnp.mean(loss, axis=0)) / tokens
    sums = {
        _COUNTS: jnp.sum(routing.counts, axis=1),
        _ENTROPY: jnp.sum(jnp.mean(routing.entropy, axis=0)) / tokens,
        _LOSS: loss,
    }
    terms = dataclasses.replace(terms, means=terms.means | jax.lax.stop_gradient(sums))
    return value + moe.balance_loss * loss, terms


def finished(terms: Terms) -> tuple[Terms, jax.Array | None]:
    """(The terms of a whole batch with metrics of the load, the load [L, E]; None without experts).

    experts/busiest: the load of the busiest expert over the mean load, the mean over layers;
    experts/busiest_layer: the greatest over layers. experts/entropy: of a token's shares of the
    scores, in nats, the mean over tokens and layers. experts/balance_loss: without its weight.
    """
    if _COUNTS not in terms.means:
        return terms, None
    means = dict(terms.means)
    counts = means.pop(_COUNTS)
    mean = jnp.maximum(jnp.mean(counts, axis=-1), 1e-9)
    busiest = jnp.max(counts, axis=-1) / mean
    means |= {
        "experts/busiest": jnp.mean(busiest),
        "experts/busiest_layer": jnp.max(busiest),
        "experts/entropy": means.pop(_ENTROPY),
        "experts/balance_loss": means.pop(_LOSS),
    }
    return dataclasses.replace(terms, means=means), counts


def moved(model: Any, counts: jax.Array | None) -> Any:
    """The model with its ranking biases moved by the load of a batch [L, E]."""
    if counts is None or not model.config.moe.balance_rate:
        return model
    error = jnp.mean(counts, axis=-1, keepdims=True) - counts
    model = jax.tree.map(lambda x: x, model)  # a copy, whose parameters can be exchanged
    bias = model.layers.router_bias
    step = model.config.moe.balance_rate * jnp.sign(error)
    bias[...] = bias[...] + step.astype(bias[...].dtype)
    return model
