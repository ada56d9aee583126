"""What holds for every method of attention where a real token is not finite: those that see it show
it, and nothing else changes. ``test_methods`` runs it for every entry of METHODS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attention.cache.paged import attend, init_cache, write
from attention.cache.reader import PageReader
from attention.cache.tables import Pages
from attention.cache.writer import PageWriter
from attention.methods.method import Method
from pallas_kernels.tokens import sequences, visible
from tests.attention.cache.model import PAGE
from tests.attention.properties import (
    SHAPE,
    given_keys,
    holding,
    inputs,
    layer,
    masked_rows,
    weights,
)

# Where a token may stand that others do not see: its kind of rows, and a function from (segments,
# documents, order) of the row to the tokens.
UNSEEN: dict[str, tuple[str, Callable]] = {
    "future": ("long", lambda segments, inside, order: (order >= 90) & (order < 93)),
    "segment": ("packed", lambda segments, inside, order: (segments == 2) & (order == 45)),
    "document": ("documents", lambda segments, inside, order: (inside == 2) & (order > 40)),
}


def reaches_only_those_who_see_it(method: Method, kind: str) -> None:
    """NaN and infinities in real tokens reach results and gradients of the tokens that see them, as
    NaN, and change no bit of others: earlier ones, other sequences, other documents.

    They stand in queries, keys, values or hidden states, or come back as gradients of the results.
    """
    rows, which = UNSEEN[kind]
    where, _ = masked_rows()[rows]
    fields = (np.asarray(x[0]) for x in (where.segments, where.documents, where.order))
    spoiled = which(*fields)
    real = np.asarray(where.segments[0]) > 0
    chooses = method.block_size() is not None
    (window,) = method.windows() if method.windows() and not chooses else (None,)
    sees = np.asarray(visible(where, where, window))[0]
    x = inputs(method, where.shape[1])
    weight = weights(method, where.shape[1])

    def run(part, value, affected, share):
        """share: of the cotangents of the affected tokens."""
        held = dict(q=x.q, k=x.k, v=x.v, y=x.y)
        held["cotangent"] = holding(weight, affected & (share == 0), 0.0)
        held[part] = holding(held[part], spoiled, value)
        cotangent = held.pop("cotangent")
        out, gradients = layer(method, rows)(dataclasses.replace(x, **held), cotangent)
        return jax.device_get((out[0], jax.tree.map(lambda y: y[0], gradients)))

    for part in ("q", "k", "v", "y", "cotangent"):
        affected = real & (
            spoiled | (sees[:, spoiled].any(axis=1) & (part not in ("q", "cotangent")))
        )
        others = real & ~affected
        # the tokens that no affected query sees
        apart = real & ~sees[affected].any(axis=0)
        assert spoiled.any() and others.any()
        for share in (0.0, 1.0):
            if part == "cotangent" and not share:
                continue
            out, gradients = run(part, 0.0, affected, share)
            for value in (np.nan, np.inf, -np.inf):
                found, found_gradients = run(part, value, affected, share)
                told = f"{part}={value}, {share=}"
                same = real if part == "cotangent" else others
                assert np.array_equal(found[same], out[same]), told
                if part in "qkv":
                    shown = spoiled if chooses else affected
                    assert np.isnan(found[shown]).all(), told
                for each in "qkvy":
                    one, other = getattr(found_gradients, each), getattr(gradients, each)
                    clean = others & (apart if each in "kvy" and share else True)
                    assert np.array_equal(one[clean], other[clean]), (told, each)
                if share and part in ("q", "k", "v", "cotangent"):
                    assert np.isnan(found_gradients.q[spoiled]).all(), told
                    if not chooses:
                        assert np.isnan(found_gradients.k[spoiled]).all(), told


def reaches_only_those_who_see_it_in_pages(method: Method, chunk: int) -> None:
    """NaN and infinities in one of several new tokens change no bit of the results of those before
    it, and of other rows; its own result is NaN, and so are those of the tokens that see it.

    chunk: new tokens of a row. They follow 40 others, and one more follows them.
    """
    earlier, width = 40, 6
    x = inputs(method, earlier + chunk + 1)
    bad = earlier + chunk // 2
    (window, *_) = (*method.windows(), None)
    window = window or x.q.shape[1]
    tables = jnp.arange(2 * width).reshape(2, width)
    shape = dict(num_pages=2 * width, num_kv_heads=2, head_dim=8, dtype=jnp.float32)
    empty = init_cache((method,), **shape, page=PAGE, layer=SHAPE)
    rotate = lambda keys, positions: keys  # noqa: E731

    def step(cache, x, first, last):
        """Writes and attends; two rows of the same tokens, of which the second is never spoiled."""
        places = jnp.broadcast_to(jnp.arange(first, last), (2, last - first))
        where = sequences(jnp.array([last, last]), width * PAGE)
        pages = Pages(tables, where, where.order)
        if method.mixes:
            at = PageWriter(tables, places, PAGE, rotate)
            given = method.inputs(x.parameters, x.y[:, first:last], lambda y: y)
            seen = pages.at(places)[0], PageReader(pages, PAGE, jnp.float32)
            out, kept = method.mix_pages(x.parameters, cache.layers[0], given, at, *seen)
            return cache.with_layer(0, kept), out
        own = jax.tree.map(lambda y: y[:, first:last], (x.q, given_keys(method, x)))
        gates = method.head_inputs(x.parameters, x.y)
        gates = None if gates is None else gates[:, first:last]
        q, new = own
        options = dict(parameters=x.parameters, rotate=rotate)
        cache = write(cache, 0, tables, places, new, **options)
        out = attend(cache, 0, q, pages.at(places)[0], pages, inputs=gates)
        return cache, out

    @jax.jit
    def run(name, value):
        here = jnp.zeros((2, x.q.shape[1]), bool).at[0, bad].set(True)

        def hold(index, y):
            y = jnp.concatenate([y, y])
            mask = here.reshape(*here.shape, *(1,) * (y.ndim - 2)) & (name == index)
            return jnp.where(mask, value, y)

        held = dataclasses.replace(
            x, **{part: hold(i, getattr(x, part)) for i, part in enumerate("qkvy")}
        )
        cache, outs = empty, []
        for first, last in ((0, earlier), (earlier, earlier + chunk), (earlier + chunk, None)):
            cache, out = step(cache, held, first, last or x.q.shape[1])
            outs.append(out)
        return jnp.concatenate(outs, axis=1)

    for name, part in enumerate("qkvy"):
        wanted = np.asarray(run(name, 0.0))
        for value in (np.nan, np.inf, -np.inf):
            found = np.asarray(run(name, value))
            told = f"{part}={value}"
            assert np.array_equal(found[1], wanted[1]), told
            assert np.array_equal(found[0, :bad], wanted[0, :bad]), told
            if part == "q":
                assert np.array_equal(found[0, bad + 1 :], wanted[0, bad + 1 :]), told
            if method.mixes != (part != "y"):
                assert np.isnan(found[0, bad]).all(), told
            seen = "y" if method.mixes else "kv"
            if part in seen and method.block_size() is None:
                # in a window, by the tokens that it still holds
                assert np.isnan(found[0, bad : bad + window]).all(), told
