"""The load of experts: the loss that evens it out, the bias that does, and the metrics."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.methods.dense import Dense
from models.model_config import MoE
from models.moe import Routing
from models.transformer import abstract_model
from pallas_kernels.tokens import packed_rows
from rl_code.learner import balance
from rl_code.learner.objective import Terms
from rl_code.learner.optimizer import OptimizerConfig, matrix_dimensions
from rl_code.learner.supervised_batching import SupervisedBatch
from rl_code.learner.update import init_state, make_sft_update
from tests.models.small import VOCABULARY, small_config, small_model

EXPERTS = MoE(
    experts=4, active=2, mlp_dim=8, ranking_bias=True, balance_loss=0.5, balance_rate=0.25
)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, clip_norm=None)


@dataclasses.dataclass(frozen=True)
class Holder:
    """What ``balance`` asks of a model."""

    config: object


def with_load(routing: Routing):
    """(loss without its weight, metrics, load) of a batch of which all rows are given."""
    model = Holder(dataclasses.make_dataclass("Config", ["moe"])(EXPERTS))
    tokens = jnp.sum(routing.counts[0]) / EXPERTS.active
    value, terms = balance.with_load(jnp.float32(0), Terms({}, {}), model, routing, tokens)
    terms, load = balance.finished(terms)
    return value, terms.means, load


def test_the_loss_is_one_for_even_loads_and_rises_with_uneven_ones():
    even = Routing(None, jnp.full((3, 2, 4), 5.0), jnp.full((3, 2, 4), 2.5), jnp.ones((3, 2)))
    value, metrics, load = with_load(even)
    assert np.isclose(metrics["experts/balance_loss"], 1.0) and np.isclose(value, 0.5)
    assert metrics["experts/busiest"] == metrics["experts/busiest_layer"] == 1.0
    assert np.array_equal(load, np.full((3, 4), 10.0))
    assert np.isclose(metrics["experts/entropy"], 0.1)
    # all tokens of one layer go to experts 0 and 1
    counts = even.counts.at[1].set(jnp.array([10.0, 10.0, 0.0, 0.0]))
    shares = even.shares.at[1].set(jnp.array([4.0, 4.0, 1.0, 1.0]))
    _, metrics, _ = with_load(dataclasses.replace(even, counts=counts, shares=shares))
    # of that layer: E * sum of f P = 4 * (0.5 * 0.4 + 0.5 * 0.4)
    assert np.isclose(metrics["experts/balance_loss"], (1 + 1.6 + 1) / 3)
    assert np.isclose(metrics["experts/busiest"], (1 + 2 + 1) / 3)
    assert metrics["experts/busiest_layer"] == 2.0


@pytest.mark.long
def test_an_update_in_micro_batches_moves_biases_towards_idle_experts():
    """Updates in one and in two micro-batches are compared in test_expert_parallel.py."""
    model = small_model((Dense(),), moe=EXPERTS, num_layers=2)
    order = jnp.broadcast_to(jnp.arange(12), (4, 12))
    # the last row is padding
    segments = (order < jnp.array([[12], [7], [3], [0]])).astype(jnp.int32)
    batch = SupervisedBatch(
        tokens=jax.random.randint(jax.random.key(3), order.shape, 0, VOCABULARY),
        positions=order,
        where=packed_rows(segments, 0 * segments, order),
        mask=segments.astype(jnp.float32),
        align=0,
    )
    routed = jax.jit(lambda model: model.hidden_routed(batch.tokens, order, batch.where, align=0))
    routing = routed(model)[1].routing
    load = np.asarray(routing.counts.sum(axis=1))
    assert np.array_equal(load.sum(axis=1), [2 * 22] * 2)
    state, metrics = make_sft_update(OPTIMIZER, 2)(init_state(model, OPTIMIZER), batch)
    # neither the optimizer nor weight decay moves a bias
    assert np.allclose(
        state.model.layers.router_bias[...],
        EXPERTS.balance_rate * np.sign(load.mean(axis=1, keepdims=True) - load),
    )
    busiest = load.max(axis=1) / load.mean(axis=1)
    assert np.isclose(metrics["experts/busiest"], busiest.mean())
    assert 0.0 < metrics["experts/entropy"] <= np.log(4) + 1e-6
    assert metrics["experts/balance_loss"] >= 0.9


def test_muon_takes_each_expert_as_a_matrix_of_its_own():
    model = abstract_model(small_config(moe=EXPERTS))
    layers = matrix_dimensions(model).layers
    found = {name: getattr(layers, name) for name in ("expert_up", "expert_down", "router")}
    axes = {name: (x.reduction_axis, x.output_axis) for name, x in found.items()}
    assert axes == {
        "expert_up": ((2,), (3,)),
        "expert_down": ((2,), (3,)),
        "router": ((1,), (2,)),
    }
    assert layers.router_bias is None


def test_a_rate_without_a_bias_is_refused():
    with pytest.raises(ValueError, match=r"balance_rate=0\.1 moves the ranking bias"):
        MoE(experts=4, active=2, mlp_dim=8, balance_rate=0.1)
    with pytest.raises(ValueError, match=r"balance_loss=-1\.0 must be at least 0"):
        dataclasses.replace(EXPERTS, balance_loss=-1.0)
