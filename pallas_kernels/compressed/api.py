"""NSA's compressed attention (2502.11089, sections 3.2 and 3.3.1), which also picks the blocks for
the selected branch.

Attention to the compressed keys, one for each stretch, is ``flash_attention``, forward and
backward. The picks come from a second kernel:

1. It computes the scores of the stretches again.
2. The final log-sum-exp turns them into probabilities.
3. It sums these over the query heads of a group and over the stretches of each block.
4. It keeps the best blocks.

Neither the probabilities [.., T, E] nor the scores of blocks [.., T, J] are therefore ever in HBM.
Departure from the paper: a stretch belongs to the blocks by the tokens they share (equation 9 read
with indices from 1).

Dimensions: B rows, T queries, J blocks, E stretches, N query heads, K key/value heads, H head size,
n picks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.choice import REFERENCE, choose, device
from pallas_kernels.compressed import gpu, reference, tpu
from pallas_kernels.compressed.blocks import Selection, TuningConfig, heuristic
from pallas_kernels.finite import NOTHING, cleaned
from pallas_kernels.flash.api import flash_attention
from pallas_kernels.flash.api import obstacle as flash_obstacle
from pallas_kernels.flash.api import obstacle_on as flash_obstacle_on
from pallas_kernels.tokens import Tokens
from pallas_kernels.tuned import tuned

KERNELS = {"tpu": tpu, "gpu": gpu}


def compressed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_tokens: Tokens,
    own_from: jax.Array,
    k_tokens: Tokens,
    k_starts: jax.Array,
    heads: Tokens,
    shadows: jax.Array | None,
    *,
    selection: Selection,
    ahead: int = 0,
    implementation: str | None = None,
    tuning: TuningConfig | None = None,
    interpret: Any = False,
    fallback: Callable[[], tuple[jax.Array, jax.Array, jax.Array]] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Softmax attention of q [B, T, N, H] over k, v [B, E, K, H], one key for each stretch, and the
    blocks that it picks.

    q_tokens: [B, T], of the queries.
    own_from: int32 [B, T], the order from which a query's branch has blocks of its own. The query
      sees none of the prompt's blocks that start there or later.
    k_tokens: [B, E], of each stretch's last token; segment 0 where there is no stretch.
    k_starts: int32 [B, E], the order of each stretch's first token.
    heads: [B, J], of each block's first token. E = J block / stride, and the stretch of entry e
      starts e - ahead strides after the first block does.
    ahead: 0 in rows, where a stretch lies with its first token. length / stride - 1 in a cache,
      where it lies with its last one; the first ``ahead`` entries then hold no stretch.
    shadows: None, or int32 [B, J]. For a branch's first block it is the prompt's block of which
      that block is a copy, and whose score is added to its own; -1 for other blocks. The queries
      that see the copy must have the order of its first token as own_from. No stretch may reach
      into the copy from the block before it.
    implementation, tuning, interpret, fallback: as for ``flash_attention``.

    Returns (out [B, T, N, H] in v's dtype, lse [B, T, N] float32 or wider, picks int32 [B, T, K,
    n]). A query that sees no stretch has out 0 and lse -inf. The picks are the numbers of the
    blocks that are always taken (``Selection``) and of those with the highest probability; ties go
    to the lower number. They are in no certain order, and -1 where fewer than n blocks are seen.
    Out and lse are differentiable in q, k and v. Raises ValueError for shapes that do not fit, and
    for a named implementation that cannot run.
    """
    _check_shapes(k, q_tokens, own_from, k_tokens, k_starts, heads, shadows, selection)
    # ``Tokens.limits`` keeps a branch from those keys of the prompt of which it has copies
    q_tokens = dataclasses.replace(q_tokens, limits=own_from.astype(jnp.int32))
    k_tokens = dataclasses.replace(k_tokens, limits=k_starts.astype(jnp.int32))
    heads = dataclasses.replace(heads, limits=heads.order)

    def obstacle(name: str) -> str | None:
        return flash_obstacle(name, q, k, v, interpret) or KERNELS[name].obstacle(
            q.shape, k.shape, selection
        )

    implementation = choose(implementation, [*KERNELS], obstacle, interpret)
    if implementation == REFERENCE and fallback:
        return fallback()
    kernels = implementation != REFERENCE
    attention = None
    if kernels:
        tuning = tuning or _sizes(
            device(implementation), q.shape[2] // k.shape[2], q.shape[3], heads.shape[1]
        )
        attention = tuning.attention
    out, lse = flash_attention(
        q,
        k,
        v,
        q_tokens,
        k_tokens,
        implementation=implementation,
        tuning=attention,
        interpret=interpret,
    )
    # A choice has no gradient. A query whose result is NaN takes blocks as if it saw no stretch, so
    # that its picks are numbers of blocks all the same.
    fixed = (cleaned(q), cleaned(k), jnp.where(jnp.isnan(lse), NOTHING, lse))
    arguments = (*jax.lax.stop_gradient(fixed), q_tokens, k_tokens, heads, shadows)
    if not kernels:
        return out, lse, reference.select(*arguments, selection=selection, ahead=ahead)
    select = KERNELS[implementation].select
    options = dict(selection=selection, ahead=ahead, tuning=tuning, interpret=interpret)
    return out, lse, select(*arguments, **options)


def _sizes(on: str, groups: int, head_dim: int, count: int) -> TuningConfig:
    return tuned(
        heuristic(on, groups, head_dim, count), "compressed", on, groups=groups, head_dim=head_dim
    )


def _check_shapes(
    k, q_tokens, own_from, k_tokens, k_starts, heads, shadows, selection: Selection
) -> None:
    if k.shape[1] != heads.shape[1] * selection.ratio:
        raise ValueError(
            f"{k.shape[1]=} stretches must be {selection.ratio} for each of {heads.shape[1]=} "
            "blocks"
        )
    for name, x, shape in (
        ("own_from", own_from, q_tokens.shape),
        ("k_starts", k_starts, k_tokens.shape),
    ):
        if x.shape != shape:
            raise ValueError(f"{name}.shape={x.shape} must be that of its tokens, {shape}")
    if shadows is not None and shadows.shape != heads.shape:
        raise ValueError(f"{shadows.shape=} must be that of {heads.shape=}")


def obstacle_on(
    platform: str,
    name: str,
    dtype: str,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    selection: Selection,
) -> str | None:
    """Reason why a kernel could not run q [B, T, N, H] and compressed k [B, E, K, H] on a
    platform, or None.

    platform: as from ``choice.here``.
    """
    found = flash_obstacle_on(platform, name, dtype, q_shape, k_shape)
    return found or KERNELS[name].obstacle(q_shape, k_shape, selection)
