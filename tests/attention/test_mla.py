"""Multi-head latent attention: a layer is its definition, head by head. Packed rows, trees, pages
and decoding are in ``test_methods``.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.cache.paged import init_cache
from attention.layout import lay_out
from attention.methods import mla
from attention.methods.dsa import DSA
from attention.methods.mla import MLA
from models.functions import rope
from models.model_config import ModelConfig
from models.rope_scaling import Yarn
from tests.attention import properties
from tests.attention.cache.model import PAGE, cache, model, random_tokens, run
from tests.attention.rows import normal, relative, separate
from tests.models.small import small_config

METHODS = {
    "published": MLA(12, 10, 6, 4, interleaved=True, score_factor=1.7),
    # values longer than keys
    "plain": MLA(12, None, 6, 20),
}
METHOD = METHODS["published"]
SHAPE = properties.SHAPE


def parameters(method: MLA, dtype=jnp.float64) -> dict[str, jax.Array]:
    return {
        name: normal(20 + at, p.shape, dtype=dtype)[0] * (p.std or 1.0)
        for at, (name, p) in enumerate(method.parameters(SHAPE).items())
    }


def turn(config: ModelConfig, length: int):
    return functools.partial(rope, positions=jnp.arange(length)[None], config=config)


def definition(method: MLA, p: dict[str, jax.Array], y: jax.Array) -> jax.Array:
    """The layer of one sequence [T, D], one head and one query after another."""
    rank, rotated, plain = method.latent, SHAPE.head_dim, method.plain_size
    length = len(y)

    def normed(x, weight):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + method.eps) * weight

    def turned(x):
        """By complex numbers, pair by pair."""
        pairs = (x[:, ::2], x[:, 1::2]) if method.interleaved else jnp.split(x, 2, -1)
        speed = 1e4 ** -(np.arange(rotated // 2) / (rotated // 2))
        angle = np.exp(1j * np.arange(length)[:, None] * speed)
        found = (pairs[0] + 1j * pairs[1]) * angle
        return jnp.concatenate([found.real, found.imag], -1)

    c = y if method.query_latent is None else normed(y @ p["q_a"], p["q_a_norm"])
    q_weights = p["q" if method.query_latent is None else "q_b"]
    both = y @ p["kv_a"]
    latent, k_rotated = normed(both[:, :rank], p["kv_a_norm"]), turned(both[:, rank:])
    total = 0.0
    for head in range(SHAPE.num_heads):
        q = c @ q_weights[:, head]
        q = jnp.concatenate([q[:, :plain], turned(q[:, plain:])], -1)
        k = jnp.concatenate([latent @ p["kv_b"][:, head, :plain], k_rotated], -1)
        v = latent @ p["kv_b"][:, head, plain:]
        scores = q @ k.T * method.score_factor / np.sqrt(plain + rotated)
        scores = jnp.where(np.tril(np.ones((length, length), bool)), scores, -jnp.inf)
        total += jax.nn.softmax(scores) @ v @ p["out"][head]
    return total


@pytest.mark.parametrize("name, length", [("published", 40), ("plain", 40), ("published", 200)])
@pytest.mark.quick(first=1)
def test_a_layer_is_its_definition_in_float64(name, length, x64):
    """Values, and gradients of the hidden states and of all parameters, in short and long rows."""
    method = METHODS[name]
    p = parameters(method)
    y, weight = normal(3, (1, length, 16), (length, 16), dtype=jnp.float64)
    config = small_config(dtype="float64")

    def ours(p, y):
        layout = lay_out((method,), separate([length], length), align=0)
        inputs = method.inputs(p, y, turn(config, length))
        return method.output(p, method.mix(p, inputs, layout))[0]

    def weighted(function, *given):
        out = function(*given)
        return jnp.sum(out * weight), out

    find = functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    found, out = jax.jit(find(functools.partial(weighted, ours)))(p, y)
    wanted, wanted_out = jax.jit(
        find(functools.partial(weighted, lambda p, y: definition(method, p, y[0])))
    )(p, y)
    assert relative(out, wanted_out) < 1e-6  # rotation is in float32
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert relative(a, b) < 1e-6


def test_yarn_turns_pairs_by_its_paper(x64):
    """Equations 23 to 25 of 2309.00071, by hand for four pairs and a context of 128 tokens."""
    scaling = Yarn(8.0, 128, beta_fast=16.0, mscale=0.7, mscale_all_dim=1.0)
    config = small_config(rope_scaling=scaling, dtype="float64")
    # turns over the context: 20.4, 2.04, 0.204, 0.0204; so of (16, 1) the ramp goes from pair 0 to 2
    speeds = [1.0, 0.1 * (0.5 + 0.5 / 8), 0.01 / 8, 0.001 / 8]
    x = np.concatenate([np.ones((1, 1, 1, 4)), np.zeros((1, 1, 1, 4))], -1)
    found = np.asarray(jax.jit(rope, static_argnums=2)(x, np.array([[3]]), config))[0, 0, 0]
    factor = (0.07 * np.log(8) + 1) / (0.1 * np.log(8) + 1)
    angles = 3 * np.array(speeds)
    wanted = factor * np.concatenate([np.cos(angles), np.sin(angles)])
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    without = dataclasses.replace(scaling, mscale=0.0)
    assert without.rotated_factor == pytest.approx(0.1 * np.log(8) + 1)
    assert dataclasses.replace(scaling, attention_factor=1.25).rotated_factor == 1.25


def test_pages_keep_the_latent_vector_and_the_rotated_part_alone():
    """576 numbers a token for DeepSeek-V3, and nothing for each head."""
    method = MLA(latent=512, query_latent=1536, plain_size=128, value_size=128)
    shape = dataclasses.replace(SHAPE, num_heads=128, num_kv_heads=128, head_dim=64)
    sizes = dict(num_pages=7, num_kv_heads=128, head_dim=64, dtype=jnp.bfloat16, page=PAGE)
    cache = jax.eval_shape(lambda: init_cache((method,), **sizes, layer=shape))
    assert sum(x.size for x in jax.tree.leaves(cache)) == 7 * PAGE * 576
    assert method.decode_bytes(1000, shape, "bfloat16") == 1000 * 576 * 2


@pytest.mark.parametrize(
    "method",
    [
        MLA(latent=8, plain_size=6, value_size=5),
        pytest.param(DSA(latent=8, picks=7, index_heads=2, index_size=12), marks=pytest.mark.long),
    ],
    ids=["mla", "dsa"],
)
def test_pages_of_tpus_have_zeros_behind_their_vectors_and_are_read_alike(method, monkeypatch):
    tokens = [random_tokens(1, 24), random_tokens(2, 22)]
    tables = np.arange(4, dtype=np.int32).reshape(2, 2)

    def found(size: int) -> list[np.ndarray]:
        """Hidden states of tokens in chunks of many and one by one."""
        monkeypatch.setattr(mla, "stored_size", lambda own: size)
        pages = cache(4, (method,))
        assert pages.layers[0]["latent"].shape == (4, 1, PAGE, size)
        first, pages = run(model((method,)), pages, tables, [x[:20] for x in tokens], [0, 0], 20)
        return first + run(model((method,)), pages, tables, tokens, [20, 20], 1)[0]

    for one, other in zip(found(128), found(16), strict=True):
        assert relative(one, other) < 1e-6


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(latent=0), "latent=0 must be a whole number from 1 on"),
        (dict(query_latent=1.5), "query_latent=1.5 must be a whole number"),
        (dict(score_factor=0.0), "score_factor=0.0 must be above 0"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        MLA(**change)


def test_rows_after_tokens_computed_before_are_refused():
    with pytest.raises(ValueError, match="cannot continue tokens computed before"):
        lay_out((METHOD,), separate([16], 16), queries=8, align=0)
