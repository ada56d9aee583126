"""A slow mixture of experts for tests: a loop over tokens and their experts, as the papers write it
(DeepSeek-V3, 2412.19437, equations 12 to 16; Qwen3, 2505.09388).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from models.layers import Layers


def mixture(layer: Layers, y: jax.Array, real: np.ndarray) -> jax.Array:
    """What ``moe.feed_forward`` computes, [B, T, D]."""
    rows = [
        jnp.stack([token(layer, y[row, at], real[row, at]) for at in range(y.shape[1])])
        for row in range(y.shape[0])
    ]
    return jnp.stack(rows)


def token(layer: Layers, y: jax.Array, real: bool) -> jax.Array:
    """One token [D]."""
    moe = layer.moe
    out = jnp.zeros_like(y)
    if moe.shared:
        out = out + swiglu(y, layer.gate[...], layer.up[...], layer.down[...])
    if not real:
        return out
    logits = y @ layer.router[...]
    if moe.scores == "softmax":
        scores = jnp.exp(logits - jnp.max(logits))
        scores = scores / jnp.sum(scores)
    else:
        scores = 1 / (1 + jnp.exp(-logits))
    chosen = choose(layer, np.asarray(jax.lax.stop_gradient(scores)))
    total = sum(scores[expert] for expert in chosen) if moe.normalise else 1.0
    for expert in chosen:
        matrices = (layer.expert_gate, layer.expert_up, layer.expert_down)
        result = swiglu(y, *(matrix[...][expert] for matrix in matrices))
        out = out + moe.scale * scores[expert] / total * result
    return out


def choose(layer: Layers, scores: np.ndarray) -> list[int]:
    """The numbers of the experts of a token with these scores [E]."""
    moe = layer.moe
    ranks = scores + (
        np.asarray(jax.lax.stop_gradient(layer.router_bias[...])) if moe.ranking_bias else 0
    )
    size = moe.experts // moe.groups
    groups = [range(group * size, (group + 1) * size) for group in range(moe.groups)]
    if moe.active_groups < moe.groups:
        groups.sort(key=lambda group: sum(sorted(ranks[expert] for expert in group)[-2:]))
        groups = groups[-moe.active_groups :]
    allowed = [expert for group in groups for expert in group]
    return sorted(allowed, key=lambda expert: ranks[expert])[-moe.active :]


def swiglu(y: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """A feed-forward part."""
    hidden = y @ gate
    return (hidden / (1 + jnp.exp(-hidden)) * (y @ up)) @ down
