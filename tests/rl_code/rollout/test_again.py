"""A trajectory is sampled again, bit for bit, also where the weights changed in its middle."""

from __future__ import annotations

import dataclasses
import functools
import random

import jax
import numpy as np
import pytest

from rl_code.rollout.again import sample_again, versions_of
from rl_code.rollout.drafts import DraftTexts
from tests.rl_code.rollout.small import (
    ENGINE,
    SCARCE,
    Episode,
    make_scheduler,
    model_on,
    task_of,
)

# Sampled alone, a trajectory lacks the texts of its group, so that other drafts are right.
DRAFTING = dataclasses.replace(ENGINE, decode_steps=2, draft_tokens=2)
REPEATING = dataclasses.replace(DRAFTING, draft_least=0.25, draft_window=4)
VERSIONS = 6
KEY = (3, 7)


@functools.cache
def models() -> dict:
    """Versions of the weights that differ a little, as those of training do."""
    scheduler = make_scheduler()
    model = model_on(scheduler.engine.mesh)
    scheduler.close()
    return {v: jax.tree.map(lambda x, v=v: x * (1 + 0.05 * v), model) for v in range(VERSIONS)}


def record(engine, recompute: bool, seed: int) -> list:
    """Groups during whose sampling the weights change, at random moments."""
    scheduler = make_scheduler(engine)
    moments = random.Random(seed)
    scheduler.load(models()[0], 0)
    for group in range(5):
        scheduler.submit(task_of(group), Episode, group=group, group_size=3, key=KEY, tag=group)
    finished = {}
    version = 0
    while scheduler.groups:
        finished |= scheduler.step()
        if version + 1 < VERSIONS and moments.random() < 0.3:
            version += 1
            scheduler.load(models()[version], version, recompute=recompute)
    scheduler.close()
    return [t for _, group in sorted(finished.items()) for t in group.trajectories]


@pytest.mark.parametrize(
    ("engine", "recompute"),
    [
        (ENGINE, False),
        (dataclasses.replace(SCARCE, result_rows=2, result_tokens=4), False),
        (ENGINE, True),
        (REPEATING, False),
        (REPEATING, True),
    ],
    ids=[
        "kept",
        "kept, scarce, answers apart",
        "computed again",
        "kept, drafts where a row repeats itself",
        "computed again, drafts where a row repeats itself",
    ],
)
@pytest.mark.quick(first=1)
def test_a_trajectory_of_several_versions_is_sampled_again_bit_for_bit(
    engine, recompute, monkeypatch
):
    # of the row's own tokens, as the rule is: a random model hardly repeats itself
    monkeypatch.setattr(DraftTexts, "repeats", lambda _, row: sum(row.tokens[-4:]) % 2 == 0)
    trajectories = record(engine, recompute, seed=1)
    several = [t for t in trajectories if len(versions_of(t)) > 1]
    assert len(several) > 5
    assert any(t.contexts[0].keys for t in several) == (not recompute)
    scheduler = make_scheduler(engine)
    for recorded in trajectories:
        again = sample_again(scheduler, recorded, task_of(recorded.group), Episode, KEY, models())
        for name in ("tokens", "sampled", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(again, name), getattr(recorded, name), name)
        assert again.contexts[0].keys == recorded.contexts[0].keys
    scheduler.close()


def test_a_sampled_token_and_the_key_before_it_are_of_one_version():
    for trajectory in record(ENGINE, False, seed=2):
        keys = trajectory.contexts[0].keys or ((0, trajectory.versions.max()),)
        of_key = [next(v for place, v in reversed(keys) if place <= at) for at in range(64)]
        for at in np.flatnonzero(trajectory.sampled):
            assert of_key[at - 1] == trajectory.versions[at]
