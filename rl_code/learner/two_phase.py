"""The update in two phases: prompts while episodes still run, the rest once they are finished.

The first phase needs only the parameters and the prompts. It computes the keys and values of the
prompts, and keeps what their gradient needs. The second phase needs the trajectories. It computes
the loss given the keys and values of the prompts, and its gradient with respect to the parameters
and to those keys and values. With what the first phase kept, the gradient with respect to the keys
and values becomes a gradient with respect to the parameters, and the two are added.

The update equals that of ``update.make_update`` up to rounding. JAX returns from the first phase
before the devices have finished it, so it runs beside whatever the host does next.

What the first phase keeps takes memory while episodes run (``residual_bytes``). With
``ModelConfig.remat`` only the inputs of the layers are kept, and the second phase computes the
layers of the prompts again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention.layout import Before
from models.lora import trained, with_trained
from models.sharding import constrain
from rl_code.learner.batch import Batch
from rl_code.learner.distillation import Taught, TeacherConfig, head_of
from rl_code.learner.logprobs import Model, batch_logprobs
from rl_code.learner.objective import Denominators, LossConfig, policy_metrics
from rl_code.learner.two_phase_batching import Prompts
from rl_code.learner.update import (
    OptimizerConfig,
    TrainState,
    accumulate,
    apply,
    counts,
    float32,
    jit_step,
    loss_share,
    split,
    take,
    used,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefilled:
    """Result of the first phase, which the second needs."""

    prompts: Prompts
    # [micro_batches, ...], what the model's ``prefill`` returns for each micro-batch.
    keys: Any
    # The vjp of ``keys`` with respect to the parameters: a pytree whose leaves are what it keeps
    # beside the parameters.
    backward: Any


def residual_bytes(prefilled: Prefilled) -> int:
    """Bytes that wait for the second phase, on all devices together, without the parameters.

    prefilled: arrays or their shapes.
    """
    return sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves((prefilled.keys, prefilled.backward))
    )


def make_two_phase_update(
    loss: LossConfig,
    optimizer: OptimizerConfig,
    micro_batches: int,
    runs: int = 0,
    teacher: TeacherConfig | None = None,
) -> tuple[Callable[[Model, Prompts], Prefilled], Callable[..., tuple]]:
    """Makes the two programs: prefill(model, prompts) -> Prefilled, and
    update(state, prefilled, batch, prox=None, ref=None, taught=None, guide=None) -> (state,
    metrics).

    ``state.model`` must be the model that was prefilled with. The state that is passed in is
    donated. The batch comes from ``two_phase_batching.pack_completions``. Everything else is as in
    ``update.make_update``, with one more metric: train/residual_mib (``residual_bytes``).
    """

    @jax.jit
    def prefill(model: Model, prompts: Prompts) -> Prefilled:
        micro = split(prompts, micro_batches)

        def keys_of(wide: Model) -> Any:
            narrow = jax.tree.map(lambda x, like: x.astype(like.dtype), wide, model)
            return jax.lax.map(lambda rows: _keys(narrow, rows, runs), micro)

        # The vjp is taken at float32 parameters, so that the gradients of micro-batches are added
        # in float32. It does not keep these parameters: ``update`` makes them again from the state.
        keys, backward = jax.vjp(keys_of, float32(model), saveable_args=False)
        return Prefilled(prompts, keys, backward)

    def update(
        state: TrainState,
        prefilled: Prefilled,
        batch: Batch,
        prox: jax.Array | None = None,
        ref: jax.Array | None = None,
        taught: Taught | None = None,
        guide: Any = None,
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        total = Denominators.of(batch.mask, batch.lengths)
        micro = split((batch, prox, ref), micro_batches)
        words = split(taught, micro_batches)
        prompts = split(prefilled.prompts, micro_batches)

        def share(model: Model, keys: Any, i: jax.Array) -> tuple:
            lesson = None
            if teacher is not None:
                lesson = teacher, take(words, i), head_of(teacher, state.model, guide)
            before = _before(take(prompts, i), keys)
            return loss_share(loss, runs, total, model, take(micro, i), before, teacher=lesson)

        value, terms, grads, d_keys = accumulate(
            share, state.model, prefilled.keys, used(micro[0].mask), several=micro_batches > 1
        )
        metrics = policy_metrics(terms) | counts(batch, total)
        metrics["train/residual_mib"] = jnp.float32(residual_bytes(prefilled) / 2**20)
        backward = prefilled.backward
        wide = float32(state.model)
        backward.args_res = [wide]
        # As in ``accumulate``, the backward pass adds to these sums in place, row by row: there is
        # no stack of the gradients of one row. They are made when the rest is done, else they would
        # lie beside what that needs.
        zero, d_keys = jax.lax.optimization_barrier((jnp.float32(0.0), d_keys))
        of_prompts = jax.tree.map(
            lambda x: jax.new_ref(jnp.broadcast_to(zero, x.shape)), trained(wide)
        )
        sums = with_trained(jax.tree.map(lambda _: jax.ad.DontWant(), wide), of_prompts)
        backward.with_refs(sums)(d_keys)
        grads = jax.tree.map(lambda x, ref: x + jax.freeze(ref), grads, of_prompts)
        return apply(state, grads, value, optimizer, metrics)

    return prefill, jit_step(update)


def make_two_phase_logprobs(
    temperature: float, micro_batches: int, runs: int = 0
) -> Callable[[Model, Prompts, Batch], jax.Array]:
    """A jitted (model, prompts, batch) -> log-probabilities; as ``update.make_token_logprobs``."""

    @jax.jit
    def token_logprobs(model: Model, prompts: Prompts, batch: Batch) -> jax.Array:
        micro = split((prompts, batch), micro_batches)

        def body(i: jax.Array, logp: jax.Array) -> jax.Array:
            rows, part = take(micro, i)
            before = _before(rows, _keys(model, rows, runs))
            return logp.at[i].set(
                batch_logprobs(model, part, temperature, runs=runs, before=before)[0]
            )

        logp = jax.lax.fori_loop(0, used(micro[1].mask), body, jnp.zeros(micro[1].mask.shape))
        return constrain(logp.reshape(batch.targets.shape), "batch", None)

    return token_logprobs


def _keys(model: Model, prompts: Prompts, runs: int) -> Any:
    return model.prefill(prompts.tokens, prompts.positions, prompts.where, runs)


def _before(prompts: Prompts, keys: Any) -> Before:
    return Before(prompts.where, prompts.positions, keys)
