"""Shared parts of the kernels of compressed attention: settings, sizes, and how the keys of a tile
of blocks lie in memory.

A stretch is a run of ``length`` tokens that is compressed to one key; one starts every ``stride``
tokens. The score of a block sums the probabilities of the stretches that share tokens with it.
These lie at fixed distances from the block's first stretch: from ``reach`` - 1 before it, where
``reach`` is length / stride, up to the last stretch that starts in the block.

The keys are therefore copied into parts, one part for each distance. In each part, column j holds
the stretch at that distance from block j. The score of block j is then a weighted sum of column j
over all parts. A stretch that shares tokens with two blocks is in two parts. With stretches of 32
tokens every 16, in blocks of 64, that makes 5 copied keys for the 4 stretches of a block.

Dimensions: B rows, T queries, J blocks, E = ratio J stretches, K key/value heads, H head size, P
parts, C columns.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.cost import Cost
from pallas_kernels.flash import blocks as flash
from pallas_kernels.padding import pad
from pallas_kernels.tokens import Tokens, visible
from pallas_kernels.tuned import check_positive

# The score of a block that is not seen, and of one that is always taken. All other scores are sums
# of probabilities, and lie between them.
UNSEEN = -1.0
FORCED = 1e30
# The log-sum-exp that is used for a query that sees no stretch: every probability is then 0.
NOTHING = 1e30


@dataclasses.dataclass(frozen=True)
class Selection:
    """Picks of the blocks that a query attends to (2502.11089, section 3.3)."""

    # Tokens of a stretch (l in the paper).
    length: int = 32
    # Tokens from the start of one stretch to that of the next (d).
    stride: int = 16
    # Tokens of a block (l').
    block: int = 64
    # Blocks that a query picks (n).
    picks: int = 16
    # Blocks at the start of the sequence that are always among the picks.
    initial: int = 1
    # Blocks up to the query's own, that one included, that are always among the picks.
    local: int = 2

    def __post_init__(self) -> None:
        if (
            min(self.stride, self.length) < 1
            or self.length % self.stride
            or self.block % self.stride
        ):
            raise ValueError(
                f"stride={self.stride} must divide length={self.length} and block={self.block}"
            )
        if not 0 < self.initial + self.local <= self.picks:
            raise ValueError(
                f"initial={self.initial} + local={self.local} blocks must fit in picks={self.picks}"
            )

    @property
    def ratio(self) -> int:
        """Stretches that start in a block."""
        return self.block // self.stride

    @property
    def shares(self) -> dict[int, int]:
        """Overlap of a block with each stretch, in strides, by the stretch's distance from the
        block's first one.

        For the defaults these are 1, 2, 2, 2, 1 at the distances -1 to 3. It is equation 9 read
        with indices from 1.
        """
        reach = self.length // self.stride
        return {at: min(at + reach, self.ratio) - max(at, 0) for at in range(1 - reach, self.ratio)}


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """Sizes of the kernels of compressed attention."""

    # Of the attention to stretches.
    attention: flash.TuningConfig
    # Queries that pick together.
    block_q: int
    # Blocks that are scored at a time, C.
    columns: int
    # On GPU, tiles of queries in flight. On TPU there are always two tiles of keys.
    steps: int = 2

    def __post_init__(self) -> None:
        check_positive(self)


def heuristic(device: str, groups: int, head_dim: int, count: int) -> TuningConfig:
    """Sizes for a device, chosen by reasoning and not by timing.

    device: "tpu", "hopper" or "blackwell". groups: query heads per key/value head. count: blocks of
    a row.
    """
    attention = flash.heuristic(device, groups, head_dim)
    if device != "tpu":
        # a row of scores lies in one thread on Blackwell, in four on Hopper
        return TuningConfig(attention, attention.block_q, 32 if device == "blackwell" else 64)
    # the scores of all blocks for a block of queries stay in VMEM
    return TuningConfig(
        attention, max(128, min(attention.block_q, 2**23 // count // 128 * 128)), 128
    )


def cost(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    itemsize: int,
    selection: Selection,
    tuning: TuningConfig,
) -> Cost:
    """The cost of the selection, estimated for whole causal rows; the real one depends on the
    tokens.

    The shapes are those of q [B, T, N, H] and of the compressed keys k [B, E, K, H].
    """
    batch, queries, heads, head_dim = q_shape
    keys, kv_heads = k_shape[1:3]
    # products of queries with the copied keys of the blocks up to their own
    pairs = batch * queries * keys // 2 * len(selection.shares) // selection.ratio
    streamed = kv_heads * head_dim * itemsize * pairs // tuning.block_q
    held = batch * queries * (heads * (head_dim * itemsize + 4) + kv_heads * selection.picks * 4)
    return Cost(2 * heads * head_dim * pairs, heads * pairs, held + streamed)


def edges(q: Tokens, heads: Tokens, selection: Selection) -> tuple[jax.Array, jax.Array]:
    """Two orders (early, late) for each query, int32 [B, T] each, that say what is always taken.

    They are compared with the order of a block's first token. A block below ``early`` is one of the
    first that the query sees, and a block from ``late`` on is one of the latest.
    """
    most = jnp.iinfo(jnp.int32).max
    # the order of the first block that the query sees; ``most`` if it sees none
    first = jnp.min(jnp.where(visible(q, heads), heads.order[:, None], most), axis=2, initial=most)
    # first + initial * block, without an overflow where ``first`` is ``most``
    early = (
        jnp.minimum(first, most - selection.initial * selection.block)
        + selection.initial * selection.block
    )
    return early, (q.order // selection.block - selection.local + 1) * selection.block


def arrange(
    k: jax.Array,
    k_tokens: Tokens,
    heads: Tokens,
    shadows: jax.Array | None,
    selection: Selection,
    columns: int,
    ahead: int,
) -> tuple[jax.Array, Tokens]:
    """Keys [B, J P, K, H] and tokens [B, J (P + 1)] in tiles of ``columns`` blocks, part by part.

    J is filled up to whole tiles. The tokens of a tile begin with those of its blocks, and the
    tokens of the P parts follow. ahead: how many entries later than its first token a stretch lies
    in k, as for ``api.compressed_attention``.

    No stretch reaches back over the start of a copied block (see ``api``), so its columns in the
    parts before its first stretch would be empty. They hold the stretches that reach into the
    prompt's block instead, of which it is a copy. The copied block thereby gets their probability
    too. A query that sees the copy sees no other stretch of the prompt's block.
    """
    numbers = jnp.broadcast_to(jnp.arange(heads.shape[1], dtype=jnp.int32), heads.shape)
    copied = numbers if shadows is None else jnp.where(shadows >= 0, shadows, numbers)
    # for each distance, the entry of the stretch in every block's column; outside of the row where
    # it begins and, with ``ahead``, where it ends
    parts = [
        selection.ratio * (copied if at < 0 else numbers) + at + ahead for at in selection.shares
    ]
    count = k.shape[1]
    index = _tiled(jnp.stack([pad(part, columns) for part in parts], axis=1), columns)
    # Columns that fill up J, and stretches outside of the row, read some key. Their tokens, which
    # are 0, say that there is none.
    keys = jax.vmap(lambda row, at: row[at])(k, index.clip(0, count - 1))

    def tokens_of(at: jax.Array) -> Tokens:
        inside = (at >= 0) & (at < count)
        place = at.clip(0, count - 1)
        return k_tokens.map(lambda x: jnp.where(inside, jnp.take_along_axis(x, place, axis=1), 0))

    stretches = [tokens_of(at) for at in parts]
    tokens = jax.tree.map(
        lambda *x: _tiled(jnp.stack([pad(y, columns) for y in x], axis=1), columns),
        heads,
        *stretches,
    )
    return keys, tokens


def _tiled(x: jax.Array, columns: int) -> jax.Array:
    """[B, parts, J] -> [B, J / C, parts, C], with all axes but B flattened."""
    batch, parts, count = x.shape
    return x.reshape(batch, parts, count // columns, columns).swapaxes(1, 2).reshape(batch, -1)
