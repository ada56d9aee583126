"""Small models that are a function of their version, for tests here and in other processes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from models.model_config import ModelConfig
from models.sharding import MeshConfig, make_mesh
from models.transformer import Transformer, abstract_model
from rl_code.checkpoint import arrays
from rl_code.weights.layout import sampling_model
from rl_code.weights.versions import WeightsConfig

CONFIG = ModelConfig(
    vocab_size=32,
    embed_dim=16,
    mlp_dim=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=4,
    rope_theta=1e4,
    norm_eps=1e-5,
    tied_embeddings=True,
)
DTYPE = "bfloat16"
KEPT = WeightsConfig(full_every=3, keep=2, deadline_s=60.0)


def mesh(
    data: int = 1, tensor: int = 1, fsdp: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Of the first devices, unless said."""
    return make_mesh(MeshConfig(data, tensor, fsdp), devices)


@functools.cache
def numbers(version: int) -> dict[str, np.ndarray]:
    """The parameters of a version: random, then small random changes."""
    if version == 0:
        rng = np.random.default_rng(0)
        shapes = arrays.targets(abstract_model(CONFIG)).items()
        return {name: rng.normal(0, 0.05, x.shape).astype(np.float32) for name, x in shapes}
    rng = np.random.default_rng(version)
    before = numbers(version - 1).items()
    return {name: x + rng.normal(0, 1e-4, x.shape).astype(np.float32) for name, x in before}


@functools.cache
def _abstract(where: Mesh) -> Transformer:
    return abstract_model(CONFIG, where)


def model_of(version: int, where: Mesh) -> Transformer:
    """The learner's float32 model of a version."""
    abstract = _abstract(where)
    targets = arrays.targets(abstract)
    made = {
        name: jax.make_array_from_callback(
            x.shape, targets[name].sharding, lambda index, x=x: x[index]
        )
        for name, x in numbers(version).items()
    }
    return arrays.rebuild(abstract, made)


@functools.cache
def wanted(where: Mesh) -> Transformer:
    """What an actor with this mesh asks for."""
    return sampling_model(CONFIG, DTYPE, where)


def assert_is(model: Transformer, version: int, where: Mesh) -> None:
    """The model has the bits of a version, in the sampling dtype, laid out for the mesh."""
    found = arrays.flatten(model)
    assert model.config.dtype == model.config.param_dtype == DTYPE
    for name, target in arrays.targets(wanted(where)).items():
        assert found[name].sharding == target.sharding and found[name].dtype == target.dtype, name
        expected = numbers(version)[name].astype(target.dtype)
        for shard in found[name].addressable_shards:
            assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes(), (
                name,
                version,
            )
