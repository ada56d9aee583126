"""Every method of attention, written as its definition, for the tests to compare with.

Each function takes one sequence and keeps every score in memory. It runs in float64 under
``jax.experimental.enable_x64``. Packed rows have no reference here; tests compare them with their
sequences one by one.

Dimensions: T tokens, N query heads, K key/value heads, G = N / K, H head size, E stretches, J
blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from pallas_kernels.tokens import TAIL


def attention_with_sinks(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    mask: Bool[Array, "N T S"],
    sinks: Float[Array, "T N"],
) -> Float[Array, "T N H"]:
    """Attention whose softmax has one more logit for each head (2508.10925, section 2.2)."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("tnh,snh->nts", q, k) / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    scores = jnp.where(mask, scores, -jnp.inf)
    scores = jnp.concatenate([scores, sinks.T[..., None]], axis=-1)
    return jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores, axis=-1)[..., :-1], v)


def attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    mask: Bool[Array, "N T S"],
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"], Float[Array, "N T S"]]:
    """(out, lse, probabilities) under a mask for each query head.

    A query that sees nothing has out 0 and lse -inf.
    """
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.where(
        mask, jnp.einsum("tnh,snh->nts", q, k) / jnp.sqrt(q.shape[-1]).astype(q.dtype), -jnp.inf
    )
    any_seen = mask.any(axis=-1, keepdims=True)
    probabilities = jax.nn.softmax(jnp.where(any_seen, scores, 0.0), axis=-1) * any_seen
    lse = jnp.where(
        any_seen[..., 0], jax.nn.logsumexp(jnp.where(any_seen, scores, 0.0), axis=-1), -jnp.inf
    )
    return jnp.einsum("nts,snh->tnh", probabilities, v), lse.T, probabilities


def causal(length: int, window: int | None = None) -> Bool[Array, "T T"]:
    """True where a query sees a key: the last ``window`` up to its own, or all of them."""
    back = jnp.arange(length)[:, None] - jnp.arange(length)[None]
    return (back >= 0) & (back < (window or length))


def dense(q, k, v, window: int | None = None) -> Float[Array, "T N H"]:
    """Causal or sliding-window attention."""
    return attention(q, k, v, causal(q.shape[0], window)[None])[0]


def compress(
    x: Float[Array, "T K H"],
    positions: Float[Array, "l H"],
    first: Float[Array, "l H F"],
    second: Float[Array, "F H"],
    config: NSA,
) -> Float[Array, "E K H"]:
    """The mean of every whole stretch, and what the MLP adds to it."""
    starts = np.arange(0, x.shape[0] - config.length + 1, config.stride)
    parts = x[starts[:, None] + np.arange(config.length)]
    hidden = jax.nn.gelu(jnp.einsum("elkh,lhf->ekf", parts + positions[:, None], first))
    return jnp.mean(parts, axis=1) + hidden @ second


def nsa_block_scores(
    probabilities: Float[Array, "K T E"], count: int, config: NSA
) -> Float[Array, "K T J"]:
    """Equation 9 with indices from 0: block j sums stretches (l'/d) j + m - n."""
    ratio = config.block // config.stride
    reach = config.length // config.stride
    times = np.zeros((probabilities.shape[-1], count))
    for j in range(count):
        for m in range(ratio):
            for n in range(reach):
                at = ratio * j + m - n
                if 0 <= at < len(times):
                    times[at, j] += 1
    return probabilities @ times.astype(probabilities.dtype)


def nsa_chosen(scores: Float[Array, "K T J"], config: NSA) -> Bool[Array, "K T J"]:
    """The blocks of every query: forced ones, then the best visible ones."""
    blocks = jnp.arange(scores.shape[-1])
    current = jnp.arange(scores.shape[1])[:, None] // config.block
    visible = blocks <= current
    forced = visible & ((blocks < config.initial) | (blocks > current - config.local))
    ranked = jnp.where(visible, jnp.where(forced, jnp.inf, scores), -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-ranked, axis=-1, stable=True), axis=-1, stable=True)
    return visible & (rank < config.picks)


def nsa(
    q: Float[Array, "T N H"],
    compressed: tuple[Float[Array, "E K H"], Float[Array, "E K H"]],
    selected: tuple[Float[Array, "T K H"], Float[Array, "T K H"]],
    window: tuple[Float[Array, "T K H"], Float[Array, "T K H"]],
    gates: Float[Array, "T N 3"],
    config: NSA,
    chosen: Bool[Array, "K T J"] | None = None,
) -> Float[Array, "T N H"]:
    """The three branches and their gates. chosen: blocks to take instead of the best."""
    length = q.shape[0]
    groups = q.shape[1] // selected[0].shape[1]
    ends = jnp.arange(compressed[0].shape[0]) * config.stride + config.length - 1
    out_c, _, probabilities = attention(
        q, *compressed, (ends[None] <= jnp.arange(length)[:, None])[None]
    )
    if chosen is None:
        shared = probabilities.reshape(selected[0].shape[1], groups, *probabilities.shape[1:]).sum(
            axis=1
        )
        chosen = nsa_chosen(nsa_block_scores(shared, -(-length // config.block), config), config)
    tokens = jnp.repeat(jnp.repeat(chosen, config.block, axis=-1)[..., :length], groups, axis=0)
    out_s, _, _ = attention(q, *selected, tokens & causal(length))
    out_w = dense(q, *window, window=config.window)
    return jnp.einsum("tnhc,tnc->tnh", jnp.stack([out_c, out_s, out_w], axis=-1), gates)


def moba_chosen(
    q: Float[Array, "T N H"], k: Float[Array, "T K H"], config: MoBA
) -> Bool[Array, "N T J"]:
    """The blocks of every query head: its own, then the best earlier ones by the mean of their
    keys.
    """
    length = q.shape[0]
    held = np.arange(length) // config.block == np.arange(-(-length // config.block))[:, None]
    means = jnp.einsum("jt,tkh->jkh", (held / held.sum(axis=1, keepdims=True)).astype(k.dtype), k)
    scores = jnp.einsum("tnh,jnh->ntj", q, jnp.repeat(means, q.shape[1] // k.shape[1], axis=1))
    blocks = jnp.arange(len(held))
    current = jnp.arange(length)[:, None] // config.block
    ranked = jnp.where(blocks < current, scores, jnp.where(blocks == current, jnp.inf, -jnp.inf))
    rank = jnp.argsort(jnp.argsort(-ranked, axis=-1, stable=True), axis=-1, stable=True)
    return (blocks <= current) & (rank < config.picks)


def moba(
    q, k, v, config: MoBA, chosen: Bool[Array, "N T J"] | None = None
) -> Float[Array, "T N H"]:
    """One softmax over the chosen blocks, causal."""
    if chosen is None:
        chosen = moba_chosen(q, k, config)
    tokens = jnp.repeat(chosen, config.block, axis=-1)[..., : q.shape[0]]
    return attention(q, k, v, tokens & causal(q.shape[0]))[0]


def gated_documents(
    q, k, v, documents: Int[Array, " T"], gates: Float[Array, "T N 2"]
) -> Float[Array, "T N H"]:
    """The gated sum of two softmaxes: over keys outside of other documents, and inside of them."""
    key = documents[None]
    query = documents[:, None]
    own = (key == 0) | (key == query)
    others = (query == TAIL) & (key > 0)
    parts = [attention(q, k, v, (causal(q.shape[0]) & mask)[None])[0] for mask in (own, others)]
    return jnp.einsum("tnhc,tnc->tnh", jnp.stack(parts, axis=-1), gates)
