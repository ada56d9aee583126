"""A padded model computes what the model itself does, and its padding stays what it is."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from attention.methods.gated_documents import GatedDocuments
from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from models.families import PRESETS
from models.model_config import ModelConfig, MoE, Sizes
from models.padding import cut, cut_config, gradient_norm, pad, pad_config, read_padded, tied
from models.transformer import Transformer, abstract_model
from pallas_kernels.tokens import sequences
from tests.models.small import small_config

# Six query heads share two key/value heads: on four devices each of these stands twice.
ODD = dict(num_layers=2, num_heads=6, num_kv_heads=2, mlp_dim=22, vocab_size=30, qkv_bias=True)
DEVICES = 4
EXPERT_DEVICES = 3
NEAR = NSA(length=4, stride=2, block=8, picks=3, initial=1, local=1, window=10)
SHAPES = {
    "documents": ODD | dict(attention=(GatedDocuments(),), qk_norm=True),
    "blocks": ODD | dict(attention=(MoBA(block=8, picks=2), NEAR), tied_embeddings=False),
    "experts": ODD | dict(moe=MoE(experts=5, active=2, mlp_dim=10, shared=1, first_dense=1)),
}


def padded_config(name: str) -> ModelConfig:
    return pad_config(small_config(**SHAPES[name]), DEVICES, EXPERT_DEVICES)


@functools.cache
def model_of(config: ModelConfig) -> Transformer:
    """Random parameters of which none is 0 or 1."""
    rng = np.random.default_rng(0)

    def drawn(x):
        inputs = x.shape[1] if len(x.shape) > 2 else 16
        return jnp.asarray(rng.standard_normal(x.shape) / inputs**0.5, x.dtype)

    return jax.tree.map(drawn, abstract_model(config))


@functools.partial(jax.jit, static_argnames="config")
def padded(model: Transformer, config: ModelConfig) -> Transformer:
    return pad(model, abstract_model(config))


@jax.jit
def unpadded(model: Transformer) -> Transformer:
    return cut(model, abstract_model(cut_config(model.config)))


def assert_same_bits(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def assert_near(one, other):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True
    ):
        scale = max(float(jnp.max(jnp.abs(b))), 1e-6)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a / scale, b / scale, atol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES)
def test_a_padded_model_has_the_same_logits_and_gradients(name):
    config = padded_config(name)
    model = model_of(cut_config(config))
    larger = padded(model, config)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 30, (2, 40)))
    where = sequences(jnp.array([40, 33]), 40)

    @jax.jit
    def loss_and_gradient(model):
        def loss(model):
            hidden = model.hidden(tokens, where.order, where, align=8)
            logits = jax.nn.log_softmax(model.logits(hidden))[..., :30]
            return jnp.sum(jnp.cos(jnp.arange(30)) * logits), logits

        return jax.grad(loss, has_aux=True)(model)

    wanted, logits = loss_and_gradient(model)
    found, logits_padded = loss_and_gradient(larger)
    found = jax.jit(tied)(found)
    assert_near(logits_padded, logits)
    # copies have the sum of what each does, so they are undone before gradients are compared
    assert_near(unpadded(found), wanted)
    # what is 0 gets none, and copies get the same
    assert_same_bits(padded(unpadded(found), config), found)
    np.testing.assert_allclose(gradient_norm(found), optax.tree.norm(wanted), rtol=1e-5)
    assert gradient_norm(wanted) == optax.tree.norm(wanted)


@pytest.mark.parametrize("name", SHAPES)
def test_padding_and_cutting_gives_the_same_bits(name):
    config = padded_config(name)
    model = model_of(cut_config(config))
    larger = padded(model, config)
    assert Sizes.of(larger.config) == Sizes.of(config)
    assert_same_bits(unpadded(larger), model)
    for variable in jax.tree.leaves(larger, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        for size, axis in zip(variable.shape, variable.get_metadata("logical_axes"), strict=True):
            assert axis not in ("heads", "kv_heads", "mlp", "vocab") or size % DEVICES == 0
            assert axis != "experts" or size % EXPERT_DEVICES == 0


def test_every_part_of_a_padded_parameter_can_be_read_alone():
    config = padded_config("documents")
    model = model_of(cut_config(config))
    larger = padded(model, config)
    for name in ("q", "k", "o", "up"):
        variable = getattr(model.layers, name)
        wanted = np.asarray(getattr(larger.layers, name)[...])
        for at in range(4):
            index = tuple(slice(at * s // 4, (at + 1) * s // 4) for s in wanted.shape)
            part = read_padded(
                lambda block, variable=variable: np.array(variable[...])[block],
                config,
                variable.get_metadata("logical_axes"),
                variable.shape,
                wanted.shape,
                index,
            )
            np.testing.assert_array_equal(part, wanted[index])


@pytest.mark.parametrize(
    "name, devices, heads",
    [
        # 8 copies of 8 key/value heads, and 8 heads of zeros
        ("qwen3-32b", 72, (72, 72)),
        ("qwen3-30b-a3b", 72, (72, 72)),
        ("qwen3-32b", 16, (64, 16)),
        ("qwen3-32b", 8, (64, 8)),
        ("qwen3-32b", 3, (72, 9)),
        ("qwen3-30b-a3b", 3, (36, 9)),
    ],
)
def test_heads_are_divided_with_the_fewest_zeros(name, devices, heads):
    config = pad_config(PRESETS[name], devices)
    assert (config.num_heads, config.num_kv_heads) == heads
    assert cut_config(config) == PRESETS[name]
    sizes = dataclasses.asdict(Sizes.of(config))
    assert sizes.pop("experts") == (None if config.moe is None else 128)
    assert all(size is None or size % devices == 0 for size in sizes.values())


def test_experts_are_filled_up_with_those_that_nobody_chooses():
    config = pad_config(PRESETS["qwen3-30b-a3b"], 8, 72)
    assert config.moe.slots == 144 and config.moe.experts == 128
    assert (config.num_heads, config.num_kv_heads) == (32, 8)
    assert cut_config(config) == PRESETS["qwen3-30b-a3b"]
    layers = abstract_model(config).layers
    assert layers.expert_up.shape[1] == 144 and layers.router.shape[2] == 128


def test_what_cannot_be_padded_is_refused():
    with pytest.raises(ValueError, match="devices=0 must be at least 1"):
        pad_config(small_config(), 0)
    with pytest.raises(ValueError, match="padded already, from Sizes"):
        pad_config(padded_config("documents"), 3)
