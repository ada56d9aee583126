"""How rows are cut into blocks: their sizes per device, and the lists of blocks that each block
visits.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.cost import Cost
from pallas_kernels.tokens import Tokens, bounds, may_see, must_see


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """Tokens per block of queries and of keys, of the forward pass and of each backward pass.

    steps: blocks in flight on GPU; on TPU there are always two. matrix_unit: on GPU, "wgmma"
    (Hopper) or "tcgen05" (Blackwell).
    """

    block_q: int
    block_kv: int
    block_q_dq: int
    block_kv_dq: int
    block_q_dkv: int
    block_kv_dkv: int
    steps: int = 2
    matrix_unit: str = "wgmma"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type == "int" and (value := getattr(self, field.name)) < 1:
                raise ValueError(f"{field.name}={value} must be positive")


def heuristic(device: str, groups: int, head_dim: int) -> TuningConfig:
    """Block sizes for "tpu", "hopper" or "blackwell" and ``groups`` heads per key/value head;
    nothing was timed.
    """
    if device == "hopper":
        # what a thread block holds is two tiles of 64; what it streams is bounded by registers
        return TuningConfig(128, 128, 128, 64, 64, 128)
    if device == "blackwell":
        return TuningConfig(128, 64, 128, 64, 64, 128, matrix_unit="tcgen05")
    # a block holds its query heads of one key/value head: about 1,024 rows of scores, and full
    # lanes
    block_q = min(max(128, 1024 // groups // 128 * 128), 512)
    return TuningConfig(block_q, 512, max(128, block_q // 2), 512, max(128, block_q // 2), 512)


# products of a head's size per pair of query and key: scores and values; and for gradients the
# scores' and their own
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
    """Cost of "forward", "backward_q" or "backward_kv" on whole causal rows q [B, T, N, H], k [B,
    S, K, H].

    The real one depends on the tokens. Queries are the last T of the S. Blocks that are read again
    count again, unless they are cached.
    """
    batch, queries, heads, head_dim = q_shape
    keys, kv_heads = k_shape[1:3]
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
    """What each block must visit, from padded tokens.

    Returns int32 lists [B, query blocks, 2 + key blocks] and [B, key blocks, 2 + query blocks]: how
    many to visit, how many of them need no mask, then those without a mask, those with one, and
    those that are not needed, each in order.
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
    order = jnp.argsort(jnp.where(whole, 0, jnp.where(seen, 1, 2)), axis=-1, stable=True).astype(
        jnp.int32
    )
    counts = [x.sum(axis=-1, keepdims=True, dtype=jnp.int32) for x in (seen | whole, whole)]
    return jnp.concatenate([*counts, order], axis=-1)
