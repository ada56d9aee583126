"""Native sparse attention (DeepSeek, 2502.11089): compressed, selected and sliding-window keys,
gated.

o = sum over c in {compressed, selected, window} of sigmoid(g_c(x)) * Attn(q, K_c, V_c), each branch
with keys and values of its own. A stretch of ``length`` tokens every ``stride`` is compressed to
one key and one value by an MLP; the softmax over compressed keys, summed over the query heads of a
group and over the tokens that a block of ``block`` shares with each stretch, ranks the blocks; the
best ``picks`` are attended to, among them always the first and the latest ones.

Departures from the paper, where it is silent or ambiguous:
- A stretch belongs to the blocks by the tokens they share (equation 9 read with indices from 1).
- Compressed keys are made of keys that are not rotated, and rotated as their stretch's last token:
  a document's compressed keys do not depend on where it is placed.
- A query that sees no stretch gets 0 from that branch.

Dimensions: B rows, T queries, S places of keys, E stretches, J blocks, N query heads, K key/value
heads, G = N / K, H head size, F hidden size of the MLP, l length.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.blocks import Blocks, Entries, best_blocks, map_queries, sees, stretches
from attention.dense import XLA, check_heads
from attention.selected import selected_attention
from pallas_kernels.compressed import api as kernels
from pallas_kernels.compressed.blocks import Selection
from pallas_kernels.softmax import weighted_attention
from pallas_kernels.tokens import Tokens

# Most scores of compressed keys in memory at once, and spans of queries that each leave out the
# keys past their end.
SCORES = 2**19
SPANS = 8


@dataclasses.dataclass(frozen=True)
class NSA(Selection):
    """The settings of the paper (section 4.1): those of ``Selection``, and w in its letters."""

    window: int = 512

    def __post_init__(self):
        super().__post_init__()
        if self.block < self.length:
            raise ValueError(f"NSA: length={self.length} must not exceed block={self.block}")
        if self.local < 1:
            raise ValueError(f"NSA: local={self.local} must be at least 1")
        if self.window < 1:
            raise ValueError(f"NSA: window={self.window} must be at least 1")


def compress(
    x: Float[Array, "B S K H"],
    positions: Float[Array, "l H"],
    first: Float[Array, "l H F"],
    second: Float[Array, "F H"],
    config: NSA,
) -> Float[Array, "B E K H"]:
    """One key or value per stretch: second . gelu(first . (x + positions)), equation 7 with an MLP
    for phi.
    """
    parts = stretches(x, config.length, config.stride) + positions.astype(x.dtype)
    flat = parts.reshape(*parts.shape[:3], -1)
    hidden = jax.nn.gelu(flat @ first.astype(x.dtype).reshape(-1, first.shape[-1]))
    return hidden @ second.astype(x.dtype)


def nsa_attention(
    q: Float[Array, "B T N H"],
    compressed: tuple[Float[Array, "B E K H"], Float[Array, "B E K H"]],
    selected: tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]],
    window: Float[Array, "B T N H"],
    gates: Float[Array, "B T N 3"],
    q_tokens: Tokens,
    blocks: Blocks,
    stretched: Entries,
    config: NSA,
) -> Float[Array, "B T N H"]:
    """The gated sum of the three branches.

    compressed, selected: keys and values, the first per stretch, the second in the places of
    ``blocks``. window: the output of the third branch. gates: after the sigmoid, in the order of
    the branches.
    """
    check_heads(q, selected[0])
    out_c, _, picks = compressed_attention(q, *compressed, q_tokens, blocks, stretched, config)
    out_s, _ = selected_attention(
        q, *selected, picks, q_tokens.order, blocks.order, size=config.block
    )
    return gated(out_c, out_s, window, gates)


def gated(compressed, selected, window, gates: Float[Array, "B T N 3"]) -> Float[Array, "B T N H"]:
    """The sum of the branches' results, [B, T, N, H] each, times their gates."""
    parts = zip(
        (compressed, selected, window),
        jnp.split(gates.astype(window.dtype), 3, axis=-1),
        strict=True,
    )
    return sum(out * gate for out, gate in parts)


def compressed_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B E K H"],
    v: Float[Array, "B E K H"],
    q_tokens: Tokens,
    blocks: Blocks,
    stretched: Entries,
    config: NSA,
    *,
    implementation: str | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"], Int[Array, "B T K n"]]:
    """Attention to the compressed keys, and the blocks that it picks: (out, lse, picks), picks
    without a gradient.

    implementation: as for ``dense_attention``; the kernels take entries in the order of their first
    tokens only.
    """
    check_heads(q, k)
    in_xla = functools.partial(_in_chunks, q, k, v, q_tokens, blocks, stretched, config)
    if implementation == XLA or (implementation is None and stretched.ahead):
        return in_xla()
    return kernels.compressed_attention(
        *(q, k, v, q_tokens, blocks.own_from),
        *(stretched.tokens, stretched.starts, blocks.heads, blocks.shadows),
        selection=config,
        implementation=implementation,
        interpret=interpret,
        fallback=in_xla,
    )


def _in_chunks(q, k, v, q_tokens, blocks: Blocks, stretched: Entries, config: NSA):
    """``compressed_attention`` in XLA.

    Queries are taken in chunks, so that only a chunk's scores are in memory; if they lie in the
    places, also in spans that see no key past their end.
    """
    length = q.shape[1]
    spans = SPANS if blocks.causal else 1
    bounds = [length * span // spans for span in range(spans + 1)]
    found = []
    for start, end in (part for part in itertools.pairwise(bounds) if part[0] < part[1]):
        count = -(-end // config.block) if blocks.causal else blocks.heads.shape[1]
        heads = blocks.heads.map(lambda x, count=count: x[:, :count])
        reach = count * config.block // config.stride
        stretches = jax.tree.map(lambda x, reach=reach: x[:, :reach], stretched)
        queries = jax.tree.map(
            lambda x, part=slice(start, end): x[:, part], (q, q_tokens, blocks.own_from)
        )
        step = functools.partial(
            _compressed_chunk, k[:, :reach], v[:, :reach], stretches, heads, blocks.shadows, config
        )
        chunk = max(1, min(end - start, SCORES // (q.shape[2] * reach)))
        found.append(map_queries(jax.checkpoint(step), chunk, *queries))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *found)


def _compressed_chunk(k, v, stretched: Entries, heads: Tokens, shadows, config: NSA, queries):
    """(out, lse, picks) of a few queries (q, their tokens, their ``own_from``)."""
    q, tokens, own_from = queries
    mask = sees(tokens, own_from, stretched.tokens, stretched.starts)
    out, lse, weights, share = weighted_attention(q, k, v, mask)
    # probabilities summed over the heads of a group
    shared = jax.lax.stop_gradient(jnp.einsum("bkgte,bkgt->bkte", weights, share))
    candidates = sees(tokens, own_from, heads, heads.order)
    scores = block_scores(shared, shadows, config, stretched.ahead)
    return out, lse, choose(scores, candidates[:, :, None], tokens.order, heads.order, config)


def block_scores(
    weights: Float[Array, "B K T E"], shadows: Int[Array, "B J"] | None, config: NSA, ahead: int = 0
) -> Float[Array, "B T K J"]:
    """Probability of each block: that of every stretch times the tokens they share, in units of the
    stride.

    Equations 9 and 10. With length 32, stride 16, block 64 the stretches 4j - 1 ... 4j + 3 count 1,
    2, 2, 2, 1 times. ahead: of the entries.
    """
    ratio = config.ratio
    reach = config.length // config.stride
    padded = jnp.pad(weights, ((0, 0),) * 3 + ((reach - 1 - ahead, ahead),))
    count = weights.shape[-1] // ratio
    # a stretch starts in its block or up to reach - 1 before
    terms = (
        share * padded[..., at + reach - 1 : at + reach + (count - 1) * ratio : ratio]
        for at, share in config.shares.items()
    )
    scores = sum(terms).transpose(0, 2, 1, 3)
    if shadows is None:
        return scores
    shadows = shadows[:, None, None, :]
    copied = jnp.take_along_axis(scores, jnp.maximum(shadows, 0), axis=-1)
    return scores + jnp.where(shadows >= 0, copied, 0.0)


def choose(
    scores: Float[Array, "B T K J"],
    candidates: Bool[Array, "B T 1 J"],
    q_order: Int[Array, "B T"],
    starts: Int[Array, "B J"],
    config: NSA,
) -> Int[Array, "B T K n"]:
    """The forced blocks and the best others, -1 where a query sees fewer than ``picks``.

    starts: order of each block's first token. Ties go to the lower number.
    """
    starts = starts[:, None, None, :]
    first = jnp.min(jnp.where(candidates, starts, jnp.iinfo(jnp.int32).max), axis=-1, keepdims=True)
    current = q_order[:, :, None, None] // config.block
    forced = (starts < first + config.initial * config.block) | (
        starts // config.block > current - config.local
    )
    ranked = jnp.where(candidates, jnp.where(forced, jnp.inf, scores), -jnp.inf)
    return best_blocks(ranked, config.picks)
