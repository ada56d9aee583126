"""Under any attention, prompts shared, prompts repeated per completion and prompts computed first
are equal.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from models.sharding import MeshConfig, make_mesh, parameter_shardings, partition_spec
from planner.flops import matmul_flops
from rl_code.learner.batching import PackConfig, empty_batch, pack
from rl_code.learner.logprobs import batch_logprobs
from rl_code.learner.two_phase_batching import pack_completions
from tests.rl_code.learner.conftest import METHODS
from tests.rl_code.learner.steps import (
    ONE,
    SIZES,
    TWO,
    advantages_of,
    assert_close,
    first_step,
    fresh,
    laid_out,
)

BLOCKS = METHODS["moba-documents"][:1]
# A row for each trajectory, and some that hold nothing.
FEW = (3, 1, 4, 2)
SHARED = dataclasses.replace(ONE, rows=12)
SINGLE = dataclasses.replace(SHARED, rows=1)
# Two prompts in the first row.
PHASES = dataclasses.replace(TWO, rows=3)
# The mesh of the two phases, and their rows and micro-batches. Rows of prompts and of what follows
# them are cut over ``context`` each.
HERE = MeshConfig(1, 1), PHASES, 1
THERE = MeshConfig(fsdp=2, context=4), dataclasses.replace(TWO, rows=4), 2


def repeated(build, groups, advantages):
    """The batch with one trajectory in a row, in the shape of the one with shared prompts."""
    rows = [
        pack([build.group([t])], [[a]], SINGLE, version=0)[0]
        for group, values in zip(groups, advantages, strict=True)
        for t, a in zip(group.trajectories, values, strict=True)
    ]
    numbered = [
        dataclasses.replace(row, trajectories=row.trajectories + i) for i, row in enumerate(rows)
    ]
    return jax.tree.map(
        lambda *x: np.concatenate(x),
        *numbered,
        *[empty_batch(SINGLE, 1)] * (SHARED.rows - len(rows)),
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "methods, place", [(BLOCKS, HERE), (METHODS["nsa"], THERE)], ids=["moba", "nsa"]
)  # others: test_trees, test_two_phase, and with documents test_documents
def test_losses_and_gradients_do_not_depend_on_how_prompts_are_shared(build, methods, place):
    groups = build.turns(FEW, seed=1)
    advantages = advantages_of(FEW)
    model = build.model(attention=methods, num_layers=1, num_heads=4)
    batch, metrics = pack(groups, advantages, SHARED, version=0)
    assert metrics["pack/rows"] < len(FEW)
    shared = first_step(model, batch, runs=SHARED.runs)
    assert all(np.any(np.asarray(x)) for x in jax.tree.leaves(shared[0]))

    alone = repeated(build, groups, advantages)
    assert alone.tokens.shape == batch.tokens.shape  # for one program
    apart = first_step(model, alone, runs=SHARED.runs)
    assert_close(shared[0], apart[0])
    # the mean of a loss is of terms of order one that cancel, in float32: to 1e-7
    assert_close(shared[1], apart[1], floor=0.01)

    config, shapes, micro_batches = place
    prompts = laid_out(groups, shapes)
    completions, _ = pack_completions(groups, advantages, prompts, shapes, version=0)
    mesh = make_mesh(config, jax.devices()[: config.devices])
    copy = fresh(model)
    with jax.set_mesh(mesh):
        placed = jax.device_put(copy, parameter_shardings(model, mesh))
        rows = NamedSharding(mesh, partition_spec(("batch",)))
        prompts, completions = jax.device_put((prompts, completions), rows)
        way = dict(micro_batches=micro_batches, runs=shapes.runs, prompts=prompts)
        gradient, found, _ = jax.device_get(first_step(placed, completions, **way))
    assert_close(shared[0], gradient)
    assert found.pop("train/residual_mib") > 0
    assert_close(shared[1], found, floor=0.01)  # as above


def test_layers_that_choose_blocks_must_be_told_how_many_runs_a_row_has(build):
    groups = build.turns(SIZES, seed=1)
    batch, _ = pack(groups, advantages_of(SIZES), ONE, version=0)
    with pytest.raises(ValueError, match=r"runs=0 must be at least 1: .*MoBA\(block=8, picks=2\)"):
        first_step(build.attending("moba-documents"), batch)


@pytest.mark.long
def test_projections_and_feed_forward_are_computed_for_each_prompt_once(build):
    """Their share of a gradient's operations falls with the tokens, to (P + sum R) / (G P + sum R)."""
    prompt, completion, size, groups = 192, 64, 8, 2
    # few operations for logits, of which there are as many either way
    model = build.model(mlp_dim=128, vocab_size=8)

    def counted(rows, slots, targets):
        config = PackConfig(rows, slots, targets, max_staleness=0, drop_uninformative=False)
        gradient = jax.jit(jax.grad(lambda *given: jnp.sum(batch_logprobs(*given, 1.0)[0])))
        hlo = gradient.lower(model, empty_batch(config, rows)).compile().as_text()
        return matmul_flops(hlo, unknown_trips=0.0)  # without attention's loops over blocks of keys

    shared = counted(groups, prompt + size * completion, size * completion)
    repeated = counted(groups * size, prompt + completion, completion)
    expected = (prompt + size * completion) / (size * (prompt + completion))
    assert shared / repeated == pytest.approx(expected, rel=0.05)
