"""Mixture of block attention (2502.13189): each query head attends to the block it lies in and to
the best others.

The score of a block is q . mean(K of the block), in float32 and without parameters. The query's own
block is always taken, and counts towards ``picks``. One softmax runs over the union of the chosen
blocks. No gradient flows through the choice.

Dimensions: B rows, T queries, S places of keys, J blocks, N query heads, K key/value heads, G = N /
K, H head size.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention.blocks import Blocks, best_blocks, map_queries, sees
from attention.blockwise import check_heads
from attention.cache.reader import FEW
from attention.calls import Call, CallShape, chosen_calls, paged_call
from attention.methods.method import LayerPages, LayerShape, Method, PageShape, shape_bytes
from attention.query_cost import QueryCost, chosen, gathered
from attention.selected import selected_attention
from pallas_kernels.tokens import Tokens


@dataclasses.dataclass(frozen=True)
class MoBA(Method):
    """Each query head attends to its own block and to the best others."""

    # Tokens of a block.
    block: int = 512
    # Blocks that a query head attends to, its own among them.
    picks: int = 3

    def __post_init__(self):
        if self.block < 1 or self.picks < 1:
            raise ValueError(f"MoBA: block={self.block} and picks={self.picks} must be at least 1")

    def block_size(self):
        return self.block

    def cut_keys(self):
        return ("main",)

    def attend(self, q, keys, layout, inputs):
        blocks = layout.blocks[self.block]
        k, v = (layout.place(self.block, x) for x in keys["main"])
        means = layout.whole(block_means(k, layout.mine(blocks.tokens.segments), self.block))
        picks = pick_blocks(q, means, layout.queries, blocks, self)
        return layout.attend_chosen(q, (k, v), picks, self.block)

    def pages(self, shape: PageShape) -> LayerPages:
        """The pages of "main", and of "means".

        The means of every page's keys, float32 [pages, K, H], let a query be compared with a page
        without reading its keys.
        """
        means = (shape.num_pages, shape.num_kv_heads, shape.head_dim)
        return {**super().pages(shape), "means": jax.ShapeDtypeStruct(means, jnp.float32)}

    def write(self, pages, keys, at, parameters):
        pages = super().write(pages, keys, at, parameters)
        pages["means"] = _written_means(pages["means"], pages["main"][0], at)
        return pages

    def attend_pages(self, pages, q, q_tokens, reader, inputs):
        blocks = reader.blocks(q_tokens)
        # for many queries all keys are read anyway
        if q.shape[1] > FEW:
            return moba_attention(q, *reader.rows(pages["main"]), q_tokens, blocks, self)[0]
        means = pages["means"][jnp.maximum(reader.pages.tables, 0)]
        picks = pick_blocks(q, means, q_tokens, blocks, self)
        return reader.chosen(pages["main"], q, q_tokens, picks)

    def decode_bytes(self, tokens: int, shape: LayerShape, dtype: str) -> int:
        """Bytes of the float32 means of all blocks, and of the chosen blocks.

        Each query head reads one key/value head of each block that it chose. A block never counts
        more often than it has key/value heads.
        """
        pair = shape_bytes(shape, dtype)
        kv_heads = shape.num_kv_heads
        blocks = -(-tokens // self.block)
        lists = min(shape.num_heads * min(self.picks, blocks), kv_heads * blocks)
        read = min(lists * self.block * pair // kv_heads, tokens * pair)
        return blocks * kv_heads * shape.head_dim * 4 + read

    def query_cost(self, shape: LayerShape, row: int, seen: float, decode: bool) -> QueryCost:
        size = shape.num_heads * self.pair_size(shape, decode)
        visible, masked = chosen(seen, row, self.block, self.picks, 1, decode)
        # a query is compared with the means of all blocks, also of those that it does not see
        ranked = -(-row // self.block) * shape.num_heads * shape.head_dim
        return QueryCost(visible * size, masked=masked * size, ranked=ranked)

    def gathered_elements(self, shape: LayerShape, row: int) -> int:
        return gathered(row, self.picks, shape.num_heads, shape.head_dim)

    def calls(self, shape: CallShape) -> tuple[Call, ...]:
        part = "chosen blocks"
        return (
            *chosen_calls(part, shape, shape.num_heads, self.block, self.picks),
            paged_call(part, shape),
        )


def _written_means(means, keys, at):
    """The means, with those of the pages that were written to computed again."""
    page, starts = at.touched()
    # the places of these pages that hold a token, [B, n, page]
    real = starts[..., None] + jnp.arange(at.page) <= at.last[..., None]
    real = real[:, :, None, :, None]  # over heads and sizes
    # what lies past the last token of a page may be anything, and must not count times 0
    content = jnp.where(real, keys.at[page].get(mode="clip").astype(jnp.float32), 0.0)
    mean = jnp.sum(content, axis=3) / jnp.maximum(jnp.sum(real, axis=3), 1)
    return means.at[page].set(mean, mode="drop")


def moba_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    q_tokens: Tokens,
    blocks: Blocks,
    config: MoBA,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """(out, lse) as ``dense_attention``; k and v in the places of ``blocks``."""
    check_heads(q, k)
    picks = moba_picks(q, k, q_tokens, blocks, config)
    return selected_attention(q, k, v, picks, q_tokens.order, blocks.order, size=config.block)


def moba_picks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    q_tokens: Tokens,
    blocks: Blocks,
    config: MoBA,
) -> Int[Array, "B T N n"]:
    """The blocks of every query head, -1 where it sees fewer than ``picks``; ties go to the lower
    number.
    """
    means = block_means(k, blocks.tokens.segments, config.block)
    return pick_blocks(q, means, q_tokens, blocks, config)


def block_means(
    k: Float[Array, "B S K H"], segments: Int[Array, "B S"], block: int
) -> Float[Array, "B J K H"]:
    """The mean of every block's keys in float32, without a gradient. segments: 0 for padding."""
    real = (segments > 0).reshape(k.shape[0], -1, block)
    k = jax.lax.stop_gradient(k).astype(jnp.promote_types(jnp.float32, k.dtype))
    k = k.reshape(*real.shape, *k.shape[2:])
    # the places of padding may hold anything
    sums = jnp.sum(jnp.where(real[..., None, None], k, 0.0), axis=2)
    return sums / jnp.maximum(jnp.sum(real, axis=2), 1)[..., None, None]


def pick_blocks(
    q: Float[Array, "B T N H"],
    means: Float[Array, "B J K H"],
    q_tokens: Tokens,
    blocks: Blocks,
    config: MoBA,
) -> Int[Array, "B T N n"]:
    """``moba_picks`` by the mean of every block's keys, float32."""
    q = jax.lax.stop_gradient(q)
    heads = blocks.heads
    # a mean of infinities must not rank last: see ``best_blocks``
    means = jnp.where(jnp.isfinite(means), means, jnp.nan)

    def step(xs):
        q, tokens, own_from = xs
        candidates = sees(tokens, own_from, heads, heads.order)[:, :, None]
        grouped = q.reshape(*q.shape[:2], means.shape[2], -1, q.shape[-1]).astype(means.dtype)
        scores = jnp.einsum("btkgh,bjkh->btkgj", grouped, means).reshape(*q.shape[:3], -1)
        # the query's own block ranks above all, and blocks that it does not see are no candidates
        own = (
            heads.order[:, None, None] // config.block
            == tokens.order[:, :, None, None] // config.block
        )
        ranked = jnp.where(candidates, jnp.where(own, jnp.inf, scores), -jnp.inf)
        return best_blocks(ranked, config.picks)

    chunk = max(1, min(q.shape[1], 2**20 // means.shape[1]))
    return map_queries(step, chunk, q, q_tokens, blocks.own_from)
