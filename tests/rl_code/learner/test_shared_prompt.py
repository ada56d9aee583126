"""Under any attention, prompts shared, prompts repeated per completion and prompts computed first
are equal.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from planner.flops import matmul_flops
from rl_code.learner.batching import PackConfig, empty_batch, pack
from rl_code.learner.two_phase_batching import pack_completions
from rl_code.learner.update import init_state
from tests.rl_code.learner.steps import (
    LOSS,
    ONE,
    OPTIMIZER,
    SIZES,
    TWO,
    advantages_of,
    assert_close,
    first_step,
    fresh,
    laid_out,
    update_for,
)

# A row for each trajectory, and some that hold nothing.
FEW = (3, 1, 4, 2)
SHARED = dataclasses.replace(ONE, rows=12)
SINGLE = dataclasses.replace(SHARED, rows=1)
# Two prompts in the first row.
PHASES = dataclasses.replace(TWO, rows=3)


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
@pytest.mark.parametrize("methods", ["moba-documents", "nsa"])  # others: test_trees, test_two_phase
def test_losses_and_gradients_do_not_depend_on_how_prompts_are_shared(build, methods):
    groups = build.turns(FEW, seed=1)
    advantages = advantages_of(FEW)
    model = build.attending(methods)
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

    prompts = laid_out(groups, PHASES)
    completions, _ = pack_completions(groups, advantages, prompts, PHASES, version=0)
    phases = first_step(model, completions, runs=PHASES.runs, prompts=prompts)
    assert_close(shared[0], phases[0])
    assert phases[1].pop("train/residual_mib") > 0
    assert_close(shared[1], phases[1], floor=0.01)  # as above


def test_layers_that_choose_blocks_must_be_told_how_many_runs_a_row_has(build):
    groups = build.turns(SIZES, seed=1)
    batch, _ = pack(groups, advantages_of(SIZES), ONE, version=0)
    with pytest.raises(ValueError, match=r"runs=0 must be at least 1: .*MoBA\(block=8, picks=2\)"):
        first_step(build.attending("moba-documents"), batch)


@pytest.mark.long
def test_projections_and_feed_forward_are_computed_for_each_prompt_once(build):
    """Their share of a step's operations falls with the tokens, to (P + sum R) / (G P + sum R)."""
    prompt, completion, size, groups = 192, 64, 8, 2
    # few operations for logits, of which there are as many either way
    model = build.model(mlp_dim=128, vocab_size=8)

    def counted(rows, slots, targets):
        batch = empty_batch(
            PackConfig(rows, slots, targets, max_staleness=0, drop_uninformative=False), rows
        )
        update = update_for(dataclasses.replace(LOSS, kl_coef=0.0), OPTIMIZER, 1, 0)
        hlo = (
            update.lower(init_state(fresh(model), OPTIMIZER), batch, None, None).compile().as_text()
        )
        return matmul_flops(hlo, unknown_trips=0.0)  # without attention's loops over blocks of keys

    shared = counted(groups, prompt + size * completion, size * completion)
    repeated = counted(groups * size, prompt + completion, completion)
    expected = (prompt + size * completion) / (size * (prompt + completion))
    assert shared / repeated == pytest.approx(expected, rel=0.05)
