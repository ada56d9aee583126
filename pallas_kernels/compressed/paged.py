"""Attention of few new tokens to the compressed keys in the pages of a cache, with the scores that
blocks are picked by.

Decoding is limited by how much is read. The kernels read the pages from where they lie: the table
of pages is read in the kernel on GPU, and from scalar memory on TPU. To lay a row's pages side by
side first costs two more passes over them. At 262,144 tokens, 4 key/value heads of 128 and a stride
of 16, a row has 34 MB of compressed keys and values, 9 of every 10 bytes that NSA reads to decode.
A chunk of a prompt has work for each byte instead: its rows are laid side by side (67 MB moved for
1.1 TFLOP with 2,048 queries of 64 heads, 2 % of the time at peak), and ``api`` attends to them.

A page holds few stretches (4 with blocks of 64), fewer than the rows that matrix units and copies
to their layouts work in. On GPU the pages of a step are therefore copied side by side, and then
from there into the layout of the matrix unit.

The score of a stretch is its probability, summed over the query heads of a group. The kernel writes
the scores before the softmax (float32, 1/8 of the bytes of keys and values for 16 heads), because
probabilities need the final log-sum-exp.

Dimensions: B rows, T queries, P pages of a table, e stretches of a page, E = P e, N query heads, K
key/value heads, G = N / K, H head size, R = G T rows of a key/value head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.choice import (
    REFERENCE,
    backend_obstacle,
    choose,
    device,
    dtype_obstacle,
    platform_obstacle,
)
from pallas_kernels.compressed import paged_gpu, paged_tpu, reference
from pallas_kernels.padding import pad
from pallas_kernels.paged.api import check_pages
from pallas_kernels.softmax import merge
from pallas_kernels.tuned import check_positive

KERNELS = {"tpu": paged_tpu, "gpu": paged_gpu}
# Stretches of a step.
KEYS = 128


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """Sizes of the paged kernels."""

    # Parts of a row that are attended to separately, and then merged.
    splits: int
    # Steps in flight on GPU. On TPU there are always two.
    steps: int = 2
    # On GPU, "wgmma" (Hopper) or "tcgen05" (Blackwell).
    matrix_unit: str = "wgmma"

    def __post_init__(self) -> None:
        check_positive(self)


def heuristic(on: str, parts: int, entries: int) -> TuningConfig:
    """Sizes for "tpu", "hopper" or "blackwell", chosen by reasoning and not by timing.

    parts: rows times key/value heads. entries: E.
    """
    steps = -(-entries // KEYS)
    if on == "tpu":
        return TuningConfig(1)  # the rows run in parallel where two cores share a kernel
    # two thread blocks for each of about 132 processors, and at least 4 steps for each
    splits = max(1, min(-(-264 // parts), steps // 4))
    return TuningConfig(splits, matrix_unit="wgmma" if on == "hopper" else "tcgen05")


def paged_compressed_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    last: jax.Array,
    real: jax.Array | None = None,
    *,
    first: int,
    implementation: str | None = None,
    tuning: TuningConfig | None = None,
    interpret: Any = False,
    fallback: Callable[[], Any] | None = None,
) -> Any:
    """Softmax attention of q [B, T, N, H] to the compressed keys of a row's pages.

    k_pages, v_pages: [pages, K, e, H], rotated as q is. table: int32 [B, P], the pages of a row, -1
      for none.
    last: int32 [B, T], the last entry of the row's E that a query sees, less than ``first`` where
      it sees none. It sees the entries from ``first`` on. What lies in other entries, even NaN, has
      no effect.
    real: None, or bool [B, E], False for entries that no query of the row sees at all.
    implementation, interpret, fallback: as for ``flash_attention``. No gradient is defined.

    Returns (out [B, T, N, H] in q's dtype, lse [B, T, N] float32 or wider, scores [B, K, T, E]: the
    probability of each entry, summed over the heads of a group). A query that sees nothing has out
    0, lse -inf and scores 0. Raises ValueError for shapes that do not fit, and for a named
    implementation that cannot run.
    """
    entries = table.shape[1] * k_pages.shape[2]
    real = jnp.ones((q.shape[0], entries), bool) if real is None else real
    _check_shapes(q, k_pages, v_pages, table, last, real)
    parts = q.shape[0] * k_pages.shape[1]

    def sizes(name: str) -> TuningConfig:
        return tuning or heuristic(device(name), parts, entries)

    def obstacle(name: str) -> str | None:
        arrays = (q, k_pages, v_pages)
        found = backend_obstacle(name, arrays, KERNELS[name].DTYPES, interpret)
        return found or KERNELS[name].obstacle(
            q.shape, k_pages.shape, entries, sizes(name).splits, KEYS, device(name)
        )

    implementation = choose(implementation, [*KERNELS], obstacle, interpret)
    if implementation == REFERENCE:
        if fallback:
            return fallback()
        return reference.paged(q, k_pages, v_pages, table, last, real, first=first)
    options = dict(first=first, tuning=sizes(implementation), interpret=interpret)
    # scores of an infinite query could be -inf, which looks like an entry that it does not see
    q = jnp.where(jnp.isfinite(q), q, jnp.nan)
    return forward(implementation, q, k_pages, v_pages, table, last, real, **options)


def forward(name, q, k_pages, v_pages, table, last, real, *, first, tuning, interpret=False):
    """By the named kernel, for the backend that this is traced for."""
    batch, queries, heads, head_dim = q.shape
    (_, kv_heads, each, _) = k_pages.shape
    groups = heads // kv_heads
    entries = table.shape[1] * each
    # rows are heads before queries, so that they repeat the queries' bounds
    rows = q.reshape(batch, queries, kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, -1, head_dim)
    bounds = jnp.tile(last, (1, groups))
    high = jnp.minimum(jnp.max(last, axis=1), entries - 1)
    spans = _spans(high, first, each, tuning.splits)
    outs, lses, logits = KERNELS[name].forward(
        rows,
        k_pages,
        v_pages,
        jnp.maximum(table, 0),
        bounds,
        spans,
        pad(real.astype(jnp.int32), KEYS),
        first=first,
        keys=KEYS,
        entries=entries,
        tuning=tuning,
        interpret=interpret,
    )
    out, lse = merge(list(outs), list(lses))
    # scores of entries that are not seen may be anything, and results of rows that see none
    number = jnp.arange(entries)
    visible = (number >= first) & (number <= bounds[:, None, :, None]) & real[:, None, None]
    seen = jnp.broadcast_to(visible.any(axis=-1), lse.shape)
    out = jnp.where(seen[..., None], out, 0.0)
    lse = jnp.where(seen, lse, -jnp.inf)
    weights = jnp.where(visible, jnp.exp(logits[..., :entries] - lse[..., None]), 0.0)
    scores = weights.reshape(batch, kv_heads, groups, queries, entries).sum(axis=2)

    def back(x):
        x = x.reshape(batch, kv_heads, groups, queries, *x.shape[3:])
        return jnp.moveaxis(x, 3, 1).reshape(batch, queries, heads, *x.shape[4:])

    return back(out).astype(q.dtype), back(lse), scores


def _spans(high: jax.Array, first: int, each: int, splits: int) -> jax.Array:
    """int32 [B, 2 splits + 1]: where each split begins and ends among the pages, and ``high``.

    Splits are whole steps, so that only the last one ends within a step.
    """
    width = KEYS // each
    pages = jnp.where(high >= first, high // each + 1, 0)
    own = -(-pages // (splits * width)) * width
    begins = jnp.minimum(jnp.arange(splits) * own[:, None], pages[:, None])
    ends = jnp.minimum(begins + own[:, None], pages[:, None])
    ranges = jnp.stack([begins, ends], axis=-1).reshape(high.shape[0], -1)
    return jnp.concatenate([ranges, high[:, None]], axis=1).astype(jnp.int32)


def obstacle_on(
    platform: str,
    name: str,
    dtype: str,
    q_shape: tuple[int, ...],
    pages_shape: tuple[int, ...],
    entries: int,
) -> str | None:
    """Reason why a kernel could not run q [B, T, N, H] and pages [pages, K, e, H], of which a
    row has ``entries`` stretches, on a platform, or None.

    platform: as from ``choice.here``.
    """
    found = platform_obstacle(name, platform) or dtype_obstacle({dtype}, KERNELS[name].DTYPES)
    if found:
        return found
    splits = heuristic(platform, q_shape[0] * pages_shape[1], entries).splits
    return KERNELS[name].obstacle(q_shape, pages_shape, entries, splits, KEYS, platform)


def _check_shapes(q, k_pages, v_pages, table, last, real) -> None:
    check_pages(q, k_pages, v_pages)
    if last.shape != q.shape[:2] or table.shape[:1] != q.shape[:1]:
        raise ValueError(f"{last.shape=} and {table.shape=} must be of the rows of {q.shape=}")
    if real.shape != (q.shape[0], table.shape[1] * k_pages.shape[2]):
        raise ValueError(f"{real.shape=} must be of the rows and entries of {table.shape=}")
