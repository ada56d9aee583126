"""The gated delta rule by chunks, in XLA; runs in float64.

Inside a chunk the rule is a unit triangular system (the WY form of 2412.06464, section 3.3). From
chunk to chunk it is the state.

Dimensions: B rows, N chunks, C tokens of a chunk, K key heads, R value heads of a key head, H key
size, V value size, W columns of a state, V or more.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class Parts(NamedTuple):
    """The linear map of each chunk, which takes the state before it to its results and to the state
    behind it: with ``changes`` = values - corrections S,

        out = queries S + scores changes,    S' = exp(end) S + to_endᵀ changes.
    """

    values: jax.Array  # [B, N, K, R, C, W]
    corrections: jax.Array  # [B, N, K, R, C, H]
    scores: jax.Array  # [B, N, K, R, C, C]
    queries: jax.Array  # [B, N, K, R, C, H]
    to_end: jax.Array  # [B, N, K, R, C, H]
    # The logarithm of the decay over the whole chunk.
    end: jax.Array  # [B, N, K, R, 1]


def parts(
    q: jax.Array,  # [B, N, C, K, H]
    k: jax.Array,  # [B, N, C, K, H]
    v: jax.Array,  # [B, N, C, K, R, V]
    g: jax.Array,  # [B, N, C, K, R]
    beta: jax.Array,  # [B, N, C, K, R]
    columns: int,
) -> Parts:
    """The maps of chunks, arguments as of ``api.chunked``. columns: W."""
    size = q.shape[2]
    within = jnp.tril(jnp.ones((size, size), bool))
    total = jnp.moveaxis(jnp.cumsum(g, axis=2), 2, -1)  # [B, N, K, R, C]
    decay = jnp.exp(jnp.where(within, total[..., :, None] - total[..., None, :], -jnp.inf))
    keys = _einsum("bncki,bndki->bnkcd", k, k)[:, :, :, None]
    rates = jnp.moveaxis(beta, 2, -1)[..., None]  # [B, N, K, R, C, 1]
    system = jnp.where(jnp.tril(within, -1), rates * keys * decay, 0)
    values = rates * jnp.moveaxis(v, 2, 4)
    k_C = jnp.moveaxis(k, 2, 3)[:, :, :, None]  # [B, N, K, 1, C, H]
    q_C = jnp.moveaxis(q, 2, 3)[:, :, :, None]
    grown = jnp.exp(total)[..., None]
    right = jnp.concatenate([values, rates * grown * k_C], axis=-1)
    solved = solve(system, right)
    width = v.shape[-1]
    values, corrections = solved[..., :width], solved[..., width:]
    values = jnp.pad(values, [*((0, 0),) * 5, (0, columns - width)])
    scores = _einsum("bncki,bndki->bnkcd", q, k)[:, :, :, None] * decay
    end = total[..., -1:]
    to_end = jnp.exp(end - total)[..., None] * k_C
    return Parts(values, corrections, scores, q_C * grown, to_end, end)


@jax.custom_vjp
def solve(
    system: jax.Array,  # [..., C, C]
    right: jax.Array,  # [..., C, W]
) -> jax.Array:
    """The x [..., C, W] of (1 + system) x = right; ``system`` is zero on its diagonal and above.

    By products of blocks: XLA's own solver goes row by row, which is slow on CPU and on
    accelerators.
    """
    return _solve_forward(system, right)[0]


def _solve_forward(system, right):
    inverse = _inverse(system)
    x = _matmul(inverse, right)
    return x, (inverse, x)


def _solve_backward(residuals, given):
    inverse, x = residuals
    d_right = _matmul(jnp.swapaxes(inverse, -1, -2), given)
    d_system = -_matmul(d_right, jnp.swapaxes(x, -1, -2))
    return jnp.tril(d_system, -1), d_right


solve.defvjp(_solve_forward, _solve_backward)

# Rows of the blocks whose inverses are computed row by row.
SMALL = 8


def _inverse(system: jax.Array) -> jax.Array:
    """The inverse [..., C, C] of 1 + system; C: a power of two times a number up to ``SMALL``."""
    *batch, count, _ = system.shape
    size = count
    while size > SMALL and size % 2 == 0:
        size //= 2

    def diagonal(size: int, below: bool = False) -> jax.Array:
        """The blocks of ``size`` on the diagonal, or of each second one those to its left."""
        cut = system.reshape(*batch, count // size, size, count // size, size)
        step = 2 if below else 1
        pairs = range(int(below), count // size, step)
        return jnp.stack([cut[..., at, :, at - int(below), :] for at in pairs], axis=-3)

    rows = []
    blocks = diagonal(size)
    for row in range(size):
        own = jnp.broadcast_to(jnp.eye(size, dtype=system.dtype)[row], blocks[..., row, :].shape)
        for at, other in enumerate(rows):
            own = own - blocks[..., row, at, None] * other
        rows.append(own)
    inverse = jnp.stack(rows, axis=-2)
    while size < count:
        # [[A, 0], [B, D]]: below the inverses of A and D stands -D^-1 B A^-1
        first, second = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        below = -_matmul(_matmul(second, diagonal(size, below=True)), first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([below, second], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


@jax.custom_vjp
def passed(
    first: jax.Array,  # [B, K, R, H, W]
    parents: jax.Array,  # [B, N]
    parts: Parts,
) -> tuple[jax.Array, jax.Array]:
    """(The results of chunks [B, N, K, R, C, W], ``first`` and the states behind them [B, N + 1, K,
    R, H, W]), one chunk after another.

    parents: as of ``api.chunked``. The transposed loop of autodiff would copy the cotangents of all
    states with every chunk.
    """
    return _forward(first, parents, parts)[0]


def _forward(first, parents, parts):
    def one(states, x):
        number, parent, part = x
        state, out = _chunk(_of_rows(states, parent), part)
        return states.at[:, number + 1].set(state), out

    count = parents.shape[1]
    states = jnp.zeros((first.shape[0], count + 1, *first.shape[1:]), first.dtype)
    xs = jnp.arange(count), *_by_chunk((parents, parts))
    states, out = jax.lax.scan(one, states.at[:, 0].set(first), xs)
    return (jnp.moveaxis(out, 0, 1), states), (states, parents, parts)


def _backward(residuals, given):
    states, parents, parts = residuals
    d_out, d_states = given

    def one(d_states, x):
        number, parent, part, d_out = x
        _, pull = jax.vjp(_chunk, _of_rows(states, parent), part)
        more, d_part = pull((d_states[:, number + 1], d_out))
        add = jax.vmap(lambda row, at, x: row.at[at].add(x))
        return add(d_states, parent, more), d_part

    xs = jnp.arange(parents.shape[1]), *_by_chunk((parents, parts, d_out))
    # those that begin with a state come behind it
    d_states, d_parts = jax.lax.scan(one, d_states, xs, reverse=True)
    d_parts = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), d_parts)
    return d_states[:, 0], None, d_parts


passed.defvjp(_forward, _backward)


def _by_chunk(tree):
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tree)


def _of_rows(states: jax.Array, numbers: jax.Array) -> jax.Array:
    """The state of each row with its number; states [B, N + 1, ...], numbers [B]."""
    return jax.vmap(lambda row, at: row[at])(states, numbers)


def _chunk(state: jax.Array, part: Parts):
    """(The state behind a chunk, its results), from the state before it."""
    values, corrections, scores, queries, to_end, end = part
    changes = values - _matmul(corrections, state)
    out = _matmul(queries, state) + _matmul(scores, changes)
    added = _matmul(jnp.swapaxes(to_end, -1, -2), changes)
    return jnp.exp(end)[..., None] * state + added, out
