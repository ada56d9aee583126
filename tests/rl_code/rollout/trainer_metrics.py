"""Metrics and gradients of the trainer for sampled groups, without an optimiser."""

from __future__ import annotations

import functools

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


def _loss(model, batch: Batch, runs: int, replay: bool):
    total = Denominators.of(batch.mask, batch.lengths, batch.segments)
    return loss_share(LOSS, runs, total, model, (batch, None, None), replay=replay)


def _metrics(found, terms) -> dict:
    terms, _ = balance.finished(picks.finished(terms))
    return policy_metrics(terms) | {"train/loss": found}


def _metrics_of(model, batch: Batch, runs: int, replay: bool) -> dict:
    return _metrics(*_loss(model, batch, runs, replay))


_compiled = jax.jit(_metrics_of, static_argnums=(2, 3))


def metrics_of(model, batch: Batch, runs: int, replay: bool = False, anew: bool = False) -> dict:
    """The metrics of ``make_update``'s loss. anew: trace their program in any case, for a test that
    replaces a part of it.
    """
    program = _compiled
    if anew:  # of another function, since jax keeps what it has traced by function
        program = jax.jit(functools.partial(_metrics_of), static_argnums=(2, 3))
    return jax.device_get(program(model, batch, runs, replay))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _gradient_of(model, batch: Batch, runs: int, replay: bool):
    differentiated = jax.value_and_grad(_loss, has_aux=True)
    found, gradient = differentiated(model, batch, runs, replay)
    return gradient, _metrics(*found)


def gradient_of(model, batch: Batch, runs: int, replay: bool = False) -> tuple:
    """(The gradient of ``make_update``'s loss, its metrics)."""
    return jax.device_get(_gradient_of(model, batch, runs, replay))
