"""What the kernels of compressed attention share: settings, sizes, and how the keys of a tile of
blocks lie in memory.

A block's score sums the probabilities of the stretches that share tokens with it, which lie at
fixed distances: from ``reach`` - 1 before its first stretch to its last. Keys are therefore copied
so that each distance has a part of its own, with the stretch of every block at the block's column:
the score is then a weighted sum of equal columns of the parts. Stretches of two blocks are in two
parts; for 32 tokens every 16 in blocks of 64 that is 5 copies of 4 keys.

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

# Scores of blocks are sums of probabilities; these stand for a block that is not seen and for one
# that is always taken.
UNSEEN = -1.0
FORCED = 1e30
# What stands for the log-sum-exp of a query that sees no stretch: every probability is then 0.
NOTHING = 1e30


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which blocks a query picks (2502.11089, section 3.3): l, d, l' in tokens and n in the paper's
    letters.

    initial, local: blocks at the start and up to the query that are always among the ``picks``.
    """

    length: int = 32
    stride: int = 16
    block: int = 64
    picks: int = 16
    initial: int = 1
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
        """Strides that a block shares with the stretch at each distance from its first: 1, 2, 2, 2,
        1 for the defaults.

        Equation 9 with indices from 1.
        """
        reach = self.length // self.stride
        return {at: min(at + reach, self.ratio) - max(at, 0) for at in range(1 - reach, self.ratio)}


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """attention: sizes of the attention to stretches. block_q: queries that pick together. columns:
    blocks per visit.

    steps: on GPU, query tiles in flight; on TPU there are always two tiles of keys.
    """

    attention: flash.TuningConfig
    block_q: int
    columns: int
    steps: int = 2

    def __post_init__(self) -> None:
        for name in ("block_q", "columns", "steps"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value} must be positive")


def heuristic(device: str, groups: int, head_dim: int, count: int) -> TuningConfig:
    """Sizes for "tpu", "hopper" or "blackwell", ``groups`` heads per key/value head and so many
    blocks; never timed.
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
    """Cost of the selection on whole causal rows q [B, T, N, H] with compressed keys k [B, E, K,
    H].

    The real one depends on the tokens.
    """
    batch, queries, heads, head_dim = q_shape
    keys, kv_heads = k_shape[1:3]
    # products of queries with the copied keys of the blocks up to their own
    pairs = batch * queries * keys // 2 * len(selection.shares) // selection.ratio
    streamed = kv_heads * head_dim * itemsize * pairs // tuning.block_q
    held = batch * queries * (heads * (head_dim * itemsize + 4) + kv_heads * selection.picks * 4)
    return Cost(2 * heads * head_dim * pairs, heads * pairs, held + streamed)


def edges(q: Tokens, heads: Tokens, selection: Selection) -> tuple[jax.Array, jax.Array]:
    """Blocks with a first token of order below the first or from the second on, int32 [B, T] each,
    are always taken.
    """
    most = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(visible(q, heads), heads.order[:, None], most), axis=2, initial=most)
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
) -> tuple[jax.Array, Tokens]:
    """Keys [B, J P, K, H] and tokens [B, J (P + 1)] in tiles of ``columns`` blocks, part by part; J
    is filled up.

    The tokens of a tile begin with those of its blocks. A copied block (see ``api``) has no stretch
    that reaches back over its start; those parts hold the stretches that reach into the block it
    copies instead, so that it has their probability too. Of the others in that block, a query that
    sees the copy sees none.
    """
    numbers = jnp.broadcast_to(jnp.arange(heads.shape[1], dtype=jnp.int32), heads.shape)
    copied = numbers if shadows is None else jnp.where(shadows >= 0, shadows, numbers)
    parts = [selection.ratio * (copied if at < 0 else numbers) + at for at in selection.shares]
    index = _tiled(jnp.stack([pad(part, columns) for part in parts], axis=1), columns)
    # what fills up J reads some key; its tokens say that it is none
    keys = jax.vmap(lambda row, at: row[at])(k, index.clip(0, k.shape[1] - 1))
    stretches = [
        jax.tree.map(
            lambda x, at=at: jnp.where(at < 0, 0, jnp.take_along_axis(x, at.clip(0), axis=1)),
            k_tokens,
        )
        for at in parts
    ]
    tokens = jax.tree.map(
        lambda *x: _tiled(jnp.stack([pad(y, columns) for y in x], axis=1), columns),
        heads,
        *stretches,
    )
    return keys, tokens


def _tiled(x: jax.Array, columns: int) -> jax.Array:
    """[B, parts, J] -> [B, J / C, parts, C], flattened behind B."""
    batch, parts, count = x.shape
    return x.reshape(batch, parts, count // columns, columns).swapaxes(1, 2).reshape(batch, -1)
