"""Indexers learn from attention: by the divergence alone, which reaches nothing else."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.methods.dsa import DSA
from pallas_kernels.tokens import packed_rows
from rl_code.learner.indexing import with_divergence
from rl_code.learner.objective import Terms
from rl_code.learner.optimizer import OptimizerConfig
from rl_code.learner.supervised_batching import SupervisedBatch
from rl_code.learner.update import init_state, make_sft_update, supervised_loss
from tests.models.small import VOCABULARY, small_config, small_model

INDEXER = DSA(12, 10, 6, 4, picks=5, index_heads=8, index_size=8, index_loss=0.5)
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2, muon_learning_rate=None, schedule="constant", warmup_steps=0
)


def batch() -> SupervisedBatch:
    order = jnp.broadcast_to(jnp.arange(24), (4, 24))
    segments = (order < jnp.array([[24], [17], [9], [0]])).astype(jnp.int32)
    return SupervisedBatch(
        tokens=jax.random.randint(jax.random.key(3), order.shape, 0, VOCABULARY),
        positions=order,
        where=packed_rows(segments, 0 * segments, order),
        mask=segments.astype(jnp.float32),
        align=0,
    )


def model(method: DSA):
    return small_model((method,), num_layers=2, qk_norm=False)


def test_the_loss_is_a_mean_over_tokens_and_layers():
    holder = dataclasses.make_dataclass("Model", ["config"])(small_config(attention=(INDEXER,)))
    divergence = jnp.array([[3.0, 5.0], [1.0, 3.0]])  # two layers, two rows
    value, terms = with_divergence(jnp.float32(1), Terms({}, {}), holder, divergence, 10.0)
    assert terms.means["indexer/loss"] == pytest.approx(0.6)
    assert value == pytest.approx(1 + 0.5 * 0.6)
    assert with_divergence(1.0, Terms({}, {}), holder, None, 10.0)[1].means == {}


@pytest.mark.long
def test_it_reaches_the_indexers_alone_and_nothing_else_reaches_them():
    frozen = dataclasses.replace(INDEXER, index_loss=0.0)

    def gradients(method):
        (_, terms), found = jax.jit(
            jax.value_and_grad(lambda m: supervised_loss(m, batch()), has_aux=True)
        )(model(method))
        paths = jax.tree_util.tree_leaves_with_path(found)
        return terms, {jax.tree_util.keystr(path): np.asarray(x) for path, x in paths}

    terms, learning = gradients(INDEXER)
    none, without = gradients(frozen)
    assert terms.means["indexer/loss"] > 0 and "indexer/loss" not in none.means
    of_indexers = [name for name in learning if "index_" in name]
    assert len(of_indexers) == 5
    for name in learning:
        if name in of_indexers:
            assert np.any(learning[name]) and not np.any(without[name]), name
        else:
            np.testing.assert_allclose(learning[name], without[name], atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("all_keys, share", [(True, 0.6), (False, 0.85)])
def test_an_indexer_comes_to_rank_as_attention_does(all_keys, share):
    """Among few keys that it chose itself there is less to learn."""
    method = dataclasses.replace(INDEXER, all_keys=all_keys)
    update = make_sft_update(OPTIMIZER, 2)
    state = init_state(model(method), OPTIMIZER)
    losses = []
    for _ in range(40):
        state, metrics = update(state, batch())
        losses.append(float(metrics["indexer/loss"]))
    assert np.mean(losses[-5:]) < share * losses[0]
