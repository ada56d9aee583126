"""Attention over chosen blocks equals the definition for any lists, whatever the chunks and
tiles.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import reference, selected
from attention.selected import selected_attention
from tests.attention.rows import normal, relative

SIZE, BLOCKS, LENGTH = 8, 6, 48


def lists(heads: int, picks: int, seed: int = 0) -> np.ndarray:
    """Random distinct blocks, some missing, for every query; those of query 5 are all missing."""
    rng = np.random.default_rng(seed)
    found = np.argsort(rng.random((2, LENGTH, heads, BLOCKS)), axis=-1)[..., :picks].astype(
        np.int32
    )
    found[rng.random(found.shape) < 0.2] = -1
    found[:, 5] = -1
    return found


def expected(q, k, v, picks, q_order, k_order):
    """By the reference's mask of one row after another."""
    outs = []
    for row in range(q.shape[0]):
        chosen = (picks[row][..., None] == np.arange(BLOCKS)).any(axis=2)  # [T, P, J]
        chosen = np.repeat(
            np.repeat(chosen, SIZE, axis=-1), q.shape[2] // picks.shape[2], axis=1
        ).transpose(1, 0, 2)
        mask = jnp.asarray(chosen & (k_order[row][None] <= q_order[row][:, None]))
        outs.append(reference.attention(q[row], k[row], v[row], mask)[:2])
    return tuple(jnp.stack(x) for x in zip(*outs, strict=True))


@pytest.mark.parametrize(
    "heads, kv_heads, own_lists, direct, chunk, rows, scores",
    [
        # all at once, in one chunk and in several
        (4, 2, False, LENGTH, 1, 1, 1),
        (4, 2, False, 0, 2**19, 128, 2**18),
        # groups of other sizes, and lists of their own
        (4, 2, True, 0, 2**19, 128, 2**18),
        (16, 1, False, 0, 96, 4, 64),
        (3, 3, True, 0, 96, 4, 64),
    ],
)
@pytest.mark.quick(first=1)
def test_values_and_gradients_equal_the_definition(
    x64, monkeypatch, heads, kv_heads, own_lists, direct, chunk, rows, scores
):
    for name, value in dict(DIRECT=direct, CHUNK=chunk, ROWS=rows, SCORES=scores).items():
        monkeypatch.setattr(selected, name, value)
    shapes = [(2, LENGTH, n, 8) for n in (heads, kv_heads, kv_heads)]
    q, k, v, weight = normal(1, *shapes, shapes[0], dtype=jnp.float64)
    (weight_lse,) = normal(2, shapes[0][:3], dtype=jnp.float64)
    rng = np.random.default_rng(3)
    q_order, k_order = (rng.permuted(np.tile(np.arange(LENGTH), (2, 1)), axis=1) for _ in range(2))
    k_order[:, 7] = np.iinfo(np.int32).max  # an empty place
    picks = lists(heads if own_lists else kv_heads, picks=3)

    def loss(function):
        def total(q, k, v):
            out, lse = function(q, k, v)
            seen = jnp.isfinite(lse)
            return jnp.sum(out * weight) + jnp.sum(
                jnp.where(seen, jnp.where(seen, lse, 0) * weight_lse, 0)
            ), (out, lse)

        return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))

    found, (out, lse) = loss(lambda *x: selected_attention(*x, picks, q_order, k_order, size=SIZE))(
        q, k, v
    )
    wanted, (want, want_lse) = loss(lambda *x: expected(*x, picks, q_order, k_order))(q, k, v)
    assert relative(out, want) < 1e-12 and not np.any(out[:, 5])
    assert np.array_equal(np.isfinite(lse), np.isfinite(want_lse))
    assert np.allclose(lse, want_lse, rtol=1e-12)
    for a, b in zip(found, wanted, strict=True):
        assert relative(a, b) < 1e-12


def test_lists_for_other_heads_are_refused():
    q, k = normal(0, (1, 8, 4, 8), (1, 8, 2, 8))
    order = np.arange(8)[None]
    with pytest.raises(ValueError, match="picks for 3 heads, expected 2 or 4"):
        selected_attention(q, k, k, np.zeros((1, 8, 3, 1), np.int32), order, order, size=8)
