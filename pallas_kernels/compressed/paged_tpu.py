"""Attention of few tokens to compressed keys in pages on TPU (Mosaic).

A grid step is one row of the batch, with all heads. It goes through the pages, KEYS stretches
at a time, while the next ones are fetched into the other of two buffers. Whole pages are fetched,
with every key/value head, since they lie in one piece.

Dimensions: those of ``paged``.
"""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.flash.tpu import VMEM_LIMIT, dot, to_sublanes
from pallas_kernels.padding import pad
from pallas_kernels.tokens import MASKED

DTYPES = ("float32", "bfloat16")
LANES = 128
# Rows of a tile of bfloat16, the narrowest of DTYPES.
SUBLANES = 16
# Most bytes of scores that a grid step holds.
MAX_SCORES = 2**24


def obstacle(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    entries: int,
    splits: int,
    keys: int,
    on: str,
) -> str | None:
    """Reason why the kernel cannot run q [B, T, N, H] and pages [pages, K, e, H], of which a
    row has ``entries`` stretches, on "tpu", "hopper" or "blackwell", or None.
    """
    (_, kv_heads, each, head_dim) = k_shape
    if keys % each:
        return f"{each} stretches of a page must divide {keys}"
    if head_dim % LANES:
        return f"{head_dim=} must be a multiple of {LANES}"
    rows = -(-q_shape[1] * q_shape[2] // kv_heads // SUBLANES) * SUBLANES
    held = 4 * kv_heads * rows * _steps(entries, keys) * keys
    if held > MAX_SCORES:
        return f"{held} bytes of scores are more than {MAX_SCORES}"
    return None if splits == 1 else f"{splits=} must be 1 on TPU, where rows run in parallel"


def forward(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    bounds: jax.Array,
    spans: jax.Array,
    real: jax.Array,
    *,
    first: int,
    keys: int,
    entries: int,
    tuning,
    interpret=False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of q [B, K, R, H] to pages [pages, K, e, H], each split by itself.

    table: int32 [B, P], not negative. bounds: int32 [B, R], the last entry that each row sees.
    spans: int32 [B, 2 splits + 1], from ``paged``. real: int32 [B, E up to whole steps], 0 for
    entries that are not seen. keys: stretches of a step.

    Returns (out [splits, B, K, R, H], lse [splits, B, K, R], scores before the softmax [B, K, R, at
    least ``entries``]) in float32. Scores of steps that no query sees are not written. The lse of a
    row that sees nothing of a split is -inf.
    """
    (batch, kv_heads, rows, head_dim) = q.shape
    each = k_pages.shape[2]
    steps = _steps(entries, keys)
    q = pad(q, SUBLANES, axis=2)
    bounds = pad(bounds + 1, SUBLANES)[..., None] - 1  # further rows see nothing
    padded = q.shape[2]
    width = keys // each
    results = lambda b: (0, b, 0, 0, 0)  # noqa: E731
    out, lse, scores = pl.pallas_call(
        functools.partial(_kernel, first=first, scale=head_dim**-0.5, width=width),
        grid=(batch,),
        in_specs=[
            _scalars(table.shape[1]),
            _scalars(spans.shape[1]),
            pl.BlockSpec((1, padded, 1), lambda b: (b, 0, 0)),
            pl.BlockSpec((1, steps, 1, keys), lambda b: (b, 0, 0, 0)),
            pl.BlockSpec((1, kv_heads, padded, head_dim), lambda b: (b, 0, 0, 0)),
            pl.BlockSpec(memory_space=pl.ANY),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=[
            pl.BlockSpec((1, 1, kv_heads, padded, head_dim), results),
            pl.BlockSpec((1, 1, kv_heads, padded, 1), results),
            pl.BlockSpec((1, kv_heads, steps, padded, keys), lambda b: (b, 0, 0, 0, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((1, batch, kv_heads, padded, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((1, batch, kv_heads, padded, 1), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, steps, padded, keys), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((2, width, *k_pages.shape[1:]), k_pages.dtype),
            pltpu.VMEM((2, width, *k_pages.shape[1:]), v_pages.dtype),
            pltpu.VMEM((kv_heads, padded, 1), jnp.float32),
            pltpu.VMEM((kv_heads, padded, 1), jnp.float32),
            pltpu.VMEM((kv_heads, padded, head_dim), jnp.float32),
            pltpu.SemaphoreType.DMA((2, 2, width)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=interpret,
        name="compressed_paged_attention",
    )(
        table[:, None, None],
        spans[:, None, None],
        bounds,
        real.reshape(batch, steps, 1, keys),
        q,
        k_pages,
        v_pages,
    )
    scores = scores.transpose(0, 1, 3, 2, 4).reshape(batch, kv_heads, padded, -1)
    return out[:, :, :, :rows], lse[:, :, :, :rows, 0], scores[:, :, :rows]


# The memory of ``_kernel``.
_Refs = collections.namedtuple(
    "_Refs",
    # Of the grid step's row: its pages, the ends of its splits, the last entry that each query
    # sees, which entries are seen, and the queries.
    "table spans bounds real q "
    # In HBM: pages of keys and of values.
    "k v "
    # The row's results.
    "out lse scores "
    # Two buffers for pages of keys, and two for values.
    "k_two v_two "
    # Of each query: maximum and sum of the softmax, and the weighted sum of values.
    "top total acc "
    # By buffer, keys or values, and page of a step.
    "semaphores",
)


def _kernel(*arguments, first: int, scale: float, width: int):
    refs = _Refs(*arguments)
    (_, _, kv_heads, each, head_dim) = refs.k_two.shape
    keys = width * each
    begin = refs.spans[0, 0, 0, 0]
    end = refs.spans[0, 0, 0, 1]
    high = refs.spans[0, 0, 0, 2]
    # div, which truncates, is enough for numbers that are not negative
    steps = jax.lax.div(end - begin + width - 1, width)
    # above MASKED, so that a masked score weighs nothing even before a visible key was met
    refs.top[...] = jnp.full(refs.top.shape, MASKED / 2, jnp.float32)
    refs.total[...] = jnp.zeros(refs.total.shape, jnp.float32)
    refs.acc[...] = jnp.zeros(refs.acc.shape, jnp.float32)

    def copies(step):
        slot = jax.lax.rem(step, 2)
        for i in range(width):
            # a page past the end is the last one again, and is masked
            page = refs.table[0, 0, 0, jnp.minimum(begin + step * width + i, end - 1)]
            for j, (source, two) in enumerate(((refs.k, refs.k_two), (refs.v, refs.v_two))):
                yield pltpu.make_async_copy(
                    source.at[page], two.at[slot, i], refs.semaphores.at[slot, j, i]
                )

    def start(step):
        for copy in copies(step):
            copy.start()

    pl.when(steps > 0)(lambda: start(0))

    @pl.loop(0, steps)
    def _(step):
        slot = jax.lax.rem(step, 2)
        # into the other slot: the step before, which read it, is over
        pl.when(step + 1 < steps)(lambda: start(step + 1))
        for copy in copies(step):
            copy.wait()
        place = (begin + step * width) * each
        lane = place + jax.lax.broadcasted_iota(jnp.int32, (1, keys), 1)
        past = end * each
        some = (lane >= first) & (lane <= high) & (lane < past) & (refs.real[0, step] > 0)
        mask = some & (lane <= refs.bounds[0])
        # values that no query sees may not be finite, and 0 times them would be NaN
        kept = to_sublanes(some.astype(jnp.float32)) > 0
        for head in range(kv_heads):
            own = refs.k_two[slot, :, head].reshape(keys, head_dim)
            found = dot(refs.q[0, head], own, ((1,), (1,))) * scale
            found = jnp.where(mask, found, MASKED)
            refs.scores[0, head, step] = found
            new_top = jnp.maximum(refs.top[head], jnp.max(found, axis=1, keepdims=True))
            weights = jnp.exp(found - new_top)
            shrink = jnp.exp(refs.top[head] - new_top)
            refs.top[head] = new_top
            refs.total[head] = refs.total[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
            values = refs.v_two[slot, :, head].reshape(keys, head_dim)
            values = jnp.where(kept, values, jnp.zeros_like(values))
            refs.acc[head] = refs.acc[head] * shrink + dot(
                weights.astype(values.dtype), values, ((1,), (0,))
            )

    nothing = refs.total[...] == 0
    divisor = jnp.where(nothing, 1.0, refs.total[...])
    refs.out[0, 0] = refs.acc[...] / divisor
    refs.lse[0, 0] = jnp.where(nothing, -jnp.inf, jnp.log(divisor) + refs.top[...])


def _steps(entries: int, keys: int) -> int:
    """Most steps of a row."""
    return -(-entries // keys)


def _scalars(length: int) -> pl.BlockSpec:
    """A row of [B, 1, 1, length] in scalar memory."""
    return pl.BlockSpec((1, 1, 1, length), lambda b: (b, 0, 0, 0), memory_space=pltpu.SMEM)
