"""The picks of compressed attention on TPU (Mosaic).

A grid step holds one block of queries with all query heads of one key/value head. It goes through
the tiles of blocks that the queries may see, with the lists and the copies of ``flash``. It keeps
the scores of all blocks for its queries in VMEM. At the end it takes the best block, then the next
best, and so on.

Dimensions: as in ``blocks``; G query heads of a key/value head, R = G block_q rows.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.compressed.blocks import (
    FORCED,
    NOTHING,
    UNSEEN,
    Selection,
    TuningConfig,
    arrange,
    cost,
    edges,
)
from pallas_kernels.flash import tpu as flash
from pallas_kernels.flash.blocks import visits
from pallas_kernels.padding import pad, pad_tokens
from pallas_kernels.tokens import MASKED, Tokens, sees

TARGETS = flash.TARGETS
ELSEWHERE = flash.ELSEWHERE
# Blocks whose scores fit in VMEM for the smallest block of queries.
MAX_BLOCKS = 2**16


def obstacle(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], selection: Selection
) -> str | None:
    """Reason why blocks cannot be picked for q [B, T, N, H] by k [B, E, K, H] of these shapes,
    or None.
    """
    if (count := k_shape[1] // selection.ratio) > MAX_BLOCKS:
        return f"{count} blocks are more than {MAX_BLOCKS}"
    if selection.picks > flash.LANES:
        return f"picks={selection.picks} are more than {flash.LANES}"
    return None


def select(
    q: jax.Array,
    k: jax.Array,
    lse: jax.Array,
    q_tokens: Tokens,
    k_tokens: Tokens,
    heads: Tokens,
    shadows: jax.Array | None,
    *,
    selection: Selection,
    ahead: int = 0,
    tuning: TuningConfig,
    interpret=False,
) -> jax.Array:
    """Numbers of the best blocks, int32 [B, T, K, n]; arguments as for ``reference.scores``."""
    batch, length, _, head_dim = q.shape
    kv_heads = k.shape[2]
    block_q = tuning.block_q
    columns = tuning.columns
    parts = len(selection.shares)
    estimate = flash.estimate(cost(q.shape, k.shape, k.dtype.itemsize, selection, tuning))
    # the two orders of ``edges`` as columns beside the queries, one block of queries after another
    forced = jnp.stack([pad(x, block_q) for x in edges(q_tokens, heads, selection)], axis=-1)
    forced = forced.reshape(batch, -1, block_q, 2)
    k, k_tokens = arrange(k, k_tokens, heads, shadows, selection, columns, ahead)
    q_tokens = pad_tokens(q_tokens, block_q)
    lists, _ = visits(q_tokens, k_tokens, block_q, columns * (parts + 1), None)
    q_fields = flash.token_columns(q_tokens, block_q)
    k_fields = flash.token_rows(k_tokens, columns * (parts + 1))
    sums = flash.to_rows([jnp.where(jnp.isneginf(lse), NOTHING, lse)], kv_heads, block_q)
    q = flash.to_blocks(q, kv_heads, block_q)
    k = flash.to_blocks(k, kv_heads, columns * parts)
    blocks, rows, lanes = q.shape[2:]
    picks = pl.pallas_call(
        functools.partial(_kernel, scale=head_dim**-0.5, selection=selection),
        grid=(batch, kv_heads, blocks),
        in_specs=[
            flash.list_spec(lists),
            flash.block_spec(rows, lanes),
            flash.block_spec(1, rows),
            flash.token_spec(q_fields),
            flash.token_spec(forced),
            *flash.in_hbm(2),
        ],
        out_specs=flash.block_spec(selection.picks, block_q),
        out_shape=jax.ShapeDtypeStruct(
            (batch, kv_heads, blocks, selection.picks, block_q), jnp.int32
        ),
        scratch_shapes=[
            pltpu.VMEM((2, *k.shape[3:]), k.dtype),
            pltpu.VMEM((2, *k_fields.shape[2:]), jnp.int32),
            # the scores of all blocks, tile by tile
            pltpu.VMEM((k.shape[2], block_q, columns), jnp.float32),
            pltpu.SemaphoreType.DMA((2, 2)),
        ],
        compiler_params=flash.params(),
        interpret=interpret,
        cost_estimate=estimate,
        name="compressed_select",
    )(lists[:, :, None], q, sums, q_fields, forced, k, k_fields)
    picks = picks.transpose(0, 2, 4, 1, 3).reshape(
        batch, blocks * block_q, kv_heads, selection.picks
    )
    return picks[:, :length]


def _kernel(
    lists,
    q,
    sums,
    q_tok,
    forced,
    k,
    k_tok,
    picks,
    k_two,
    tok_two,
    scores,
    semaphores,
    *,
    scale,
    selection: Selection,
):
    block_q, columns = scores.shape[1:]
    # rows of logits are G heads of block_q queries each
    grouped = (-1, block_q, columns)
    # tiles that are not visited have no block that a query sees
    scores[...] = jnp.full(scores.shape, UNSEEN, jnp.float32)
    lse = flash.to_sublanes(sums[0, 0, 0])
    queries = flash.from_columns(q_tok)
    early, late = (forced[0, 0, :, i : i + 1] for i in range(2))

    def visit(at, slot, masked):
        def tokens(part):
            return flash.from_rows(tok_two.at[slot, :, pl.ds(part * columns, columns)])

        # probabilities, by the final log-sum-exp, summed over parts and over the heads of the group
        total = jnp.zeros((block_q, columns), jnp.float32)
        for part, share in enumerate(selection.shares.values()):
            keys = k_two[slot, part * columns : (part + 1) * columns]
            logits = flash.dot(q[0, 0, 0], keys, ((1,), (1,))) * scale - lse
            logits = logits.reshape(grouped)
            if masked:
                logits = jnp.where(sees(queries, tokens(1 + part))[None], logits, MASKED)
            total += share * jnp.sum(jnp.exp(logits), axis=0)
        # the tokens of the blocks themselves stand before those of the parts
        heads = tokens(0)
        ranked = jnp.where((heads.order < early) | (heads.order >= late), FORCED, total)
        scores[at] = jnp.where(sees(queries, heads), ranked, UNSEEN) if masked else ranked

    flash.stream(lists, ((k, k_two),), (k_tok, tok_two), semaphores, visit)
    picks[0, 0, 0] = _best(scores, selection.picks).T[: selection.picks]


def _best(scores, count: int):
    """Numbers of the ``count`` best blocks, int32 [block_q, LANES], -1 where there are fewer.

    scores: a reference [J / C, block_q, C], which is overwritten.
    """
    tiles, block_q, columns = scores.shape
    count = min(count, tiles * columns)
    lane = jax.lax.broadcasted_iota(jnp.int32, (block_q, columns), 1)
    slot = jax.lax.broadcasted_iota(jnp.int32, (block_q, flash.LANES), 1)
    most = jnp.iinfo(jnp.int32).max

    def pick(index, carry):
        found, last = carry

        # One pass over the tiles for the best score of each lane. It also strikes the block that
        # was taken last, which saves a pass of its own.
        def highest(tile, best):
            left = jnp.where(tile * columns + lane == last, UNSEEN, scores[tile])
            scores[tile] = left
            return jnp.maximum(best, left)

        best = jax.lax.fori_loop(
            0, tiles, highest, jnp.full((block_q, columns), UNSEEN, jnp.float32)
        )
        best = jnp.max(best, axis=1, keepdims=True)

        # A second pass for the lowest number with that score, so that ties go to the lower one.
        def lowest(tile, number):
            return jnp.minimum(number, jnp.where(scores[tile] == best, tile * columns + lane, most))

        number = jax.lax.fori_loop(0, tiles, lowest, jnp.full((block_q, columns), most, jnp.int32))
        # no block if the best score left is UNSEEN, or NaN: both fail the comparison
        number = jnp.where(best >= 0, jnp.min(number, axis=1, keepdims=True), -1)
        return jnp.where(slot == index, number, found), number

    start = jnp.full((block_q, flash.LANES), -1, jnp.int32), jnp.full((block_q, 1), -1, jnp.int32)
    return jax.lax.fori_loop(0, count, pick, start)[0]
