"""Cutting of rows into blocks: their sizes per device, and the lists of blocks that each block
visits.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.cost import Cost
from pallas_kernels.tokens import Tokens, bounds, may_see, must_see
from pallas_kernels.tuned import check_positive


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """Tokens per block of queries and of keys, in each of the three kernels."""

    # Of the forward pass.
    block_q: int
    block_kv: int
    # Of the backward pass that computes the gradient of queries.
    block_q_dq: int
    block_kv_dq: int
    # Of the backward pass that computes the gradients of keys and values.
    block_q_dkv: int
    block_kv_dkv: int
    # Blocks in flight on GPU. On TPU there are always two.
    steps: int = 2
    # On GPU, "wgmma" (Hopper) or "tcgen05" (Blackwell).
    matrix_unit: str = "wgmma"

    def __post_init__(self) -> None:
        check_positive(self)


def heuristic(device: str, groups: int, head_dim: int) -> TuningConfig:
    """Block sizes for a device, chosen by reasoning and not by timing.

    device: "tpu", "hopper" or "blackwell". groups: query heads per key/value head.
    """
    if device == "hopper":
        # A thread block holds two tiles of 64 rows. How much it streams at a time is bounded by
        # its registers.
        return TuningConfig(128, 128, 128, 64, 64, 128)
    if device == "blackwell":
        return TuningConfig(128, 64, 128, 64, 64, 128, matrix_unit="tcgen05")
    # a block holds all query heads of one key/value head: about 1,024 rows of scores in full lanes
    block_q = min(max(128, 1024 // groups // 128 * 128), 512)
    return TuningConfig(block_q, 512, max(128, block_q // 2), 512, max(128, block_q // 2), 512)


# Dot products of the head's size for each pair of a query and a key. Forward: the score, and the
# weighted value. Backward: the score and the gradient of its weight, then one for each result.
_PRODUCTS = {"forward": 2, "backward_q": 3, "backward_kv": 4}


def cost(
    kernel: str,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    itemsize: int,
    tuning: TuningConfig,
    window: int | None = None,
    cached: bool = False,
) -> Cost:
    """The cost of a kernel, estimated for whole causal rows; the real cost depends on the tokens.

    kernel: "forward", "backward_q" or "backward_kv". The queries of q [B, T, N, H] are the last T
    of the S tokens of k [B, S, K, H]. cached: whether a block that is read again costs nothing.
    """
    batch, queries, heads, head_dim = q_shape
    keys, kv_heads = k_shape[1:3]
    # keys that a query sees on average: S for the last query, one less for each query before it
    mean = min(keys - (queries - 1) / 2, window or keys) if keys >= queries else keys / 2
    pairs = int(batch * queries * mean)
    q_bytes, k_bytes = (batch * x * head_dim * itemsize for x in (queries * heads, keys * kv_heads))
    if kernel == "backward_kv":
        streamed = 2 * heads * head_dim * itemsize * pairs // tuning.block_kv_dkv
        moved = 4 * k_bytes + (2 * q_bytes if cached else streamed)
    else:
        block = tuning.block_q if kernel == "forward" else tuning.block_q_dq
        streamed = 2 * kv_heads * head_dim * itemsize * pairs // block
        moved = (2 if kernel == "forward" else 3) * q_bytes + (2 * k_bytes if cached else streamed)
    return Cost(_PRODUCTS[kernel] * 2 * heads * head_dim * pairs, heads * pairs, moved)


def visits(
    q: Tokens, k: Tokens, block_q: int, block_kv: int, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """For each block of queries the key blocks it must visit, and the reverse, from padded tokens.

    Returns two int32 arrays of lists: [B, query blocks, 2 + key blocks] and [B, key blocks, 2 +
    query blocks]. A list begins with two counts: how many blocks to visit, and how many of them
    need no mask. The numbers of the blocks follow: first those that need no mask, then those that
    need one, then those not to be visited. Each of the three parts is in rising order.
    """
    q_bounds = bounds(q, block_q)
    k_bounds = bounds(k, block_kv)
    seen = may_see(q_bounds, k_bounds, window)
    whole = _unpadded(q, block_q)[:, :, None] & _unpadded(k, block_kv)[:, None]
    whole &= must_see(q_bounds, k_bounds, window)
    return _lists(seen, whole), _lists(seen.swapaxes(1, 2), whole.swapaxes(1, 2))


def _unpadded(tokens: Tokens, block: int) -> jax.Array:
    return (tokens.segments > 0).reshape(tokens.shape[0], -1, block).all(axis=2)


def _lists(seen: jax.Array, whole: jax.Array) -> jax.Array:
    # a stable sort by kind keeps the blocks of one kind in rising order
    order = jnp.argsort(jnp.where(whole, 0, jnp.where(seen, 1, 2)), axis=-1, stable=True).astype(
        jnp.int32
    )
    counts = [x.sum(axis=-1, keepdims=True, dtype=jnp.int32) for x in (seen | whole, whole)]
    return jnp.concatenate([*counts, order], axis=-1)
