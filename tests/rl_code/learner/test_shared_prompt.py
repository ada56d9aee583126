"""Under any attention, prompts shared, prompts repeated per completion and prompts computed first
are equal.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.flops import matmul_flops
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

REPEATED = PackConfig(
    rows=1, slots=80, targets=24, max_staleness=0, drop_uninformative=False, runs=2
)


def repeated(build, groups, advantages):
    """The batch with one trajectory in a row."""
    rows = [
        pack([build.group([t])], [[a]], REPEATED, version=0)[0]
        for group, values in zip(groups, advantages, strict=True)
        for t, a in zip(group.trajectories, values, strict=True)
    ]
    numbered = [
        dataclasses.replace(row, trajectories=row.trajectories + i) for i, row in enumerate(rows)
    ]
    return jax.tree.map(
        lambda *x: np.concatenate(x), *numbered, *[empty_batch(REPEATED, 1)] * (32 - len(rows))
    )


@pytest.mark.long
@pytest.mark.parametrize("methods", ["dense-window", "moba-documents", "nsa"])
def test_losses_and_gradients_do_not_depend_on_how_prompts_are_shared(build, methods):
    groups = build.turns(SIZES, seed=1)
    advantages = advantages_of(SIZES)
    model = build.attending(methods)
    batch, metrics = pack(groups, advantages, ONE, version=0)
    assert metrics["pack/rows"] < len(SIZES)
    shared = first_step(model, batch, runs=ONE.runs)
    assert all(np.any(np.asarray(x)) for x in jax.tree.leaves(shared[0]))

    apart = first_step(model, repeated(build, groups, advantages), runs=REPEATED.runs)
    assert_close(shared[0], apart[0])
    # the mean of a loss is of terms of order one that cancel, in float32: to 1e-7
    assert_close(shared[1], apart[1], floor=0.01)

    prompts = laid_out(groups)
    completions, _ = pack_completions(groups, advantages, prompts, TWO, version=0)
    phases = first_step(model, completions, runs=TWO.runs, prompts=prompts)
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
