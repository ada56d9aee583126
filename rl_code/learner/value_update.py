"""The programs of a value function beside the policy's update: values of a batch, and an update of
the value function alone.

A shared backbone is frozen in such an update, so the policy keeps every bit of its parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from models.sharding import constrain
from rl_code.learner.batch import Batch
from rl_code.learner.logprobs import Model
from rl_code.learner.objective import Denominators, Terms
from rl_code.learner.update import TrainState, accumulate, counts, jit_step, split, take, used
from rl_code.learner.value_config import ValueConfig
from rl_code.learner.value_function import Critic, critic_values, stepped, value_loss


def make_token_values(
    micro_batches: int, runs: int = 0, replay: bool = False
) -> Callable[[Model, Critic, Batch], jax.Array]:
    """A jitted (model, critic, batch) -> values before its targets, float32 [R, M], whole on every
    device.

    0 in micro-batches without targets. runs, replay: as for ``logprobs.batch_logprobs``.
    """

    @jax.jit
    def token_values(model: Model, critic: Critic, batch: Batch) -> jax.Array:
        micro = split(batch, micro_batches)

        def body(i: jax.Array, values: jax.Array) -> jax.Array:
            return values.at[i].set(critic_values(model, critic, take(micro, i), runs, replay))

        shape = micro.mask.shape
        values = jax.lax.fori_loop(0, used(micro.mask), body, jnp.zeros(shape, jnp.float32))
        # the host reads it, which of several processes has only some of the devices
        return constrain(values.reshape(batch.targets.shape), None, None)

    return token_values


def make_value_update(
    config: ValueConfig, micro_batches: int, runs: int = 0, replay: bool = False
) -> Callable[..., tuple]:
    """An update(state, batch) -> (state, metrics) of ``state.value`` alone, from ``batch.returns``;
    the state passed in is donated.

    Metrics: value/loss, value/clip_fraction, value/grad_norm, value/learning_rate, and what the
    batch holds. value/finite is 0 where the loss or its gradient is not finite: the value function
    then keeps every bit.
    """

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        total = Denominators.of(batch.mask, batch.lengths)
        micro = split(batch, micro_batches)

        def share(critic: Critic, _: None, i: jax.Array) -> tuple[jax.Array, Terms]:
            part = take(micro, i)
            values = critic_values(state.model, critic, part, runs, replay)
            given = (part.values, part.returns, part.mask, total.tokens, config.clip)
            loss, means = value_loss(values, *given)
            return loss, Terms(means, {})

        loss, terms, gradients, _ = accumulate(share, state.value.critic, None, used(micro.mask))
        value, metrics = stepped(state.value, gradients, config.optimizer, jnp.isfinite(loss))
        finite = jnp.isfinite(loss) & jnp.isfinite(metrics["value/grad_norm"])
        metrics |= counts(batch, total) | terms.means
        metrics["value/finite"] = finite.astype(jnp.float32)
        return dataclasses.replace(state, value=value), metrics

    return jit_step(update)
