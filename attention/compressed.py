"""Attention to the compressed keys of NSA (2502.11089, sections 3.2 and 3.3.1), and the choice of
blocks by its probabilities.

The kernels of ``pallas_kernels.compressed`` run where they can. XLA takes the queries in chunks, so
that only the scores of one chunk are in memory.

Dimensions: B rows, T queries, E stretches, J blocks, N query heads, K key/value heads, H head size,
n picks.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.blocks import Blocks, Entries, best_blocks, map_queries, sees
from attention.blockwise import XLA, check_heads
from pallas_kernels.compressed import api as kernels
from pallas_kernels.compressed import paged
from pallas_kernels.compressed.blocks import Selection
from pallas_kernels.softmax import weighted_attention
from pallas_kernels.tokens import Tokens

# Most scores of compressed keys in memory at once.
SCORES = 2**19
# Rows whose queries lie in the places of the keys are cut into at most so many spans. The queries
# of a span see no key past its end, so those keys are left out. Each span is compiled by itself, so
# a short row, which has few scores to leave out, has fewer.
SPANS = 8
# Queries of a span, at least.
SPAN = 128


def compressed_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B E K H"],
    v: Float[Array, "B E K H"],
    q_tokens: Tokens,
    blocks: Blocks,
    stretched: Entries,
    config: Selection,
    *,
    implementation: str | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"], Int[Array, "B T K n"]]:
    """Attention to the compressed keys, and the blocks that it picks.

    implementation: as for ``dense_attention``. Returns (out, lse, picks); the picks have no
    gradient.
    """
    check_heads(q, k)
    in_xla = functools.partial(_in_chunks, q, k, v, q_tokens, blocks, stretched, config)
    if implementation == XLA:
        return in_xla()
    return kernels.compressed_attention(
        *(q, k, v, q_tokens, blocks.own_from),
        *(stretched.tokens, stretched.starts, blocks.heads, blocks.shadows),
        selection=config,
        ahead=stretched.ahead,
        implementation=implementation,
        interpret=interpret,
        fallback=in_xla,
    )


def from_pages(
    q: Float[Array, "B T N H"],
    pages: tuple[Float[Array, "pages K e H"], Float[Array, "pages K e H"]],
    table: Int[Array, "B P"],
    q_tokens: Tokens,
    blocks: Blocks,
    stretched: Entries | None,
    config: Selection,
    *,
    implementation: str | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"], Int[Array, "B T K n"]] | None:
    """``compressed_attention`` of few queries to the pages of a cache, where they lie.

    pages: the compressed keys, rotated, and values, each in the page of the last token of its
      stretch. Every row holds one sequence from place 0.
    stretched: None, or the stretches of rows with documents; T is 1 then.
    implementation: the name of a kernel, or None for the one that can run.

    Returns None where no kernel can run.
    """
    ahead = config.length // config.stride - 1
    # the entry that ends with the query's own token, or the last one before
    last = jnp.where(q_tokens.segments > 0, (q_tokens.order + 1) // config.stride - 1, -1)
    real = None
    if stretched is not None:
        real = sees(q_tokens, blocks.own_from, stretched.tokens, stretched.starts)[:, 0]
    found = paged.paged_compressed_attention(
        *(q, *pages, table, last, real),
        first=ahead,
        implementation=implementation,
        interpret=interpret,
        fallback=lambda: None,
    )
    if found is None:
        return None
    out, lse, weights = found
    heads = blocks.heads
    candidates = sees(q_tokens, blocks.own_from, heads, heads.order)[:, :, None]
    scores = block_scores(weights, None, config, ahead)
    return out, lse, choose(scores, candidates, q_tokens.order, heads.order, config)


def _in_chunks(q, k, v, q_tokens, blocks: Blocks, stretched: Entries, config: Selection):
    """``compressed_attention`` in XLA: chunks of queries, and spans where ``blocks.causal``."""
    length = q.shape[1]
    spans = min(SPANS, max(1, length // SPAN)) if blocks.causal else 1
    bounds = [length * span // spans for span in range(spans + 1)]
    found = []
    for start, end in (part for part in itertools.pairwise(bounds) if part[0] < part[1]):
        # blocks and stretches that the queries of the span may see
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
        # the checkpoint computes a chunk's scores again in the backward pass instead of keeping
        # them
        chunk = max(1, min(end - start, SCORES // (q.shape[2] * reach)))
        found.append(map_queries(jax.checkpoint(step), chunk, *queries))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *found)


def _compressed_chunk(k, v, stretched: Entries, heads: Tokens, shadows, config: Selection, queries):
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
    weights: Float[Array, "B K T E"],
    shadows: Int[Array, "B J"] | None,
    config: Selection,
    ahead: int = 0,
) -> Float[Array, "B T K J"]:
    """The score of each block (equations 9 and 10).

    It is the sum over stretches of the stretch's probability times the tokens that the stretch
    shares with the block, in units of the stride. With length 32, stride 16 and block 64 the
    stretches 4j - 1 ... 4j + 3 count 1, 2, 2, 2, 1 times for block j. ahead: that of the entries.
    """
    ratio = config.ratio
    reach = config.length // config.stride
    # Pad in front for the stretches before the first block. Entries that lie ``ahead`` later have
    # so many empty ones in front already, and lack as many at the end.
    padded = jnp.pad(weights, ((0, 0),) * 3 + ((reach - 1 - ahead, ahead),))
    count = weights.shape[-1] // ratio
    # A stretch that shares tokens with a block starts in it or up to reach - 1 stretches before it.
    # For each such distance, a slice with step ``ratio`` has the stretches of all blocks.
    terms = (
        share * padded[..., at + reach - 1 : at + reach + (count - 1) * ratio : ratio]
        for at, share in config.shares.items()
    )
    scores = sum(terms).transpose(0, 2, 1, 3)
    if shadows is None:
        return scores
    # a copied block also gets the score of the prompt's block: see ``Blocks.shadows``
    shadows = shadows[:, None, None, :]
    copied = jnp.take_along_axis(scores, jnp.maximum(shadows, 0), axis=-1)
    return scores + jnp.where(shadows >= 0, copied, 0.0)


def choose(
    scores: Float[Array, "B T K J"],
    candidates: Bool[Array, "B T 1 J"],
    q_order: Int[Array, "B T"],
    starts: Int[Array, "B J"],
    config: Selection,
) -> Int[Array, "B T K n"]:
    """The blocks that are always taken and the best others; ties go to the lower number.

    candidates: the blocks that a query sees. starts: the order of each block's first token. Picks
    are -1 where a query sees fewer than ``config.picks`` blocks.
    """
    starts = starts[:, None, None, :]
    first = jnp.min(jnp.where(candidates, starts, jnp.iinfo(jnp.int32).max), axis=-1, keepdims=True)
    current = q_order[:, :, None, None] // config.block
    forced = (starts < first + config.initial * config.block) | (
        starts // config.block > current - config.local
    )
    ranked = jnp.where(candidates, jnp.where(forced, jnp.inf, scores), -jnp.inf)
    return best_blocks(ranked, config.picks)
