"""Attention of few new tokens to the pages of a cache of latent vectors, on TPU, GPU or as plain
jnp: one vector of a token is the key of all heads, and its first elements are the value (MLA;
2405.04434, section 2.1.2).

It is ``paged_attention`` with one key/value head whose values need not be read, since they are a
part of the keys.

Dimensions: B rows, T queries, P pages of a table, N query heads, E elements of a vector.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.choice import (
    REFERENCE,
    backend_obstacle,
    choose,
    device,
    dtype_obstacle,
    here,
    platform_obstacle,
)
from pallas_kernels.latent import gpu, tpu
from pallas_kernels.paged import reference
from pallas_kernels.paged.api import by_units, check_rows, marked
from pallas_kernels.paged.lists import (
    TuningConfig,
    dense_work,
    divided,
    heuristic,
    splits_for,
)
from pallas_kernels.tuned import tuned

KERNELS = {"tpu": tpu, "gpu": gpu}
# Elements of a row of a TPU's memory.
_LANES = 128


def stored_size(size: int) -> int:
    """Elements that pages keep of vectors of ``size``, zeros behind them: on TPU a multiple of 128,
    which its memory takes anyway. XLA keeps arrays of another size in an order that it would have
    to copy for each kernel.
    """
    return -(-size // _LANES) * _LANES if here() == "tpu" else size


def latent_attention(
    q: jax.Array,
    pages: jax.Array,
    rank: int,
    tables: jax.Array,
    q_places: jax.Array,
    lengths: jax.Array,
    *,
    filled: jax.Array | None = None,
    implementation: str | None = None,
    tuning: TuningConfig | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of q [B, T, N, E] over rows of pages [pages, 1, page, E], in which the
    first ``rank`` elements of a key are its value. Pages may have zeros behind the E elements
    (``stored_size``).

    Scores are scaled by 1/sqrt(E), and the softmax is in float32. tables, q_places, lengths,
    filled, implementation, tuning and interpret: as of ``paged_attention``.

    Returns (out [B, T, N, rank] in q's dtype, lse [B, T, N] float32, or float64 from a float64
    reference). A query that sees no key has out 0 and lse -inf. Both are differentiable in q and
    pages, with the backward pass of the reference in XLA. Raises ValueError for shapes that do not
    fit, and for a named implementation that cannot run.
    """
    _check_vectors(q, pages, rank)
    check_rows(q, tables, q_places, lengths, filled)
    if more := pages.shape[3] - q.shape[3]:
        wide = q.astype(jnp.promote_types(q.dtype, jnp.float32))
        wide *= (pages.shape[3] / q.shape[3]) ** 0.5  # by whose root scores are divided
        q = jnp.pad(wide.astype(q.dtype), [(0, 0)] * 3 + [(0, more)])
    name = choose(
        implementation,
        [*KERNELS],
        lambda name: _obstacle(name, q, pages, rank, interpret),
        interpret,
    )
    rows = (tables, q_places, lengths, filled)
    if name == REFERENCE:
        return _plain(rank, q, pages, *rows)
    on = device(name)
    shape = dict(heads=q.shape[2], size=q.shape[3], page=pages.shape[2])
    tuning = tuning or tuned(tune(on, q, pages, tables.shape[1]), "latent", on, **shape)
    return _attention(_Options(name, rank, tuning, interpret), marked(q), pages, *rows)


@dataclasses.dataclass(frozen=True)
class _Options:
    implementation: str
    rank: int
    tuning: TuningConfig
    interpret: Any


def tune(on: str, q, pages, count: int) -> TuningConfig:
    """The sizes that the heuristic chooses on "tpu" or "hopper".

    q, pages: arrays, or their shapes and dtypes. count: pages of a list.
    """
    batch, queries, heads, size = q.shape
    page = pages.shape[2]
    bytes_ = size * pages.dtype.itemsize
    found = heuristic(on, batch, queries * heads, count * page, bytes_, page)
    if on == "tpu":
        return found
    blocks = batch * -(-queries * heads // gpu.ROWS)
    steps = -(-count * page // gpu.KEYS)
    return dataclasses.replace(found, splits=splits_for(on, blocks, steps), keys=gpu.KEYS, steps=2)


def _plain(rank: int, q, pages, *rows) -> tuple[jax.Array, jax.Array]:
    out, lse = reference.dense(q, pages, pages, *rows)
    return out[..., :rank], lse


def forward(
    options: _Options, q, pages, tables, q_places, lengths, filled
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) by the kernel that the options name, for the backend that this is traced for."""
    kernel = KERNELS[options.implementation]
    stored = pages.shape[2]
    page = kernel.part(stored)
    if page < stored:
        tables, _, filled = divided(stored // page, page, tables, None, filled)
    work = dense_work(tables, q_places, lengths, None, page, options.tuning, filled)
    how = {"tuning": options.tuning, "interpret": options.interpret}
    return by_units(q, work, 1, lambda rows: kernel.forward(rows, pages, options.rank, work, **how))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: _Options, *arguments):
    return forward(options, *arguments)


def _forward(options: _Options, *arguments):
    # the arguments are enough: the backward pass runs the reference again
    return forward(options, *arguments), arguments


def _backward(options: _Options, arguments, cotangents):
    q, pages, *rest = arguments
    _, pull = jax.vjp(lambda *x: _plain(options.rank, *x, *rest), q, pages)
    return *pull(cotangents), *(None for _ in rest)


_attention.defvjp(_forward, _backward)


def _check_vectors(q, pages, rank: int) -> None:
    if pages.shape[1] != 1 or pages.shape[3] < q.shape[3] or not 0 < rank <= q.shape[3]:
        raise ValueError(
            f"{pages.shape=} must have one vector a token, with the elements of {q.shape=} or "
            f"more, of which {rank=} are the value"
        )


def _obstacle(name: str, q, pages, rank: int, interpret) -> str | None:
    """Reason why a kernel cannot run the input here, or None."""
    found = backend_obstacle(name, (q, pages), KERNELS[name].DTYPES, interpret)
    return found or KERNELS[name].obstacle(q.shape, pages.shape, rank, device(name))


def obstacle_on(
    platform: str,
    name: str,
    dtype: str,
    q_shape: tuple[int, ...],
    pages_shape: tuple[int, ...],
    rank: int,
) -> str | None:
    """Reason why a kernel could not run q [B, T, N, E] and pages [pages, 1, page, E] on a
    platform, or None.

    platform: as from ``choice.here``.
    """
    return (
        platform_obstacle(name, platform)
        or dtype_obstacle({dtype}, KERNELS[name].DTYPES)
        or KERNELS[name].obstacle(q_shape, pages_shape, rank, platform)
    )
