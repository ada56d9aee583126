"""Versions of weights that differ in their adapters alone: only these move, and all of a version is
checked all the same.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.lora import LoRA, trained, with_trained
from models.transformer import Transformer, abstract_model
from rl_code.checkpoint import arrays
from rl_code.weights.layout import sampling_model
from rl_code.weights.local import LocalWeights
from rl_code.weights.stored_publisher import StoredPublisher
from rl_code.weights.stored_subscriber import StoredSubscriber
from rl_code.weights.transfer_publisher import TransferPublisher
from rl_code.weights.transfer_subscriber import TransferSubscriber
from tests.rl_code.weights.small import CONFIG, DTYPE, KEPT, mesh

ADAPTED = dataclasses.replace(
    CONFIG, mlp_dim=512, lora=LoRA(rank=2, targets=("q_proj", "down_proj"))
)
WANTED = sampling_model(ADAPTED, DTYPE, mesh())


@pytest.fixture(scope="module")
def models() -> list[Transformer]:
    """The first versions of the learner's model, on two devices."""
    abstract = abstract_model(ADAPTED, mesh(1, 2))
    rng = np.random.default_rng(0)
    made = {
        name: jax.device_put(rng.normal(0, 0.05, x.shape).astype(np.float32), x.sharding)
        for name, x in arrays.targets(abstract).items()
    }
    first = arrays.rebuild(abstract, made)

    def moved(x: jax.Array, number: int) -> jax.Array:
        return jax.device_put(np.asarray(x) + np.float32(0.1 * number), x.sharding)

    versions = [jax.tree.map(lambda x, n=n: moved(x, n), trained(first)) for n in range(3)]
    return [with_trained(first, part) for part in versions]


def sampled_bytes(tree) -> int:
    """Bytes of what a sampler has of parameters."""
    return sum(x.size * jnp.dtype(DTYPE).itemsize for x in jax.tree.leaves(tree))


def assert_same(found: Transformer, model: Transformer) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
        assert x.dtype == DTYPE
        assert np.asarray(x).tobytes() == np.asarray(y).astype(x.dtype).tobytes()


def test_within_a_process_versions_share_what_is_frozen(models):
    local = LocalWeights(WANTED, keep=2)
    adapters = sampled_bytes(trained(models[0]))
    for number, model in enumerate(models):
        local.publish(number, model)
        whole = sampled_bytes(model)
        assert local.published.live_bytes == (adapters if number else whole)
    assert 8 * adapters < whole
    kept = [local.wait(exactly=number, deadline_s=1.0)[1] for number in (1, 2)]
    for found, model in zip(kept, models[1:], strict=True):
        assert_same(found, model)
    assert kept[0].layers.down[...] is kept[1].layers.down[...]


def test_between_processes_only_adapters_travel(models, tmp_path):
    stored = StoredPublisher(tmp_path, DTYPE, KEPT)
    live = TransferPublisher(stored, host="127.0.0.1")
    reader = StoredSubscriber(tmp_path, WANTED, name="actor-1")
    follower = TransferSubscriber(reader, host="127.0.0.1", pull_s=30.0)
    adapters = sampled_bytes(trained(models[0]))
    for number, model in enumerate(models):
        live.publish(number, model)
        assert_same(follower.wait(exactly=number, deadline_s=30.0)[1], model)
        whole = sampled_bytes(model)
        assert follower.fetched.live_bytes == (adapters if number else whole)
    # what storage keeps of a version is its change
    live.close()
    assert_same(
        StoredSubscriber(tmp_path, WANTED, name="late").wait(exactly=2, deadline_s=9.0)[1],
        models[2],
    )
