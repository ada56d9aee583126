"""What every attention kernel is held to: its definition in float64, in values, log-sum-exps and
gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tests.attention.rows import normal, relative

# Largest relative error of the output and of a gradient, and of a log-sum-exp the absolute one.
BOUNDS = {jnp.float64: (1e-12, 1e-12), jnp.float32: (1e-5, 1e-4), jnp.bfloat16: (5e-3, 1e-2)}
LSE = 1e-4
# (q, k, v) to (out [B, T, N, H], lse [B, T, N], what else there is).
Attention = Callable[..., tuple[jax.Array, ...]]


def judge(
    kernel: Attention,
    definition: Attention,
    inputs: Sequence[jax.Array],
    dtype,
    *,
    naive: Attention | None = None,
    gradients: bool = True,
    most_lse: float = LSE,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], jax.Array]:
    """Asserts that the kernel is right; (its results, its gradients, the exact lse of the rounded
    inputs).

    inputs: q, k and v in float64; the kernel is given them in ``dtype``. Gradients are of a
    weighted sum of out and lse. In bfloat16 errors may also be no more than twice those of
    ``naive``, by default the definition, in bfloat16. most_lse: where rounding within the kernel
    is part of the method, as of keys that it rotates, more than LSE.
    """
    weights = (
        normal(1, inputs[0].shape, inputs[0].shape[:3], dtype=jnp.float64) if gradients else None
    )
    (out, *_), slopes = run(definition, inputs, weights)
    rounded = [x.astype(dtype) for x in inputs]
    # by the same program, whose gradients are of no use here
    (_, lse, *_), _ = run(definition, [x.astype(jnp.float64) for x in rounded], weights)
    wide = jnp.promote_types(dtype, jnp.float32)
    # the GPU interpreter's own counters are 32 bits wide
    with jax.enable_x64(dtype == jnp.float64):
        found, found_slopes = run(kernel, rounded, weights and [x.astype(wide) for x in weights])
    bounds = BOUNDS[dtype][:1] + BOUNDS[dtype][1:] * len(slopes)
    if dtype == jnp.bfloat16:
        (rough, *_), rough_slopes = run(naive or definition, rounded, weights)
        errors = [
            relative(x, y) for x, y in zip((rough, *rough_slopes), (out, *slopes), strict=True)
        ]
        bounds = [min(most, 2 * error) for most, error in zip(bounds, errors, strict=True)]
    for one, wanted, bound in zip((found[0], *found_slopes), (out, *slopes), bounds, strict=True):
        assert one.dtype == dtype and relative(one, wanted) < bound
    seen = np.isfinite(lse)
    assert found[1].dtype == wide and np.array_equal(np.asarray(found[1]) > -np.inf, seen)
    assert np.abs(np.asarray(found[1], np.float64) - lse)[seen].max() < most_lse
    assert not np.asarray(found[0])[~seen].any()
    return found, found_slopes, lse


def run(function: Attention, inputs: Sequence[jax.Array], weights: Sequence[jax.Array] | None):
    """(results, the gradients of a weighted sum of out and lse if there are weights), under one
    jit.
    """
    if weights is None:
        return _values(function)(*inputs), ()
    gradients, results = _gradients(function)(*inputs, weights)
    return results, gradients


# a function that is run again, as a case's definition for another kernel, is compiled once
@functools.lru_cache(maxsize=32)
def _values(function: Attention):
    return jax.jit(function)


@functools.lru_cache(maxsize=32)
def _gradients(function: Attention):
    def loss(*arrays):
        *inputs, weights = arrays
        out, lse, *_ = results = function(*inputs)
        seen = jnp.isfinite(lse)
        total = jnp.sum(out * weights[0]) + jnp.sum(
            jnp.where(seen, jnp.where(seen, lse, 0) * weights[1], 0)
        )
        return total, results

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))


def masked_places_may_hold_anything(function, arrays, real) -> None:
    """Values that are not finite where ``real`` is False change no bit of outputs and gradients
    where it is True, and their own gradients are zeros.

    function: of the arrays, q first, [B, T, N, H] each, to (out of q's shape, ...). real: bool [B,
    T] for each of the arrays.
    """
    real = [np.asarray(x)[..., None, None] for x in real]

    def results(value):
        spoiled = [jnp.where(mask, x, value) for mask, x in zip(real, arrays, strict=True)]
        out, pull = jax.vjp(lambda *x: function(*x)[0], *spoiled)
        return out, pull(jnp.where(real[0], jnp.ones_like(out), value))

    compiled = jax.jit(results)
    out, gradients = compiled(0.0)
    for poison in (jnp.nan, jnp.inf):
        found, found_gradients = compiled(poison)
        assert np.isfinite(np.where(real[0], found, 0)).all()
        np.testing.assert_array_equal(np.where(real[0], found, 0), np.where(real[0], out, 0))
        for mask, one, other in zip(real, found_gradients, gradients, strict=True):
            np.testing.assert_array_equal(np.where(mask, one, 0), np.where(mask, other, 0))
            assert not np.any(np.where(mask, 0, one))


def not_finite_reaches_only_those_who_see_it(function, arrays, sees, query: int, key: int) -> None:
    """Values that are not finite in one query, one key or its value, or one cotangent, of row 0,
    reach results and gradients of those that see them, as NaN, and change no bit of others.

    function: of the arrays, q, k and v, to (out, lse) or (out, lse, picks). sees: bool [B, T, S].
    query, key: the places of the tokens.
    """
    sees = np.asarray(sees)
    spoiled = [np.zeros(x.shape[:2], bool) for x in (*arrays, arrays[0])]
    for x, at in zip(spoiled, (query, key, key, query), strict=True):
        x[0, at] = True

    @jax.jit
    def results(name, value):
        def hold(index, x):
            return jnp.where(spoiled[index][..., None, None] & (name == index), value, x)

        out, pull, rest = jax.vjp(
            lambda *x: ((found := function(*x))[0], found[1:]),
            *(hold(i, x) for i, x in enumerate(arrays)),
            has_aux=True,
        )
        return out, pull(hold(3, jnp.ones_like(out))), rest

    out, gradients, rest = results(-1, 0.0)  # as they are
    for name in range(4):
        # queries whose result is bad, and those with a bad result or cotangent
        shown = spoiled[0] if name == 0 else sees[:, :, key] & (np.arange(len(sees)) == 0)[:, None]
        bad = spoiled[0] if name in (0, 3) else shown
        shown = shown & (name != 3)
        seen = (sees & bad[..., None]).any(axis=1)
        assert bad.any() and not bad.all() and seen.any() and not seen.all()
        for value in (np.nan, -np.inf):
            found, found_gradients, found_rest = results(name, value)
            assert np.isnan(np.asarray(found, np.float32)[shown]).all()
            for one, other in zip((found, *found_rest), (out, *rest), strict=True):
                np.testing.assert_array_equal(np.asarray(one)[~shown], np.asarray(other)[~shown])
            marks = zip((bad, seen, seen), found_gradients, gradients, strict=True)
            for mask, one, other in marks:
                one = np.asarray(one)
                assert np.isnan(one.astype(np.float32)[mask]).all()
                np.testing.assert_array_equal(one[~mask], np.asarray(other)[~mask])
