"""What every attention kernel is held to: its definition in float64, in values, log-sum-exps and
gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tests.attention.rows import relative

# Largest relative error of the output and of a gradient, and of a log-sum-exp the absolute one.
BOUNDS = {jnp.float64: (1e-12, 1e-12), jnp.float32: (1e-5, 1e-4), jnp.bfloat16: (5e-3, 1e-2)}
LSE = 1e-4
# (q, k, v) to (out [B, T, N, H], lse [B, T, N], what else there is).
Attention = Callable[..., tuple[jax.Array, ...]]
Arrays = Sequence[np.ndarray]


def normal(seed: int, *shapes: tuple[int, ...], dtype=jnp.float32) -> list[np.ndarray]:
    """Standard normal arrays of numpy, which needs no program to draw or to round them."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]


def defined(inputs: Arrays, weights: Arrays | None, *, mask: np.ndarray):
    """As ``run`` returns them, out, lse and gradients as the definition reads, by numpy in float64.

    mask: bool, of the shape [B, T, N, S] when it is broadcast; True where a query sees a key.
    """
    q, k, v = (np.asarray(x, np.float64) for x in inputs)
    heads, kv_heads, size = q.shape[2], *k.shape[2:]
    k, v = (np.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->btns", q, k) / np.sqrt(size)
    mask = np.broadcast_to(mask, scores.shape)
    seen = mask.any(axis=-1)
    highest = np.max(scores, axis=-1, where=mask, initial=-np.inf)
    shares = np.exp(scores - np.where(seen, highest, 0)[..., None], where=mask, out=0 * scores)
    sums = np.where(seen, shares.sum(axis=-1), 1)
    shares /= sums[..., None]
    lse = np.where(seen, highest + np.log(sums), -np.inf)
    out = np.einsum("btns,bsnh->btnh", shares, v)
    if weights is None:
        return (out, lse), ()
    of_out, of_lse = (np.asarray(x, np.float64) for x in weights)
    slopes = np.einsum("btnh,bsnh->btns", of_out, v)
    slopes += (of_lse - np.sum(of_out * out, axis=-1))[..., None]
    slopes *= shares / np.sqrt(size)

    def summed(x: np.ndarray) -> np.ndarray:
        """Over the query heads that share a key."""
        return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1]).sum(axis=3)

    of_q = np.einsum("btns,bsnh->btnh", slopes, k)
    of_k = summed(np.einsum("btns,btnh->bsnh", slopes, q))
    of_v = summed(np.einsum("btns,btnh->bsnh", shares, of_out))
    return (out, lse), (of_q, of_k, of_v)


def judge(
    kernel: Attention,
    definition: Callable,
    inputs: Arrays,
    dtype,
    *,
    naive: Attention | None = None,
    gradients: bool = True,
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...], np.ndarray]:
    """Asserts that the kernel is right; (its results, its gradients, the exact lse of the rounded
    inputs).

    definition: as ``defined`` of inputs and weights. inputs: q, k and v in float64; the kernel is
    given them in ``dtype``. Gradients are of a weighted sum of out and lse. In bfloat16 errors may
    also be no more than twice those of ``naive`` in bfloat16.
    """
    weights = (
        normal(1, inputs[0].shape, inputs[0].shape[:3], dtype=jnp.float64) if gradients else None
    )
    (out, *_), slopes = definition(inputs, weights)
    rounded = [x.astype(jnp.dtype(dtype)) for x in inputs]
    (_, lse), _ = definition(rounded, None)
    wide = jnp.promote_types(dtype, jnp.float32)
    # the GPU interpreter's own counters are 32 bits wide
    with jax.enable_x64(dtype == jnp.float64):
        found, found_slopes = run(kernel, rounded, weights and [x.astype(wide) for x in weights])
    bounds = BOUNDS[dtype][:1] + BOUNDS[dtype][1:] * len(slopes)
    if dtype == jnp.bfloat16:
        (rough, *_), rough_slopes = run(naive, rounded, weights)
        errors = [
            relative(x, y) for x, y in zip((rough, *rough_slopes), (out, *slopes), strict=True)
        ]
        bounds = [min(most, 2 * error) for most, error in zip(bounds, errors, strict=True)]
    for one, wanted, bound in zip((found[0], *found_slopes), (out, *slopes), bounds, strict=True):
        assert one.dtype == dtype and relative(one, wanted) < bound
    seen = np.isfinite(lse)
    assert found[1].dtype == wide and np.array_equal(found[1] > -np.inf, seen)
    assert np.abs(found[1][seen] - lse[seen]).max() < LSE
    assert not found[0][~seen].any()
    return found, found_slopes, lse


def run(function: Attention, inputs: Arrays, weights: Arrays | None):
    """(results, the gradients of a weighted sum of out and lse if there are weights), under one
    jit.
    """
    if weights is None:
        return jax.device_get(_values(function)(*inputs)), ()
    gradients, results = jax.device_get(_gradients(function)(*inputs, weights))
    return results, gradients


# a function that is run again, as in another test of the same kernel, is compiled once
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


def _weights(q: np.ndarray) -> list[np.ndarray]:
    """Of a sum of ``run`` in which all of out has the weight 1 and lse none."""
    return [np.ones(q.shape, np.float32), np.zeros(q.shape[:3], np.float32)]


def masked_places_may_hold_anything(function, arrays, real, gradients: bool = True) -> None:
    """Values that are not finite where ``real`` is False change no bit of outputs and gradients
    where it is True, and their own gradients are zeros.

    function: of the arrays, q, k and v, [B, T, N, H] each, to (out of q's shape, lse, ...). real:
    bool [B, T] for each of the arrays.
    """
    real = [np.asarray(x)[..., None, None] for x in real]

    def results(value):
        q, k, v = (np.where(mask, x, value(x)) for mask, x in zip(real, arrays, strict=True))
        of_out, of_lse = _weights(q)
        of_out = np.where(real[0], of_out, value(of_out))
        return run(function, (q, k, v), [of_out, of_lse] if gradients else None)

    def poison(x):
        """NaN and infinity in turn by places, so that scores and maxima meet either alone."""
        values = np.resize([np.nan, np.inf], x.shape[1]).astype(x.dtype)
        return np.broadcast_to(values[:, None, None], x.shape)

    (out, *_), slopes = results(np.zeros_like)
    (found, *_), found_slopes = results(poison)
    assert np.isfinite(np.where(real[0], found, np.zeros_like(found))).all()
    for mask, one, other in zip(
        (real[0], *real), (found, *found_slopes), (out, *slopes), strict=False
    ):
        mask = np.broadcast_to(mask, one.shape)
        np.testing.assert_array_equal(one[mask], other[mask])
    for mask, one in zip(real, found_slopes, strict=False):
        assert not one[np.broadcast_to(~mask, one.shape)].any()


def not_finite_reaches_only_those_who_see_it(
    function, arrays, sees, query: int, key: int, turn: int | None = None, gradients: bool = True
) -> None:
    """Values that are not finite in one query, one key or its value, or one cotangent, of row 0,
    reach results and gradients of those that see them, as NaN, and change no bit of others.

    function: of the arrays, q, k and v, to (out, lse) or (out, lse, picks). sees: bool [B, T, S].
    query, key: the places of the tokens. turn: which of NaN and infinity the first one holds, and
    they take turns; None for both in each.
    """
    sees = np.asarray(sees)
    spoiled = [np.zeros(x.shape[:2], bool) for x in (*arrays, arrays[0])]
    for x, at in zip(spoiled, (query, key, key, query), strict=True):
        x[0, at] = True

    def results(name=None, value=0.0):
        given = [*arrays, *_weights(arrays[0])]
        if name is not None:
            given[name] = given[name].copy()
            given[name][spoiled[name]] = value
        return run(function, given[:3], given[3:] if gradients else None)

    (out, *rest), slopes = results()  # as they are
    for name in range(4 if gradients else 3):
        # queries whose result is bad, and those with a bad result or cotangent
        shown = spoiled[0] if name == 0 else sees[:, :, key] & (np.arange(len(sees)) == 0)[:, None]
        bad = spoiled[0] if name in (0, 3) else shown
        shown = shown & (name != 3)
        seen = (sees & bad[..., None]).any(axis=1)
        assert bad.any() and not bad.all() and seen.any() and not seen.all()
        values = (np.nan, -np.inf)
        for value in values if turn is None else [values[(name + turn) % 2]]:
            (found, *found_rest), found_slopes = results(name, value)
            assert np.isnan(found[shown].astype(np.float32)).all()
            for one, other in zip((found, *found_rest), (out, *rest), strict=True):
                np.testing.assert_array_equal(one[~shown], other[~shown])
            marks = zip((bad, seen, seen), found_slopes, slopes, strict=False)
            for mask, one, other in marks:
                assert np.isnan(one[mask].astype(np.float32)).all()
                np.testing.assert_array_equal(one[~mask], other[~mask])
