"""Memory of updates in two phases and with chosen blocks: arithmetic beside programs compiled here."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from attention.methods.nsa import NSA
from models.sharding import MeshConfig
from models.transformer import abstract_model
from planner import arithmetic
from planner.targets import TARGETS
from planner.workload import Estimate, Workload
from rl_code.learner import two_phase, update
from rl_code.learner.batching import empty_batch
from rl_code.learner.two_phase import make_two_phase_update, residual_bytes
from rl_code.learner.two_phase_batching import Prompts
from rl_code.learner.update import abstract_state
from tests.models.small import small_config
from tests.rl_code.learner.steps import LOSS, ONE, OPTIMIZER

# Eight layers of 8 and 4 heads; four rows of 1,024 tokens of prompts and as many that follow.
SIZES = dict(embed_dim=256, mlp_dim=768, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=64)
ROWS, PROMPTS, REST, TARGETS_OF_ROW = 4, 1024, 1024, 256
PLAIN = dataclasses.replace(LOSS, kl_coef=0.0, entropy_coef=0.0)
MODEL = small_config(vocab_size=1024, remat=True, **SIZES)


def planned(model, prompts: int = PROMPTS) -> Estimate:
    slots = PROMPTS + REST
    own = dict(targets=TARGETS_OF_ROW, prompts=prompts)
    job = Workload("small", model, TARGETS["h100"], ROWS * slots, slots, 4, **own)
    return arithmetic.learner(job, MeshConfig())


def programs(config):
    """(both programs, the model's shapes, those of prompts)."""
    prompts = Prompts(*(jax.ShapeDtypeStruct((ROWS, PROMPTS), jnp.int32) for _ in range(3)))
    return *make_two_phase_update(PLAIN, OPTIMIZER, ROWS, 4), abstract_model(config), prompts


@pytest.mark.parametrize("keeps", ["nothing", "products"])
def test_what_waits_for_the_second_phase_is_counted(keeps):
    config = dataclasses.replace(MODEL, remat_keeps=keeps)
    prefill, _, model, prompts = programs(config)
    waiting = residual_bytes(jax.eval_shape(prefill, model, prompts))
    # beside the arithmetic: numbers of tokens and log-sum-exps
    assert planned(config).memory["prompts"] == pytest.approx(waiting, rel=0.01)


def test_an_update_in_two_phases_does_the_work_of_one_in_more_memory():
    two, one = planned(MODEL), planned(MODEL, prompts=0)
    assert (two.flops, two.useful, two.hbm) == (one.flops, one.useful, one.hbm)
    assert {"prompts", "prompts' gradients"} == set(two.memory) - set(one.memory)
    # keys and values of 4 heads of 64 in 8 layers, in four bytes
    keys = ROWS * PROMPTS * 8 * 2 * 4 * 64 * 4
    assert two.memory["prompts' gradients"] == keys
    assert two.memory["prompts"] == keys + ROWS * PROMPTS * 8 * 256 * 4


def plain(state, grads, value, optimizer, metrics, load=None):
    """``update.apply`` without an optimizer, for which XLA on CPU copies both moments."""
    model = jax.tree.map(lambda x, grad: x - 0.1 * grad, state.model, grads)
    return dataclasses.replace(state, model=model), metrics | {"train/loss": value}


def shapes_of_batch(slots: int, prompt_slots: int):
    sizes = dict(rows=ROWS, slots=slots, targets=TARGETS_OF_ROW, prompt_slots=prompt_slots)
    batch = empty_batch(dataclasses.replace(ONE, **sizes), ROWS)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


@pytest.mark.long
def test_memory_is_that_of_the_compiled_second_phase(monkeypatch):
    monkeypatch.setattr(two_phase, "apply", plain)
    prefill, second, model, prompts = programs(MODEL)
    prefilled = jax.eval_shape(prefill, model, prompts)
    given = abstract_state(model, OPTIMIZER), prefilled, shapes_of_batch(REST, PROMPTS)
    found = second.trace(*given).lower().compile().memory_analysis().temp_size_in_bytes
    made = planned(MODEL).memory
    wanted = made["gradients"] + made["prompts' gradients"] + made["working"]
    assert found == pytest.approx(wanted, rel=0.1)


@pytest.mark.long
def test_memory_of_chosen_blocks_is_that_of_the_compiled_update(monkeypatch):
    """One key/value head, of which XLA on CPU takes one after another and kernels take all."""
    monkeypatch.setattr(update, "apply", plain)
    config = dataclasses.replace(MODEL, num_kv_heads=1, attention=(NSA(),))
    program = update.make_update(PLAIN, OPTIMIZER, ROWS, 4)
    state = abstract_state(abstract_model(config), OPTIMIZER)
    traced = program.trace(state, shapes_of_batch(PROMPTS + REST, 0))
    found = traced.lower().compile().memory_analysis().temp_size_in_bytes
    made = planned(config, prompts=0).memory
    assert found == pytest.approx(made["gradients"] + made["working"], rel=0.1)
