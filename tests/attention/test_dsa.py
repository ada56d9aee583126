"""DeepSeek sparse attention: a layer is its definition, query by query. Packed rows, trees, pages
and decoding are in ``test_methods``.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import indexer
from attention.cache.paged import init_cache
from attention.indexed import Indexed
from attention.layout import lay_out
from attention.methods.dsa import DSA
from attention.methods.mla import MLA
from models.model_config import ModelConfig
from tests.attention import properties
from tests.attention.cache.model import PAGE
from tests.attention.rows import normal, pack, relative, separate
from tests.attention.test_mla import turn
from tests.attention.trees import TREES, pack_trees
from tests.models.small import small_config

INDEXER = dict(picks=12, index_heads=6, index_size=10)
METHOD = DSA(12, 10, 6, 4, interleaved=True, score_factor=1.7, **INDEXER)
METHODS = {
    "published": METHOD,
    "pairs": DSA(12, None, 6, 20, **INDEXER, index_interleaved=True),
}
SHAPE = properties.SHAPE


def parameters(method: DSA, dtype=jnp.float64) -> dict[str, jax.Array]:
    return {
        name: normal(20 + at, p.shape, dtype=dtype)[0] * (p.std or 1.0)
        for at, (name, p) in enumerate(method.parameters(SHAPE).items())
    }


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_best_places_are_those_of_a_stable_sort(x64, dtype):
    rng = np.random.default_rng(0)
    # few different numbers, 0 with both signs, and rows with fewer numbers than places
    ranked = rng.choice([-2.5, -1e-30, -0.0, 0.0, 1e-30, 3.0, np.inf, -np.inf], (6, 40))
    ranked[0, 5:] = -np.inf
    ranked[1] = rng.normal(size=40)
    order = np.argsort(-ranked, axis=-1, kind="stable")[:, :9]
    there = np.take_along_axis(ranked, order, axis=-1) > -np.inf
    wanted = np.sort(np.where(there, order, 40), axis=-1)
    found = jax.jit(indexer.best_places, static_argnums=1)(jnp.asarray(ranked, dtype), 9)
    np.testing.assert_array_equal(found, np.where(wanted == 40, -1, wanted))


def definition(method: DSA, p: dict[str, jax.Array], y: jax.Array):
    """(The layer of one sequence [T, D], the divergence of each query), one query and head after
    another, by the report's equations.
    """
    rank, rotated, plain = method.latent, SHAPE.head_dim, method.plain_size
    length = len(y)

    def turned(x, interleaved):
        pairs = (x[:, ::2], x[:, 1::2]) if interleaved else jnp.split(x, 2, -1)
        speed = 1e4 ** -(np.arange(rotated // 2) / (rotated // 2))
        found = (pairs[0] + 1j * pairs[1]) * np.exp(1j * np.arange(length)[:, None] * speed)
        return jnp.concatenate([found.real, found.imag], -1)

    def normed(x, weight):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + method.eps) * weight

    c = y if method.query_latent is None else normed(y @ p["q_a"], p["q_a_norm"])
    both = y @ p["kv_a"]
    latent = normed(both[:, :rank], p["kv_a_norm"])
    k_rotated = turned(both[:, rank:], method.interleaved)
    stop = jax.lax.stop_gradient
    k = stop(y) @ p["index_k"]
    k = (k - k.mean(-1, keepdims=True)) / jnp.sqrt(k.var(-1, keepdims=True) + 1e-6)
    k = k * p["index_k_norm"] + p["index_k_bias"]

    def index_turned(x):
        return jnp.concatenate(
            [turned(x[:, :rotated], method.index_interleaved), x[:, rotated:]], -1
        )

    k = index_turned(k)
    scores = 0.0
    for head in range(method.index_heads):
        q = index_turned(stop(c) @ p["index_q"][:, head])
        of_head = jnp.maximum(q @ k.T, 0) / np.sqrt(method.index_size)
        scores += (stop(y) @ p["index_weights"])[:, head, None] * of_head
    scores /= np.sqrt(method.index_heads)
    before = np.tril(np.ones((length, length), bool))
    rank = jnp.argsort(jnp.argsort(jnp.where(before, -scores, jnp.inf)))
    chosen = before & (rank < method.picks)
    total, weight = 0.0, 0.0
    queries = p["q" if method.query_latent is None else "q_b"]
    for head in range(SHAPE.num_heads):
        q = c @ queries[:, head]
        q = jnp.concatenate([q[:, :plain], turned(q[:, plain:], method.interleaved)], -1)
        keys = jnp.concatenate([latent @ p["kv_b"][:, head, :plain], k_rotated], -1)
        products = q @ keys.T * method.score_factor / np.sqrt(plain + rotated)
        weights = jax.nn.softmax(jnp.where(chosen, products, -jnp.inf))
        total += weights @ (latent @ p["kv_b"][:, head, plain:]) @ p["out"][head]
        weight += stop(weights) / SHAPE.num_heads
    logs = jax.nn.log_softmax(jnp.where(chosen, scores, -1e30))
    seen = weight > 0
    loss = jnp.where(seen, weight * (jnp.log(jnp.where(seen, weight, 1.0)) - logs), 0.0)
    return total, loss.sum(-1)


def mixed(method: DSA, p, y, layout, config: ModelConfig):
    """(The result of a layer, what its indexer gives)."""
    inputs = method.inputs(p, y, turn(config, y.shape[1]))
    out, told = method.mix_indexed(p, inputs, layout, Indexed(), None, ())
    return method.output(p, out), told


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.quick(first=1)
def test_a_layer_is_its_definition_in_float64(name, x64, monkeypatch):
    """Values, the divergence, and the gradients of both: of the hidden states and of all
    parameters, of which each is reached by one of the two alone.
    """
    length = 30
    monkeypatch.setattr(indexer, "CHUNK", 9 * METHOD.picks * 60)  # the last chunk is not full
    method = dataclasses.replace(METHODS[name], index_loss=1.0)
    p = parameters(method)
    y, weight = normal(3, (1, length, 16), (length, 16), dtype=jnp.float64)
    config = small_config(dtype="float64")

    def ours(p, y):
        layout = lay_out((method,), separate([length], length), align=0)
        out, told = mixed(method, p, y, layout, config)
        return out[0], told.loss[0]

    def weighted(function, *given):
        out, loss = function(*given)
        return jnp.sum(out * weight) + 3 * jnp.sum(loss), (out, loss)

    find = functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    found, out = jax.jit(find(functools.partial(weighted, ours)))(p, y)
    wanted, wanted_out = jax.jit(
        find(functools.partial(weighted, lambda p, y: definition(method, p, y[0])))
    )(p, y)
    for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(wanted_out), strict=True):
        assert relative(a, b) < 1e-6  # rotation is in float32
    for key in p:
        assert relative(found[0][key], wanted[0][key]) < 1e-6, key
    assert relative(found[1], wanted[1]) < 1e-6


@pytest.mark.parametrize("learns", [True, pytest.param(False, marks=pytest.mark.long)])
def test_where_all_keys_are_chosen_it_is_latent_attention(learns):
    """By the size of rows, by the setting, and by the choice itself."""
    where, _ = pack(properties.PIECES, 128)
    p = parameters(METHOD, jnp.float32)
    (y,) = normal(3, (1, 128, 16), dtype=jnp.float32)
    config = small_config()
    real = np.asarray(where.segments[0]) > 0
    fields = {f.name for f in dataclasses.fields(MLA)}
    latent = MLA(**{name: getattr(METHOD, name) for name in fields})
    changes = (dict(picks=128), dict(all_keys=True), dict(picks=100))

    @jax.jit
    def results(p, y):
        layout = lay_out((latent,), where, properties.RUNS)
        wanted = latent.output(p, latent.mix(p, latent.inputs(p, y, turn(config, 128)), layout))
        found = []
        for change in changes:
            method = dataclasses.replace(METHOD, **change, index_loss=float(learns))
            found.append(mixed(method, p, y, layout, config))
        return wanted, found

    wanted, found = results(p, y)
    losses = []
    for change, (out, told) in zip(changes, found, strict=True):
        assert relative(np.asarray(out)[0, real], np.asarray(wanted)[0, real]) < 1e-5
        assert (told.picks is None) == (change != dict(picks=100))
        losses.append(told.loss)
    if learns:
        assert all(np.allclose(loss, losses[0], atol=1e-4) for loss in losses)
        assert not np.any(np.asarray(losses[0])[0, ~real])
    else:
        assert losses == [None] * 3


def test_the_choice_of_a_sampler_is_found_in_trees_and_replayed():
    """Tokens by order on the path of each query are those slots of the row."""
    size = 64
    where, paths = pack_trees(TREES, size)
    count = 5
    rng = np.random.default_rng(0)
    path = max(paths, key=len)
    sources = np.asarray(path[[8, 12, 20]])
    orders = [8, 12, 20]
    noted = np.full((1, 4, count), -1)
    wanted = np.full((3, count), -1)
    for row, order in enumerate(orders):
        some = np.sort(rng.permutation(order + 1)[:count])
        noted[0, row], wanted[row] = some, path[some]
    own = np.tile(np.arange(count, dtype=np.int32), (1, size, 1))
    at = np.array([[*sources, 0]])

    @functools.partial(jax.jit, static_argnums=1)
    def found(noted, replay):
        return indexer.with_noted(jnp.asarray(own), where, where, noted, at, replay, None)

    for replay in (False, True):
        picks, shares = found(noted, replay)
        changed = np.asarray(picks[0])
        assert np.array_equal(changed[sources], wanted if replay else own[0, sources])
        others = np.setdiff1d(np.arange(size), sources)
        assert np.array_equal(changed[others], own[0, others])
        overlap = [np.isin(row, np.arange(count)).mean() for row in wanted]
        assert np.allclose(np.asarray(shares)[0, :, 0, 0], [*overlap, 0])
    # a token that the query does not see is none
    noted[0, 0, -1] = 40
    assert np.asarray(found(noted, True)[0])[0, sources[0], -1] == -1


def test_pages_keep_the_key_of_the_indexer_too():
    """704 numbers a token for DeepSeek-V3.2; of layers that share an indexer 576."""
    method = DSA(latent=512, query_latent=1536, plain_size=128, value_size=128)
    shape = dataclasses.replace(SHAPE, num_heads=128, num_kv_heads=128, head_dim=64)
    sizes = dict(num_pages=7, num_kv_heads=128, head_dim=64, dtype=jnp.bfloat16, page=PAGE)
    shared = dataclasses.replace(method, shared=True)
    cache = jax.eval_shape(lambda: init_cache((method, shared), **sizes, layer=shape))
    assert sum(x.size for x in jax.tree.leaves(cache)) == 7 * PAGE * (704 + 576)
    assert method.decode_bytes(10_000, shape, "bfloat16") == (10_000 * 128 + 2048 * 576) * 2
    assert shared.decode_bytes(10_000, shape, "bfloat16") == 2048 * 576 * 2


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(picks=0), "picks=0 must be a whole number from 1 on"),
        (dict(index_heads=1.5), "index_heads=1.5 must be a whole number"),
        (dict(index_loss=-1.0), "index_loss=-1.0 must be at least 0"),
        (dict(shared=True, all_keys=True), "shared=True takes the keys that another layer chose"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DSA(**change)


@pytest.mark.parametrize(
    "methods, message",
    [
        ((dataclasses.replace(METHOD, shared=True),), "must stand behind one with an indexer"),
        (
            (METHOD, dataclasses.replace(METHOD, shared=True, picks=7)),
            "behind one with an indexer and as many picks",
        ),
        (
            tuple(dataclasses.replace(METHOD, index_loss=x) for x in (1.0, 2.0)),
            "index_loss must be one number",
        ),
    ],
)
def test_layers_that_do_not_go_together_are_refused(methods, message):
    with pytest.raises(ValueError, match=message):
        small_config(attention=methods)


def test_an_indexer_smaller_than_what_is_rotated_is_refused():
    with pytest.raises(ValueError, match="index_size=4 must be at least the 8 elements"):
        dataclasses.replace(METHOD, index_size=4).parameters(SHAPE)
