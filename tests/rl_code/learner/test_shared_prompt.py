"""A prompt that stands once in a row equals a copy of it before every completion, under every attention method."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from rl_code.learner.batching import PackConfig, empty_batch, pack
from tests.rl_code.learner.steps import assert_close, first_step

SIZES = [3, 4, 1, 4, 2]
SHARED = PackConfig(rows=3, slots=160, targets=120, max_staleness=0, drop_uninformative=False, runs=12)
REPEATED = PackConfig(rows=1, slots=80, targets=24, max_staleness=0, drop_uninformative=False, runs=2)


def layouts(build):
    """The same multi-turn groups with shared prompts, several groups in a row, and one trajectory in a row."""
    groups = build.turns(SIZES, seed=1)
    rng = np.random.default_rng(2)
    advantages = [rng.standard_normal(size) for size in SIZES]
    shared, metrics = pack(groups, advantages, SHARED, version=0)
    assert metrics["pack/rows"] < len(SIZES)
    rows = [
        pack([build.group([t])], [[a]], REPEATED, version=0)[0]
        for group, values in zip(groups, advantages, strict=True)
        for t, a in zip(group.trajectories, values, strict=True)
    ]
    rows += [empty_batch(REPEATED, 1)] * (16 - len(rows))
    numbered = [dataclasses.replace(row, sequences=row.sequences + i) for i, row in enumerate(rows)]
    return shared, jax.tree.map(lambda *x: np.concatenate(x), *numbered)


@pytest.mark.parametrize("method", ["dense", "window", "moba", "mixed", "gated"])
def test_losses_and_gradients_of_shared_and_repeated_prompts_are_equal(build, method):
    shared, repeated = layouts(build)
    model = build.attending(method)
    one = first_step(model, shared, runs=SHARED.runs)
    two = first_step(model, repeated, runs=REPEATED.runs)
    assert_close(one[0], two[0])
    assert_close(one[1], two[1])
    assert all(np.any(np.asarray(x)) for x in jax.tree.leaves(one[0]))


def test_layers_that_choose_blocks_must_be_told_how_many_runs_a_row_has(build):
    shared, _ = layouts(build)
    with pytest.raises(ValueError, match=r"runs=0 must be at least 1: .*MoBA\(block=8, picks=2\)"):
        first_step(build.attending("moba"), shared)
