"""A model with adapters samples what its trainer computes, whatever else is in the batch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from models.lora import LoRA
from rl_code.learner.batching import PackConfig
from tests.rl_code.rollout import small
from tests.rl_code.rollout.small import MODEL, assert_same, initial, play, task_of
from tests.rl_code.rollout.trainer_metrics import metrics_of, packed

ADAPTED = dataclasses.replace(MODEL, lora=LoRA(rank=4, alpha=4.0))
PACK = PackConfig(rows=8, slots=192, targets=96, drop_uninformative=False, max_staleness=9)


def moving(config):
    """``small.initial``, with adapters that are not zero."""
    model = jax.tree.map(jnp.copy, initial(config))
    lora = model.layers.lora
    for number, name in enumerate(sorted(x for x in vars(lora) if x.endswith("_b"))):
        b = getattr(lora, name)
        b[...] = 0.1 * jax.random.normal(jax.random.key(number), b.shape)
    return model


@pytest.mark.long
def test_adapters_sample_what_the_trainer_computes_whatever_else_is_in_the_batch(monkeypatch):
    model = moving(ADAPTED)
    plain, _ = play([task_of(0)], model=ADAPTED)  # whose adapters are zero
    monkeypatch.setattr(small, "initial", lambda config: model)
    tasks = [task_of(seed) for seed in range(3)]
    together, _ = play(tasks, model=ADAPTED)
    alone, _ = play(tasks[:1], model=ADAPTED)
    assert_same(alone, together[:1])
    assert any(
        a.tokens.tolist() != b.tokens.tolist()
        for a, b in zip(plain[0].trajectories, alone[0].trajectories, strict=True)
    )
    metrics = metrics_of(model, packed(together, PACK), PACK.runs)
    assert metrics["policy/mismatch_max"] < 1e-3
