"""A model with quantised matrices samples by its own log-probabilities, whatever else is in the
batch and whatever is guessed.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from models.model_config import MoE
from models.transformer import cast
from rl_code.learner.batching import PackConfig, pack
from rl_code.learner.update import make_token_logprobs
from tests.rl_code.rollout import small
from tests.rl_code.rollout.small import ENGINE, ONE_LAYER, assert_same, initial, play, task_of

PACK = PackConfig(rows=8, slots=192, targets=96, drop_uninformative=False, max_staleness=9)
EXPERTS = dataclasses.replace(ONE_LAYER, moe=MoE(experts=4, active=2, mlp_dim=16))


@pytest.mark.parametrize(("kind", "config"), [("int8", ONE_LAYER), ("fp8", EXPERTS)])
@pytest.mark.long
def test_samples_have_the_log_probabilities_of_the_quantised_model(kind, config, monkeypatch):
    whole = initial(config)
    model = cast(whole, "float32", kind)
    monkeypatch.setattr(small, "initial", lambda config: model)
    guessing = dataclasses.replace(ENGINE, draft_tokens=2)
    tasks = [task_of(seed) for seed in range(3)]
    together, _ = play(tasks, model=model.config, engine=guessing)
    alone, _ = play(tasks[:1], model=model.config, engine=guessing)
    assert_same(alone, together[:1])
    advantages = [[0.5 - t.index for t in group.trajectories] for group in together]
    batch = pack(together, advantages, PACK, version=1)[0]
    logprobs = make_token_logprobs(1.0, 2, PACK.runs)
    own, trainers = (
        np.abs(np.asarray(logprobs(one, batch)) - batch.logprobs)[batch.mask > 0]
        for one in (model, whole)
    )
    assert len(own) > 100 and np.max(own) < 1e-3
    assert np.mean(trainers) > 1e-2
