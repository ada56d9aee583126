"""A model with experts samples what its trainer computes, whatever else is in the batch; and the
experts of sampled tokens travel with them and are replayed.
"""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from models import moe as models_moe
from models.model_config import MoE
from models.sharding import MeshConfig, make_mesh
from rl_code.learner import picks
from rl_code.learner.batching import PackConfig
from rl_code.rollout.engine import Engine
from rl_code.rollout.scheduler import Scheduler
from tests.rl_code.rollout.small import (
    ENGINE,
    MODEL,
    SAMPLING,
    STOP,
    Letters,
    assert_same,
    initial,
    model_on,
    play,
    task_of,
)
from tests.rl_code.rollout.trainer_metrics import metrics_of, packed

EXPERTS = MoE(experts=4, active=2, mlp_dim=16, shared=1, first_dense=1)
SPARSE = dataclasses.replace(MODEL, moe=EXPERTS)
NOTING = dataclasses.replace(ENGINE, note_picks=True)
PACK = PackConfig(rows=8, slots=192, targets=96, drop_uninformative=False, max_staleness=9)


def trained_on(groups, replay: bool) -> dict:
    """What the trainer's metrics say of groups."""
    batch = packed(groups, PACK, picks.shapes(SPARSE, PACK.slots))
    return metrics_of(initial(SPARSE), batch, PACK.runs, replay)


@pytest.mark.long
def test_experts_sample_what_the_trainer_computes_whatever_else_is_in_the_batch():
    tasks = [task_of(seed) for seed in range(3)]
    together, _ = play(tasks, engine=NOTING, model=SPARSE)
    alone, _ = play(tasks[:1], engine=NOTING, model=SPARSE)
    assert_same(alone, together[:1])
    for a, b in zip(alone[0].trajectories, together[0].trajectories, strict=True):
        noted = a.contexts[0].choices["experts"]
        assert noted.dtype == np.uint8 and noted.shape == (a.contexts[0].sampled.sum(), 1, 2)
        assert np.array_equal(noted, b.contexts[0].choices["experts"])
    metrics = trained_on(together, replay=False)
    assert metrics["policy/mismatch_max"] < 1e-3
    assert metrics["policy/experts_overlap"] == metrics["policy/experts_equal"] == 1.0
    assert 1.0 <= metrics["experts/busiest"] <= EXPERTS.experts / EXPERTS.active


def played_on(config, model):
    """What five groups sample on a mesh, and the engine."""
    engine = Engine(model, NOTING, SAMPLING, (STOP,), make_mesh(config))
    scheduler = Scheduler(engine, Letters(), workers=4, worker_deadline_s=30.0)
    groups, _ = play([task_of(seed) for seed in range(5)], scheduler=scheduler, model=model)
    scheduler.close()
    return groups, engine


@pytest.mark.long
@pytest.mark.parametrize(
    "config, fold",
    [
        (MeshConfig(expert=4, tensor=2), False),
        (MeshConfig(data=2, expert=2, tensor=2), True),
    ],
    ids=["expert 4 x tensor 2", "data 2 x expert 2 x tensor 2, folded"],
)
def test_experts_on_several_devices_sample_the_same_bits(config, fold):
    """The same as without the axis expert: an axis tensor alone changes the order of sums."""
    moe = dataclasses.replace(EXPERTS, fold=fold, first_dense=0)
    model = dataclasses.replace(SPARSE, num_layers=1, moe=moe)
    found, engine = played_on(config, model)
    alone, _ = played_on(MeshConfig(tensor=config.tensor), model)
    assert_same(found, alone)
    for group, wanted in zip(found, alone, strict=True):
        for a, b in zip(group.trajectories, wanted.trajectories, strict=True):
            experts = (x.contexts[0].choices["experts"] for x in (a, b))
            assert np.array_equal(*experts)
    # each device has its experts, and none gathers those of the others
    traced = engine.traced(model_on(engine.mesh, model))["decode"]
    program = traced.lower().compile().as_text()
    shapes = set(re.findall(r"\b(\d),32,(?:16|8)\]", program))
    assert str(4 // config.expert // (config.tensor if fold else 1)) in shapes and "4" not in shapes


@pytest.mark.long
def test_replay_undoes_what_another_choice_of_experts_does(monkeypatch):
    """While decoding, the sampler ranks experts by other scores, as another precision may."""
    choose = models_moe.choose_experts

    def off(moe, scores, bias):
        if scores.shape[1] == 1:  # prompts and answers come in chunks
            scores = scores + 0.1 * jnp.array([1.0, -1.0, 1.0, -1.0])
        return choose(moe, scores, bias)

    monkeypatch.setattr(models_moe, "choose_experts", off)
    engine = Engine(SPARSE, NOTING, SAMPLING, (STOP,), make_mesh(MeshConfig()))
    scheduler = Scheduler(engine, Letters(), workers=4, worker_deadline_s=30.0)
    groups, _ = play([task_of(seed) for seed in range(2)], scheduler=scheduler, model=SPARSE)
    scheduler.close()
    monkeypatch.undo()
    compared, replayed = (trained_on(groups, replay) for replay in (False, True))
    assert compared["policy/experts_equal"] < compared["policy/experts_overlap"] < 1.0
    assert compared["policy/mismatch_max"] > 1e-2
    assert replayed["policy/mismatch_max"] < 1e-3
