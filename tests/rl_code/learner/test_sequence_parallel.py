"""Activations that are cut over ``tensor`` by tokens: fewer of them are kept.

The same updates are in test_expert_parallel.py and in test_value_layouts.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sharding import MeshConfig, make_mesh
from models.transformer import abstract_model
from rl_code.learner.batching import PackConfig, empty_batch
from rl_code.learner.logprobs import batch_logprobs
from tests.models.small import small_config


def kept_bytes(sequence_parallel: bool) -> int:
    """Temporary memory of a gradient of many thin layers over long rows on eight devices."""
    shape = dict(embed_dim=64, num_layers=24, num_heads=8, num_kv_heads=8, remat=True)
    mesh = make_mesh(MeshConfig(data=1, tensor=8))
    pack_config = PackConfig(1, 2048, 64, 0, False)
    with jax.set_mesh(mesh):
        config = small_config(**shape, sequence_parallel=sequence_parallel)
        model = abstract_model(config, mesh)
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, np.asarray(x).dtype),
            empty_batch(pack_config, 1),
        )
        gradient = jax.jit(jax.grad(lambda *given: jnp.sum(batch_logprobs(*given, 1.0)[0])))
        compiled = gradient.lower(model, batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.long
def test_activations_that_wait_for_the_backward_pass_are_cut():
    whole, cut = (kept_bytes(on) for on in (False, True))
    # 24 layers keep their input, 2,048 tokens of 64 numbers: 12 MiB on every device, or an eighth
    saved = 24 * 2048 * 64 * 4
    assert whole - cut > 0.8 * (saved - saved // 8)
