"""Metrics of the trainer for sampled groups, without a gradient."""

from __future__ import annotations

import jax

from rl_code.learner import balance, picks
from rl_code.learner.batch import Batch
from rl_code.learner.batching import PackConfig, pack
from rl_code.learner.objective import Denominators, LossConfig, policy_metrics
from rl_code.learner.update import loss_share

LOSS = LossConfig(correction="none")


def packed(groups, config: PackConfig, choices=None) -> Batch:
    """Groups as a batch, in which the trajectories of a group have different advantages."""
    advantages = [[0.5 - t.index for t in group.trajectories] for group in groups]
    return pack(groups, advantages, config, version=1, choices=choices)[0]


def metrics_of(model, batch: Batch, runs: int, replay: bool = False) -> dict:
    """The metrics of ``make_update``'s loss, whose program is traced anew."""

    @jax.jit
    def metrics(model, batch):
        total = Denominators.of(batch.mask, batch.lengths, batch.segments)
        _, terms = loss_share(LOSS, runs, total, model, (batch, None, None), replay=replay)
        terms, _ = balance.finished(picks.finished(terms))
        return policy_metrics(terms)

    return jax.device_get(metrics(model, batch))
