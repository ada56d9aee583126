"""One update, its gradient, and comparing two of them: what the tests of the updates share."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import optax

from rl_code.config.named import Named
from rl_code.learner import learner as learner_lib
from rl_code.learner.batching import PackConfig
from rl_code.learner.objective import LossConfig
from rl_code.learner.two_phase import make_two_phase_update
from rl_code.learner.two_phase_batching import pack_prompts
from rl_code.learner.update import OptimizerConfig, init_state

PACK = PackConfig(32, 40, 32, 0, False)
BOUNDS = {"clip_low": 0.2, "clip_high": 0.3}
LOSS = LossConfig(
    policy=Named("gspo", BOUNDS),
    aggregation="sequence",
    constant_length=16,
    kl_coef=0.1,
    kl_estimator="k3",
    entropy_coef=0.05,
    correction="masked_geometric",
    correction_low=0.2,
    correction_high=5.0,
    temperature=0.8,
)
# Multi-turn groups of these sizes, their shapes in one phase and in two: two prompts in the first
# two of eight rows.
SIZES = (3, 4, 1, 4, 2, 3, 2, 5, 1, 2)
ONE = PackConfig(rows=8, slots=160, targets=120, max_staleness=0, drop_uninformative=False, runs=12)
TWO = dataclasses.replace(ONE, prompt_slots=80)
# b1 = 0 makes the first moment the gradient itself.
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2,
    muon_learning_rate=None,
    schedule="constant",
    warmup_steps=0,
    total_steps=10,
    b1=0.0,
    b2=0.9,
    eps=1e-8,
    weight_decay=0.1,
    clip_norm=None,
)


def loss_of(name: str, **changes) -> LossConfig:
    """LOSS with another policy loss, of the same bounds."""
    return dataclasses.replace(LOSS, policy=Named(name, BOUNDS), **changes)


# One compilation per configuration and shape, of learners' programs too (``shared_programs``).
MAKERS = {
    name: functools.cache(getattr(learner_lib, name))
    for name in ("make_update", "make_token_logprobs", "make_token_values", "make_value_update")
}
two_phase_for = functools.cache(make_two_phase_update)


def update_for(loss, optimizer, micro_batches, runs=0, **values):
    """The update that a learner makes from these."""
    value = values.get("value")
    return MAKERS["make_update"](loss, optimizer, micro_batches, runs, False, value=value)


def advantages_of(sizes):
    """Random, the same for the same sizes."""
    rng = np.random.default_rng(2)
    return [rng.standard_normal(size) for size in sizes]


def laid_out(groups, config=TWO):
    """The prompts of the groups in rows of their own."""
    firsts = [group.trajectories[0] for group in groups]
    return pack_prompts([t.tokens[: t.prompt_length] for t in firsts], config)


def fresh(model):
    """A copy that may be donated; through the host, since a copy is a program for each shape."""
    return jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), model)


def first_step(
    model,
    batch,
    loss=LOSS,
    micro_batches=1,
    prox="sampler",
    optimizer=OPTIMIZER,
    *,
    runs=0,
    prompts=None,
):
    """(gradient, metrics, state) of one update, in two phases where there are prompts.

    prox and ref are functions of the batch, aligned with any packing.
    """
    prox = batch.logprobs + 0.1 * np.cos(batch.targets) if prox == "sampler" else prox
    state = init_state(fresh(model), optimizer)
    ref = batch.logprobs - 0.2 * np.sin(batch.targets)
    if prompts is None:
        state, metrics = update_for(loss, optimizer, micro_batches, runs)(state, batch, prox, ref)
    else:
        prefill, update = two_phase_for(loss, optimizer, micro_batches, runs)
        state, metrics = update(state, prefill(state.model, prompts), batch, prox, ref)
    return optax.tree.get(state.opt_state, "mu"), metrics, state


def assert_left_alone(update, state, *args):
    """Asserts that an update without a target finds that, and gives every bit of the state back."""
    before = [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]
    state, metrics = update(state, *args)
    metrics = jax.device_get(metrics)
    assert metrics["train/no_signal"] == 1.0 and metrics["train/finite"] == 1.0
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(state)] == before
    return state


def without_targets(batch):
    """The batch as if all its groups were left out."""
    return dataclasses.replace(batch, mask=np.zeros(batch.mask.shape, np.float32))


def shuffled_rows(batch):
    """Rows in an order that gives every device and micro-batch some."""
    order = np.random.default_rng(4).permutation(len(batch.tokens))
    return jax.tree.map(lambda x: x[order], batch)


def assert_close(a, b, rtol=1e-5, skip=(), floor=1e-6):
    """Leaves agree relative to the largest number of each leaf, or to ``floor`` where that is
    larger.
    """
    flat = zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b), strict=True
    )
    for (path, x), (_, y) in flat:
        name = jax.tree_util.keystr(path)
        if not any(word in name for word in skip):
            x = np.asarray(x, np.float64)
            y = np.asarray(y, np.float64)
            np.testing.assert_allclose(
                x, y, rtol=rtol, atol=rtol * max(np.abs(y).max(), floor), err_msg=name
            )
