"""Experts that are cut over devices: every row reaches its expert, however many go to one."""

from __future__ import annotations

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, NamedSharding, PartitionSpec

from models.expert_parallel import room
from models.layers import Layers
from models.model_config import MoE
from models.moe import feed_forward
from models.ragged_exchange import Stretches, by_gathering
from models.sharding import (
    MeshConfig,
    abstract_mesh,
    make_mesh,
    partition_spec,
    use_mesh,
)
from tests.models.small import small_config

MOE = MoE(experts=8, active=2, mlp_dim=8, buffer=1.0)
MESHES = {
    "expert 8": (MeshConfig(expert=8), MOE),
    "data 2 x expert 2 x tensor 2, folded": (
        MeshConfig(data=2, expert=2, tensor=2),
        dataclasses.replace(MOE, fold=True),
    ),
}
ROWS, TOKENS = 8, 160


def test_rows_go_where_the_stretches_say():
    """As ``jax.lax.ragged_all_to_all`` is defined."""
    rng = np.random.default_rng(0)
    devices, each, rows, capacity = 4, 2, 24, 64
    sizes = rng.integers(0, 4, (devices, devices, each))
    # [from, to, stretch]; stretches that are sent do not touch each other
    starts = np.cumsum(sizes.reshape(devices, -1), axis=1).reshape(sizes.shape) - sizes
    arriving = np.swapaxes(sizes, 0, 1).reshape(devices, -1)
    targets = 3 + np.cumsum(arriving, axis=1) - arriving
    targets = np.swapaxes(targets.reshape(devices, devices, each), 0, 1)
    x = rng.standard_normal((devices, rows, 3)).astype(np.float32)
    into = rng.standard_normal((devices, capacity, 3)).astype(np.float32)
    wanted = into.copy()
    for source, to, at in np.ndindex(sizes.shape):
        size, start, target = (z[source, to, at] for z in (sizes, starts, targets))
        wanted[to, target : target + size] = x[source, start : start + size]
    received = np.swapaxes(sizes, 0, 1)
    mesh = make_mesh(MeshConfig(expert=2, tensor=2))
    cut = PartitionSpec(("expert", "tensor"))
    found = jax.jit(
        jax.shard_map(
            lambda x, into, *sent: by_gathering(
                x[0], into[0], Stretches(*(z[0].reshape(-1) for z in sent)), ("expert", "tensor")
            ),
            mesh=mesh,
            in_specs=(cut,) * 6,
            out_specs=cut,
            check_vma=False,
        )
    )(x, into, starts, sizes, targets, received)
    np.testing.assert_array_equal(found, wanted.reshape(-1, 3))


@functools.cache
def layer_of(moe: MoE) -> Layers:
    layers = Layers(small_config(), nnx.Rngs(0), 1, moe)
    return jax.tree.map(operator.itemgetter(0), layers)


def hidden(seed: int) -> jax.Array:
    drawn = np.random.default_rng(seed).standard_normal((ROWS, TOKENS, 16))
    return jax.device_put(drawn.astype(np.float32))


def run(layer, y, experts):
    """(results, their gradients) of tokens that go to these experts."""
    real = jnp.arange(TOKENS) < TOKENS - jnp.arange(ROWS)[:, None]

    def loss(layer, y):
        out, routing = feed_forward(layer, y, real, experts)
        return jnp.sum(jnp.cos(jnp.arange(16)) * out), (out, routing)

    gradient, (out, routing) = jax.grad(loss, argnums=(0, 1), has_aux=True)(layer, y)
    return out, routing, gradient


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.long
def test_no_row_is_lost_when_all_go_to_one_device_and_none_depends_on_the_others(name):
    config, moe = MESHES[name]
    orders = np.tile(np.arange(8), (ROWS, TOKENS, 1))
    apart = np.random.default_rng(1).permuted(orders, axis=-1)[..., :2]
    # of the devices along data only the last ones need more than one round
    group = ROWS // config.data
    together = apart.copy()
    together[-group:] = [5, 4]
    together[5, 7] = apart[5, 7]
    devices = config.expert * config.tensor
    capacity = room(group * TOKENS * 2 // devices, 10**6, moe.buffer)
    most = [
        max(np.bincount(x.reshape(-1) * devices // 8)) for x in (together[-group:], apart[:group])
    ]
    assert most[0] > 2 * capacity and most[1] <= capacity
    apart, together = jnp.asarray(apart), jnp.asarray(together)
    alone = [jax.jit(run)(layer_of(moe), hidden(0), experts) for experts in (apart, together)]
    mesh = make_mesh(config)
    with jax.set_mesh(mesh):
        layer = layer_of(moe)
        shardings = jax.tree.map(
            lambda x: x.replace(
                NamedSharding(mesh, partition_spec(x.get_metadata("logical_axes")[1:]))
            ),
            layer,
            is_leaf=lambda x: isinstance(x, nnx.Variable),
        )
        layer = jax.device_put(layer, shardings)
        jitted = jax.jit(run)
        found = [jitted(layer, hidden(0), experts) for experts in (apart, together)]
        crowd = jitted(layer, hidden(1).at[5, 7].set(hidden(0)[5, 7]), together)
    for (out, routing, gradient), (wanted, wanted_routing, wanted_gradient) in zip(
        found, alone, strict=True
    ):
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(routing.counts, wanted_routing.counts)
        for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted_gradient), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    same = [np.asarray(x[0])[5, 7].tobytes() for x in (*found, crowd)]
    assert len(set(same)) == 1


PLATFORMS = {
    "tpu": AbstractDevice(device_kind="TPU v5p", num_cores=2, platform="tpu"),
    "cuda": AbstractDevice(device_kind="NVIDIA GB200", num_cores=None, platform="gpu"),
}


@pytest.mark.parametrize("name, platform", list(zip(MESHES, PLATFORMS, strict=True)))
def test_accelerators_exchange_rows_by_ragged_all_to_all(name, platform):
    config, moe = MESHES[name]
    mesh = abstract_mesh(config, PLATFORMS[platform])
    layer = jax.eval_shape(lambda: layer_of.__wrapped__(moe))
    shapes = [
        jax.ShapeDtypeStruct((ROWS, TOKENS, n), t) for n, t in ((16, "float32"), (2, "int32"))
    ]
    with use_mesh(mesh):
        lowered = jax.jit(run).trace(layer, *shapes).lower(lowering_platforms=(platform,))
    # there and back in the first round, the same of their gradients, and in the further rounds
    # there and back, and three more in their backward pass
    assert lowered.as_text().count("@ragged_all_to_all") == 9
