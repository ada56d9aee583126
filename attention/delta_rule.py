"""The gated delta rule (2412.06464): token by token, and by chunks.

A state S [key size, value size], float32. With log decay g and rate β of a token,

    S_t = α_t S_{t-1} + k_t ⊗ β_t (v_t - (α_t S_{t-1})ᵀ k_t),    o_t = S_tᵀ q_t,    α_t = exp(g_t).

Inside a chunk it is a unit triangular system (the WY form of the paper, section 3.3), from chunk to
chunk the state.

Dimensions: B rows, T tokens, N chunks, C tokens of a chunk, K key heads, R value heads of a key
head, H key size, V value size.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def step(
    state: Float[Array, "B K R H V"],
    q: Float[Array, "B K H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K R V"],
    g: Float[Array, "B K R"],
    beta: Float[Array, "B K R"],
) -> tuple[Float[Array, "B K R V"], Float[Array, "B K R H V"]]:
    """One token of the recurrence: (its results, the next state).

    Sums are made by multiplication and addition: every row has the same bits alone or with others.
    """
    state = state * jnp.exp(g)[..., None, None]
    seen = jnp.sum(state * k[:, :, None, :, None], axis=-2)
    change = beta[..., None] * (v - seen)
    state = state + k[:, :, None, :, None] * change[..., None, :]
    return jnp.sum(state * q[:, :, None, :, None], axis=-2), state


def recurrence(q, k, v, g, beta, state):
    """The definition: token by token, (results [B, T, K, R, V], the last state).

    Arguments as of ``step``, with an axis of tokens behind that of the rows.
    """

    def one(state, x):
        out, state = step(state, *x)
        return state, out

    moved = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)]
    state, out = jax.lax.scan(one, state, moved)
    return jnp.moveaxis(out, 0, 1), state


@jax.custom_vjp
def solve(
    system: Float[Array, "*batch C C"], right: Float[Array, "*batch C W"]
) -> Float[Array, "*batch C W"]:
    """The x of (1 + system) x = right, where ``system`` is zero on its diagonal and above.

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


def _inverse(system: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """The inverse of 1 + system; C: a power of two times a number up to ``SMALL``."""
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


def chunked(
    q: Float[Array, "B N C K H"],
    k: Float[Array, "B N C K H"],
    v: Float[Array, "B N C K R V"],
    g: Float[Array, "B N C K R"],
    beta: Float[Array, "B N C K R"],
    first: Float[Array, "B K R H V"],
    parents: Int[Array, "B N"],
) -> tuple[Float[Array, "B N C K R V"], Float[Array, "B N K R H V"]]:
    """The recurrence by chunks: (results, the state behind every chunk).

    first: the state 0; it may have more columns than v, whose values are zeros. parents: the number
    of the state from which each chunk begins, counting those behind chunks from 1; it is of a chunk
    before. Places without a token have zeros in k, g and beta.
    """
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
    values = jnp.pad(values, [*((0, 0),) * 5, (0, first.shape[-1] - width)])
    scores = _einsum("bncki,bndki->bnkcd", q, k)[:, :, :, None] * decay
    end = total[..., -1:]
    to_end = jnp.exp(end - total)[..., None] * k_C

    moved = (values, corrections, scores, q_C * grown, to_end, end)
    out, states = _passed(first, parents, moved)
    return jnp.moveaxis(out, 4, 2), states[:, 1:]


@jax.custom_vjp
def _passed(
    first: Float[Array, "B K R H V"], parents: Int[Array, "B N"], parts: tuple[jax.Array, ...]
) -> tuple[Float[Array, "B N K R C V"], Float[Array, "B N+1 K R H V"]]:
    """(The results of chunks, ``first`` and the states behind them), one chunk after another.

    parts: what ``_chunk`` takes beside a state, [B, N, ...] each. The transposed loop of autodiff
    would copy the cotangents of all states with every chunk.
    """
    return _passed_forward(first, parents, parts)[0]


def _passed_forward(first, parents, parts):
    def one(states, x):
        number, parent, part = x
        state, out = _chunk(_of_rows(states, parent), part)
        return states.at[:, number + 1].set(state), out

    count = parents.shape[1]
    states = jnp.zeros((first.shape[0], count + 1, *first.shape[1:]), first.dtype)
    xs = jnp.arange(count), *_by_chunk((parents, parts))
    states, out = jax.lax.scan(one, states.at[:, 0].set(first), xs)
    return (jnp.moveaxis(out, 0, 1), states), (states, parents, parts)


def _passed_backward(residuals, given):
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


_passed.defvjp(_passed_forward, _passed_backward)


def _by_chunk(tree):
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tree)


def _of_rows(states: Float[Array, "B N K R H V"], numbers: Int[Array, " B"]) -> jax.Array:
    """The state of each row with its number."""
    return jax.vmap(lambda row, at: row[at])(states, numbers)


def _chunk(state: Float[Array, "B K R H V"], part: tuple[jax.Array, ...]):
    """(The state behind a chunk, its results), from the state before it."""
    values, corrections, scores, queries, to_end, end = part
    changes = values - _matmul(corrections, state)
    out = _matmul(queries, state) + _matmul(scores, changes)
    added = _matmul(jnp.swapaxes(to_end, -1, -2), changes)
    return jnp.exp(end)[..., None] * state + added, out
