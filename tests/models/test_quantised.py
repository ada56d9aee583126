"""A model with quantised matrices computes what it would with the matrices that qwix restores from
them, and its numbers are the same on every mesh.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from attention.methods.dense import Dense
from models.lora import STACKS, LoRA
from models.model_config import MoE
from models.padding import pad, pad_config
from models.quantised import DTYPES, MATRICES, scale_name
from models.sharding import MeshConfig, make_mesh, parameter_shardings
from models.transformer import Transformer, abstract_model, cast
from pallas_kernels.tokens import sequences
from rl_code.checkpoint import arrays
from tests.models.small import VOCABULARY, drawn, small_config, small_model
from tests.models.test_lora import moved

EXPERTS = MoE(experts=4, active=2, mlp_dim=8, first_dense=2, shared=1)
SHAPES = {
    "adapters": dict(lora=LoRA(rank=3, alpha=2.0)),
    "experts": dict(moe=EXPERTS),
}
# The axes of outputs of each matrix, by their names, behind the axis of layers.
OUTPUTS = {
    "q": ("heads", "head_dim"),
    "k": ("kv_heads", "head_dim"),
    "v": ("kv_heads", "head_dim"),
    "o": ("embed",),
    "gate": ("mlp",),
    "up": ("mlp",),
    "down": ("embed",),
    "expert_gate": ("experts", "mlp"),
    "expert_up": ("experts", "mlp"),
    "expert_down": ("experts", "embed"),
}


@functools.cache
def model_of(name: str) -> Transformer:
    model = small_model((Dense(),), **SHAPES[name])
    return moved(model) if name == "adapters" else model


def quantised_matrices(model: Transformer):
    """(numbers, scales broadcast to them, the name) of every quantised matrix."""
    for stack in STACKS:
        layers = getattr(model, stack, None)
        for name in MATRICES:
            if not hasattr(layers, name):
                continue
            numbers, scales = getattr(layers, name), getattr(layers, scale_name(name))
            axes = numbers.get_metadata("logical_axes")
            assert scales.get_metadata("logical_axes") == ("layers", *OUTPUTS[name])
            inner = [at for at, axis in enumerate(axes) if axis not in ("layers", *OUTPUTS[name])]
            yield stack, name, numbers[...], np.expand_dims(np.asarray(scales[...]), inner)


@jax.jit
def logits(model: Transformer) -> jax.Array:
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, (2, 24), np.int32)
    where = sequences(jnp.array([24, 17]), 24)
    return model.logits(model.hidden(tokens, where.order, where, align=0))[..., :VOCABULARY]


@jax.jit
def dequantised(numbers, scales) -> jax.Array:
    return qwix.dequantize(qwix.QArray(numbers, scales))


def assert_same_bits(one: Transformer, other: Transformer) -> None:
    one, other = arrays.flatten(one), arrays.flatten(other)
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert np.asarray(x).tobytes() == np.asarray(other[name]).tobytes(), name


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.quick(first=1)
def test_products_are_those_with_the_restored_matrices(kind, name):
    model = model_of(name)
    found = cast(model, "float32", kind)
    assert jax.tree.structure(abstract_model(found.config)) == jax.tree.structure(found)
    restored = jax.tree.map(lambda x: x, model)
    for stack, matrix, numbers, scales in quantised_matrices(found):
        assert numbers.dtype == DTYPES[kind]
        own = getattr(getattr(restored, stack), matrix)
        whole = dequantised(numbers, scales)
        mine = np.asarray(own[...])
        # half a step: of int8 the same everywhere, of fp8 with its 3 bits of mantissa relative
        step = scales / 2 if kind == "int8" else np.maximum(np.abs(mine) / 16, scales * 2**-10)
        assert np.all(np.abs(np.asarray(whole) - mine) <= 1.001 * step), matrix
        setattr(getattr(restored, stack), matrix, own.replace(whole))
    # every matrix of layers has 8 bits; norms and the router keep theirs
    count = sum(x.dtype.itemsize == 1 for x in jax.tree.leaves(found))
    assert count == len(list(quantised_matrices(found))) == (17 if name == "experts" else 7)
    found, restored, model = (np.asarray(logits(x)) for x in (found, restored, model))
    np.testing.assert_allclose(found, restored, rtol=1e-4, atol=1e-4)
    assert np.max(np.abs(found - model)) > 1e-3


@pytest.mark.long
def test_every_mesh_makes_the_same_numbers():
    model = model_of("experts")
    found = cast(model, "bfloat16", "int8")
    mesh = make_mesh(MeshConfig(data=2, tensor=2, fsdp=2))
    spread = cast(jax.device_put(model, parameter_shardings(model, mesh)), "bfloat16", "int8")
    assert_same_bits(spread, found)
    wanted = arrays.targets(abstract_model(found.config, mesh))
    for name, x in arrays.flatten(spread).items():
        assert x.sharding.is_equivalent_to(wanted[name].sharding, x.ndim), name
        assert x.dtype == wanted[name].dtype, name
    # what is quantised from whole weights is not made worse by another cast
    assert cast(found, "bfloat16", "int8") is found
    with pytest.raises(ValueError, match="the model's matrices are int8 already"):
        cast(found, "bfloat16")


def test_a_padded_model_has_the_same_scales_and_logits():
    model = drawn(abstract_model(small_config(num_heads=6, num_kv_heads=2, mlp_dim=22)))
    like = abstract_model(pad_config(model.config, 4))
    padded = jax.jit(lambda x: pad(x, like))(model)
    found, expected = (np.asarray(logits(cast(x, "float32", "int8"))) for x in (padded, model))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="quantised='int3' must be one of int8, fp8, or None"):
        small_config(quantised="int3")
