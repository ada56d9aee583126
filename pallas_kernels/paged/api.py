"""Attention of few new tokens to the pages of a KV cache, all of them or those picked, on TPU, GPU
or as plain jnp.

Decoding is limited by how much is read. Only pages that some query needs are therefore read, and
once for all query heads that share them. The pages of a row are cut into splits, which run in
parallel, so that even a batch of one fills a device. Their results are merged by their log-sum-exps
(Flash-Decoding, Dao et al. 2023).

Dimensions: B rows, T queries, P pages of a table, N query heads, K key/value heads, G = N / K, H
head size, C lists of picks per query (K or N), n picks.
"""

from __future__ import annotations

import dataclasses
import functools
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
from pallas_kernels.finite import kept
from pallas_kernels.paged import gpu, reference, tpu
from pallas_kernels.paged.lists import (
    TuningConfig,
    Work,
    dense_work,
    divided,
    heuristic,
    selected_work,
)
from pallas_kernels.softmax import merge
from pallas_kernels.tuned import tuned

KERNELS = {"tpu": tpu, "gpu": gpu}


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    tables: jax.Array,
    q_places: jax.Array,
    lengths: jax.Array,
    *,
    filled: jax.Array | None = None,
    window: int | None = None,
    implementation: str | None = None,
    tuning: TuningConfig | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of q [B, T, N, H] over rows of pages.

    Scores are scaled by 1/sqrt(H), and the softmax is in float32. Query head n reads key/value head
    n // (N / K). A query at place t sees the places s with s <= t, s > t - window and s < lengths.
    What a page holds in other places, even NaN, has no effect.

    k_pages, v_pages: [pages, K, page, H], keys rotated as q is.
    tables: int32 [B, P], the pages of a row, -1 for none.
    q_places: int32 [B, T], the place of each query in its row's sequence: consecutive, then -1 for
      padding.
    lengths: int32 [B], places of a row.
    filled: int32 [B, P], how many places at the start of each page hold a token; nobody sees the
      others. None where no page before a row's end has empty places.
    implementation: "tpu", "gpu", "reference", or None for the one that suits the backend and input.
    tuning: sizes, or None for those of the heuristic.
    interpret: False, or the interpreter's parameters (``pltpu.InterpretParams``,
      ``plgpu.InterpretGPUParams``), which need a named implementation.

    Returns (out [B, T, N, H] in q's dtype, lse [B, T, N] float32, or float64 from a float64
    reference). A query that sees no key has out 0 and lse -inf. Both are differentiable in q,
    k_pages and v_pages. The backward pass is that of the reference in XLA, with the pages side by
    side, since a decode step is seldom trained through. Raises ValueError for shapes that do not
    fit, and for a named implementation that cannot run.
    """
    _check_shapes(q, k_pages, v_pages, tables, q_places, lengths, filled)
    choice = (implementation, tuning, interpret)
    options = _options(q, k_pages, v_pages, tables.shape[1], None, window, *choice)
    rows = (tables, q_places, lengths, filled)
    return _run(options, q, k_pages, v_pages, None, *rows)


def selected_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    picks: jax.Array,
    tables: jax.Array,
    q_places: jax.Array,
    lengths: jax.Array,
    *,
    filled: jax.Array | None = None,
    implementation: str | None = None,
    tuning: TuningConfig | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """``paged_attention`` to picked pages only; every query has picks of its own.

    picks: int32 [B, T, C, n], numbers of pages in the sequence, each at most once, -1 for none. C
      is K where the heads of a group share a list, and N where every head has its own. A pick whose
      page is not in the table counts as none.
    """
    _check_shapes(q, k_pages, v_pages, tables, q_places, lengths, filled)
    if picks.shape[:2] != q.shape[:2] or picks.shape[2] not in (k_pages.shape[1], q.shape[2]):
        raise ValueError(
            f"{picks.shape=} must begin with {q.shape[:2]} and {k_pages.shape[1]} or {q.shape[2]}"
        )
    lists, pages = picks.shape[2:]
    choice = (implementation, tuning, interpret)
    options = _options(q, k_pages, v_pages, pages, lists, None, *choice)
    rows = (tables, q_places, lengths, filled)
    return _run(options, q, k_pages, v_pages, picks, *rows)


def append_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tables: jax.Array,
    q_places: jax.Array,
    *,
    filled: jax.Array | None = None,
    window: int | None = None,
    implementation: str | None = None,
    tuning: TuningConfig | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """``paged_attention`` of the last token of every row, whose own key and value are written.

    q: [B, 1, N, H]. k, v: [B, 1, K, H], those of the same tokens, k rotated as q is.
    q_places: int32 [B, 1], the last place of every row; -1 for none, where nothing is written. Nor
      is it at a place without a page. A page that is written to is of one row only.

    On GPU one kernel writes and attends. Returns (out, lse, the pages of keys, the pages of
    values), without gradients. Raises ValueError as ``paged_attention``.
    """
    lengths = q_places[:, 0] + 1
    _check_shapes(q, k_pages, v_pages, tables, q_places, lengths, filled)
    (batch, queries, _, size) = q.shape
    shape = (batch, 1, k_pages.shape[1], size)
    if queries != 1 or k.shape != shape or v.shape != shape:
        raise ValueError(f"{q.shape=} must be of one token, {k.shape=} and {v.shape=} {shape}")
    choice = (implementation, tuning, interpret)
    options = _options(q, k_pages, v_pages, tables.shape[1], None, window, *choice)
    rows = (tables, q_places, lengths, filled)
    if options.implementation != "gpu":
        at = reference.where(tables, q_places, k_pages.shape[2])
        k_pages, v_pages = reference.put((k_pages, v_pages), (k, v), *at)
        out, lse = _run(options, q, k_pages, v_pages, None, *rows)
        return out, lse, k_pages, v_pages
    new = tuple(x[:, 0].astype(k_pages.dtype) for x in kept(k, v))
    k_ref, v_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)
    how = {"window": window, "tuning": options.tuning, "interpret": interpret}
    out, lse = forward("gpu", marked(q), k_ref, v_ref, None, *rows, new=new, **how)
    return out, lse, jax.freeze(k_ref), jax.freeze(v_ref)


def marked(q: jax.Array) -> jax.Array:
    """Queries that are NaN where they are not finite: a score of -inf looks like a key that a query
    does not see.
    """
    return jnp.where(jnp.isfinite(q), q, jnp.nan)


def _run(options: _Options, *arguments) -> tuple[jax.Array, jax.Array]:
    if options.implementation == REFERENCE:
        return _plain(options, *arguments)
    q, *rest = arguments
    return _attention(options, marked(q), *rest)


@dataclasses.dataclass(frozen=True)
class _Options:
    implementation: str
    window: int | None
    tuning: TuningConfig
    interpret: Any


def _options(
    q, k_pages, v_pages, pages, lists, window, implementation, tuning, interpret
) -> _Options:
    """The implementation that runs, with its settings. pages, lists: as for ``tune``."""
    implementation = choose(
        implementation,
        [*KERNELS],
        lambda name: _obstacle(name, q, k_pages, v_pages, interpret),
        interpret,
    )
    if implementation != REFERENCE:
        (_, _, heads, head_dim) = q.shape
        (_, kv_heads, page, _) = k_pages.shape
        on = device(implementation)
        shape = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim, page=page)
        tuning = tuning or tuned(tune(on, q, k_pages, pages, lists), "paged", on, **shape)
        whole = KERNELS[implementation].part(page)
        if tuning.keys % whole:
            raise ValueError(f"keys={tuning.keys} of a step must be a multiple of page={whole}")
    return _Options(implementation, window, tuning, interpret)


def tune(on: str, q, k_pages, pages: int, lists: int | None) -> TuningConfig:
    """The sizes that the heuristic chooses on "tpu", "hopper" or "blackwell".

    q, k_pages: arrays, or their shapes and dtypes. pages: pages of a list. lists: lists of picks of
    a query, None where a row attends to all its pages.
    """
    (batch, queries, heads, _) = q.shape
    (_, kv_heads, page, head_dim) = k_pages.shape
    # a TPU brings whole pages of a row, with all their heads
    together = kv_heads if lists is None and on == "tpu" else 1
    apart = batch * kv_heads // together if lists is None else batch * queries * lists
    rows = queries * heads // kv_heads if lists is None else heads // lists
    return heuristic(
        on, apart, rows, pages * page, 2 * together * head_dim * k_pages.dtype.itemsize, page
    )


def _plain(options: _Options, q, k_pages, v_pages, picks, *rows):
    if picks is None:
        return reference.dense(q, k_pages, v_pages, *rows, window=options.window)
    return reference.selected(q, k_pages, v_pages, picks, *rows)


def forward(
    implementation: str,
    q,
    k_pages,
    v_pages,
    picks,
    tables,
    q_places,
    lengths,
    filled=None,
    *,
    window,
    tuning,
    new=None,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) by the named kernel, for the backend that this is traced for.

    picks: None to attend to all pages. new: as for ``gpu.forward``, with references to pages.
    """
    kv_heads, stored = k_pages.shape[1:3]
    page = KERNELS[implementation].part(stored)
    if page < stored:
        parts = stored // page
        tables, picks, filled = divided(parts, page, tables, picks, filled)
    if picks is None:
        work = dense_work(tables, q_places, lengths, window, page, tuning, filled)
        heads = kv_heads
    else:
        work = selected_work(picks, tables, q_places, lengths, page, tuning, filled)
        heads = picks.shape[2]
    options = {} if new is None else {"new": new}

    def kernel(rows: jax.Array):
        return KERNELS[implementation].forward(
            rows, k_pages, v_pages, work, tuning=tuning, interpret=interpret, **options
        )

    return by_units(q, work, heads, kernel)


def by_units(
    q: jax.Array, work: Work, heads: int, kernel: Callable[[jax.Array], tuple]
) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, N, V], lse [B, T, N]) of q [B, T, N, H] by a kernel.

    heads: K', the heads of queries that share keys. kernel: gives rows [U, K', R, H] of queries
      their results of each split, (out [splits, U, K', R, V], lse [splits, U, K', R]), or merged
      without the first axis.
    """
    units, queries = work.bounds.shape[::2]
    # query heads before queries, so that a block of rows repeats the queries' places
    rows = q.reshape(units, queries, heads, -1, q.shape[3]).transpose(0, 2, 3, 1, 4)
    shape = rows.shape
    out, lse = kernel(rows.reshape(units, heads, -1, q.shape[3]))
    size = out.shape[-1]
    if lse.ndim == 3:  # the kernel has merged
        if queries == 1:
            return out.reshape(*q.shape[:3], size), lse.reshape(q.shape[:3])
    else:
        out, lse = merge(list(out), list(lse))
    out = out.reshape(*shape[:4], size).transpose(0, 3, 1, 2, 4)
    lse = lse.reshape(shape[:4]).transpose(0, 3, 1, 2)
    # what the kernels return for queries that see nothing, as padding, means nothing
    seen = jnp.broadcast_to(work.seeing[:, :, None, None], lse.shape)
    out = jnp.where(seen[..., None], out, 0)
    lse = jnp.where(seen, lse, -jnp.inf)
    return out.reshape(*q.shape[:3], size).astype(q.dtype), lse.reshape(q.shape[:3])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: _Options, *arguments):
    how = {"window": options.window, "tuning": options.tuning, "interpret": options.interpret}
    return forward(options.implementation, *arguments, **how)


def _forward(options: _Options, *arguments):
    # the arguments are enough: the backward pass runs the reference again
    return _attention(options, *arguments), arguments


def _backward(options: _Options, arguments, cotangents):
    q, k_pages, v_pages, *rest = arguments
    _, pull = jax.vjp(lambda *x: _plain(options, *x, *rest), q, k_pages, v_pages)
    return *pull(cotangents), *(None for _ in rest)


_attention.defvjp(_forward, _backward)


def check_pages(q, k_pages, v_pages) -> None:
    """Raises ValueError if q [B, T, N, H] cannot attend to pages [pages, K, page, H]."""
    num_heads = q.shape[2]
    num_kv_heads = k_pages.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads=} must be a multiple of {num_kv_heads=}")
    if k_pages.shape != v_pages.shape or q.shape[3] != k_pages.shape[3]:
        raise ValueError(
            f"{q.shape=}, {k_pages.shape=} and {v_pages.shape=} must agree in head size, keys with "
            "values"
        )


def _check_shapes(q, k_pages, v_pages, *rows) -> None:
    check_pages(q, k_pages, v_pages)
    check_rows(q, *rows)


def check_rows(q, tables, q_places, lengths, filled) -> None:
    """Raises ValueError if the tables and places are not those of the rows of q [B, T, N, H]."""
    if q_places.shape != q.shape[:2] or tables.shape[:1] + lengths.shape != 2 * q.shape[:1]:
        raise ValueError(
            f"{q_places.shape=}, {tables.shape=} and {lengths.shape=} must be of the rows of "
            f"{q.shape=}"
        )
    if filled is not None and filled.shape != tables.shape:
        raise ValueError(f"{filled.shape=} must be that of {tables.shape=}")


def _obstacle(name: str, q, k_pages, v_pages, interpret) -> str | None:
    """Reason why a kernel cannot run the input here, or None."""
    found = backend_obstacle(name, (q, k_pages, v_pages), KERNELS[name].DTYPES, interpret)
    return found or KERNELS[name].obstacle(q.shape, k_pages.shape, device(name))


def obstacle_on(
    platform: str, name: str, dtype: str, q_shape: tuple[int, ...], pages_shape: tuple[int, ...]
) -> str | None:
    """Reason why a kernel could not run q [B, T, N, H] and pages [pages, K, page, H] on a
    platform, or None.

    platform: as from ``choice.here``.
    """
    return (
        platform_obstacle(name, platform)
        or dtype_obstacle({dtype}, KERNELS[name].DTYPES)
        or KERNELS[name].obstacle(q_shape, pages_shape, platform)
    )
