"""Sampling the next token: temperature, top-k, top-p.

Departure from the usual Gumbel trick: one uniform number per row and the inverse of the cumulative
distribution, taken in two levels. It costs one random number instead of V, which on CPU is most of
the sampling time at V = 49,152.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Drawing of the next token from the logits."""

    # The logits are divided by it. 0 always takes the most likely token (greedy).
    temperature: float = 1.0
    # Only the k most likely tokens can be drawn; 0 keeps every token.
    top_k: int = 0
    # Only the most likely tokens that together have this probability can be drawn; 1.0 keeps every
    # token.
    top_p: float = 1.0

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be at least 0 (0 is greedy)")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0 (0 keeps every token)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1] (1 keeps every token)")


def token_uniforms(
    keys: UInt32[Array, "B 2"],
    groups: Int[Array, " B"],
    samples: Int[Array, " B"],
    positions: Int[Array, " B"],
) -> Float[Array, " B"]:
    """One uniform number in [0, 1) per row. It depends only on the row's own (key, group, sample,
    position), never on the other rows.

    keys: the words of each row's random key. samples: the index of each row in its group.
    """

    def one(key, group, sample, position):
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.uniform(
            jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, group), sample), position)
        )

    return jax.vmap(one)(keys, groups, samples, positions)


def sample(
    logits: Float[Array, "B V"], uniforms: Float[Array, " B"], config: SamplingConfig
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draws a token per row; returns (tokens int32, their log-probabilities float32).

    The log-probability is that of softmax(logits / temperature) over the whole vocabulary, which is
    what the trainer computes. Top-k and top-p restrict which tokens can be drawn; they do not
    change the log-probability. With temperature 0 (greedy) it is that of temperature 1.
    """
    logits = logits / (config.temperature or 1.0)
    logprobs = jax.nn.log_softmax(logits)
    if config.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1)
    else:
        probs = jnp.exp(logprobs)
        if config.top_k or config.top_p < 1:
            probs = truncate(probs, config.top_k, config.top_p)
        tokens = invert_cdf(probs, uniforms)
    tokens = tokens.astype(jnp.int32)
    return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]


def truncate(
    probs: Float[Array, "B V"], top_k: int, top_p: float | Float[Array, "B 1"]
) -> Float[Array, "B V"]:
    """Zero what top-k and top-p exclude. Ties with the last token kept are kept.

    top_p: of all rows, or of each; one row's 1 keeps every token.
    """
    vocab = probs.shape[-1]
    ordered = jax.lax.top_k(probs, min(top_k or vocab, vocab))[0]
    if not isinstance(top_p, float) or top_p < 1:
        total = jnp.sum(ordered, axis=-1, keepdims=True)
        before = jnp.cumsum(ordered, axis=-1) - ordered
        kept = (before < top_p * total) | jnp.asarray(top_p >= 1)
        ordered = jnp.where(kept, ordered, jnp.inf)
    return jnp.where(probs >= jnp.min(ordered, axis=-1, keepdims=True), probs, 0.0)


def invert_cdf(probs: Float[Array, "B V"], uniforms: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first token whose cumulative probability exceeds uniform * total; never one of
    probability 0.
    """
    # Two levels of about sqrt(V) entries each: first the block in which the threshold falls, then
    # the token within the block. Two short sums replace one over the whole vocabulary.
    batch, vocab = probs.shape
    width = max(1, math.isqrt(vocab))
    blocks = jnp.pad(probs, ((0, 0), (0, -vocab % width))).reshape(batch, -1, width)
    block_sums = jnp.sum(blocks, axis=-1)
    block_cdf = jnp.cumsum(block_sums, axis=-1)
    threshold = uniforms * block_cdf[:, -1]
    # Rounding can put the threshold at or past the end of all blocks, or of the chosen block. Then
    # the last entry with a positive probability is taken.
    block = jnp.minimum(
        jnp.sum(block_cdf <= threshold[:, None], axis=-1), _last_positive(block_sums)
    )
    start = jnp.where(
        block > 0,
        jnp.take_along_axis(block_cdf, jnp.maximum(block - 1, 0)[:, None], axis=-1)[:, 0],
        0.0,
    )
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    within = jnp.sum(jnp.cumsum(inside, axis=-1) <= (threshold - start)[:, None], axis=-1)
    return block * width + jnp.minimum(within, _last_positive(inside))


def _last_positive(x: Float[Array, "B N"]) -> Int[Array, " B"]:
    """Index of the last positive entry of each row."""
    return x.shape[-1] - 1 - jnp.argmax(jnp.flip(x > 0, axis=-1), axis=-1)


def stop_mask(tokens: Int[Array, "*B"], stop_ids: tuple[int, ...]) -> Bool[Array, "*B"]:
    """True where a token ends the assistant's message."""
    return jnp.any(tokens[..., None] == jnp.asarray(stop_ids, jnp.int32), axis=-1)
