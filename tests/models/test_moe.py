"""Mixture of experts: equal to a loop over tokens, whatever stands beside a token, on every mesh."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention.methods.dense import Dense
from attention.methods.window import Window
from models.layers import Layers
from models.model_config import MoE
from models.moe import feed_forward
from models.transformer import abstract_model
from pallas_kernels.tokens import packed_rows
from tests.attention.rows import relative
from tests.models.moe_reference import mixture
from tests.models.small import VOCABULARY, drawn, small_config
from tests.pallas_kernels.judge import normal

VARIANTS = {
    "qwen3": MoE(experts=6, active=2, mlp_dim=12),
    "unnormalised": MoE(experts=4, active=3, mlp_dim=8, normalise=False),
    "deepseek": MoE(
        experts=8,
        active=3,
        mlp_dim=8,
        scores="sigmoid",
        scale=2.5,
        ranking_bias=True,
        groups=4,
        active_groups=2,
        shared=2,
    ),
}
ROWS, TOKENS = 3, 5
run = jax.jit(feed_forward)


@functools.cache
def layer_of(name: str) -> Layers:
    """One layer whose experts differ clearly, and whose bias changes the choice."""

    def one() -> Layers:
        layers = Layers(small_config(), nnx.Rngs(0), 1, VARIANTS[name])
        return jax.tree.map(operator.itemgetter(0), layers)

    layer = drawn(jax.eval_shape(one))
    layer.router[...] = jax.device_put(2 * np.asarray(layer.router[...]))
    if layer.moe.ranking_bias:
        (bias,) = normal(9, (8,))
        layer.router_bias[...] = jax.device_put(np.float32(0.3) * bias)
    return layer


def rows(seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(hidden states, which are no padding)."""
    y = np.random.default_rng(seed).standard_normal((ROWS, TOKENS, 16)).astype(np.float32)
    lengths = np.array([TOKENS, 3, 0])
    return y, np.arange(TOKENS) < lengths[:, None]


@pytest.mark.long
@pytest.mark.parametrize("name", ["deepseek", "qwen3", "unnormalised"])
def test_a_layer_equals_a_loop_over_tokens_and_experts(name):
    layer = layer_of(name)
    y, real = rows()
    (weight,) = normal(2, y.shape)

    def fast(layer, y):
        out, routing = feed_forward(layer, y, jnp.asarray(real))
        return jnp.sum(weight * out), (out, routing)

    (_, (out, routing)), found = jax.jit(jax.value_and_grad(fast, argnums=(0, 1), has_aux=True))(
        layer, y
    )
    wanted, pull = jax.vjp(lambda *x: mixture(*x, real), layer, y)
    assert relative(out, wanted) < 1e-5
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(pull(weight)), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-5)
    counts = np.zeros((ROWS, layer.moe.experts))
    for row, at in zip(*np.nonzero(real), strict=True):
        counts[row, routing.experts[row, at]] += 1
    assert np.array_equal(routing.counts, counts)
    assert np.allclose(routing.shares.sum(axis=1), real.sum(axis=1), rtol=1e-5)
    most = real.sum(axis=1) * np.log(layer.moe.experts)
    assert np.all(routing.entropy <= most + 1e-5) and np.all(routing.entropy[:2] > 0)


def test_a_bias_ranks_and_weighs_nothing():
    layer = layer_of("deepseek")
    y, real = rows()
    out, routing = jax.device_get(run(layer, y, real))
    other = jax.tree.map(lambda x: x, layer)
    # the same for all experts: no choice changes
    bias = np.asarray(layer.router_bias[...])
    other.router_bias[...] = jax.device_put(bias + np.float32(5))
    assert np.array_equal(run(other, y, real)[0], out)
    bias = bias + np.float32(5) * (np.arange(8) // 2 == 1)
    other.router_bias[...] = jax.device_put(bias)
    moved = jax.device_get(run(other, y, real)[1])
    assert np.all(np.any(moved.experts == 2, axis=-1)) and np.all(np.any(moved.experts == 3, -1))
    assert not np.all(np.any(routing.experts == 2, axis=-1))


def test_given_experts_are_taken_and_weighed_by_the_layers_own_scores():
    layer = layer_of("qwen3")
    y, real = rows()
    out, routing = jax.device_get(run(layer, y, real))
    again, _ = run(layer, y, real, routing.experts)
    assert np.array_equal(again, out)
    nothing, _ = run(layer, y, real, np.full_like(routing.experts, -1))
    assert np.array_equal(nothing, out)
    others = (routing.experts + 1) % layer.moe.experts
    given, own = jax.device_get(run(layer, y, real, others))
    assert np.array_equal(own.experts, routing.experts)
    assert not np.any(np.all(given == out, axis=-1)[real])
    assert own.counts.sum() == routing.counts.sum()


def test_padding_reaches_nobody_and_nobody_depends_on_who_stands_beside():
    layer = layer_of("deepseek")
    y, real = rows()
    out, routing = jax.device_get(run(layer, y, real))
    broken = np.where(real[..., None], y, np.float32(np.nan))
    again, counted = jax.device_get(run(layer, broken, real))
    assert np.array_equal(again[real], out[real])
    assert np.array_equal(counted.counts, routing.counts)

    def loss(layer, y):
        return jnp.sum(jnp.where(real[..., None], feed_forward(layer, y, jnp.asarray(real))[0], 0))

    names = ("router", "expert_gate", "expert_up", "expert_down")  # all see the shared expert
    gradient = jax.jit(jax.grad(loss))(layer, broken)
    assert all(np.all(np.isfinite(getattr(gradient, name)[...])) for name in names)
    # other tokens take more or fewer of each expert's rows
    for seed in range(2, 8):
        others = rows(seed)[0]
        others[1, 2] = y[1, 2]
        crowd = np.random.default_rng(seed).random(real.shape) < 0.7
        crowd[1, 2] = True
        found, _ = jax.device_get(run(layer, others, crowd))
        assert np.array_equal(found[1, 2], out[1, 2])


def logits(model, tokens, where):
    hidden, layers = model.hidden_routed(tokens, where.order, where, align=0)
    routing = layers.routing
    return model.logits(hidden), routing


def whole_rows(lengths, longest=24):
    order = np.broadcast_to(np.arange(longest, dtype=np.int32), (len(lengths), longest))
    segments = (order < np.array(lengths)[:, None]).astype(np.int32)
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, order.shape, np.int32)
    return tokens, packed_rows(segments, 0 * segments, order)


def test_first_layers_may_be_dense_and_layers_keep_their_order():
    moe = MoE(experts=4, active=2, mlp_dim=8, first_dense=2)
    model = drawn(abstract_model(small_config(attention=(Dense(), Window(4)), moe=moe)))
    tokens, where = whole_rows([24, 10])
    chosen = jax.jit(lambda *x: logits(*x)[1])
    routing = jax.device_get(chosen(model, tokens, where))
    assert routing.counts.shape == (2, 2, 4)
    assert np.array_equal(routing.counts.sum(axis=2), 2 * np.array([[24, 10]] * 2))
    layers = [layer for layer, _ in model.unstacked()]
    assert [layer.moe for layer in layers] == [None, None, moe, moe]
    for number, layer in enumerate(layers):
        stack, at = (model.first_layers, number) if number < 2 else (model.layers, number - 2)
        assert np.array_equal(layer.q[...], np.asarray(stack.q[...])[at])
    # what the last layer chose follows from its own router alone
    changed = jax.tree.map(lambda x: x, model)
    router = np.array(model.layers.router[...])
    router[1] *= -1.0
    changed.layers.router[...] = jax.device_put(router)
    other = jax.device_get(chosen(changed, tokens, where))
    assert np.array_equal(other.experts[0], routing.experts[0])
    assert not np.array_equal(other.experts[1], routing.experts[1])


def test_a_model_without_experts_has_no_more_parameters_than_before():
    model = abstract_model(small_config(attention=(Dense(),)))
    names = {name for name in vars(model.layers) if name[0] != "_"}
    assert not any("expert" in name or "router" in name for name in names)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(scores="tanh"), "scores='tanh' must be"),
        (dict(active=0), "active=0 must be at least 1"),
        (dict(groups=4), "experts=6 must be a multiple of groups=4"),
        (dict(groups=2, active_groups=3), "active_groups=3 must be at most groups=2"),
        (dict(groups=3, active=3), "active=3 must be at most the 2 experts"),
        (dict(groups=6, active_groups=2), "ranked by its two best"),
    ],
)
def test_experts_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        MoE(**dict(experts=6, active=2, mlp_dim=4) | changes)
    with pytest.raises(ValueError, match=r"moe\.first_dense=4 must be below num_layers=4"):
        small_config(moe=MoE(experts=2, active=1, mlp_dim=4, first_dense=4))
