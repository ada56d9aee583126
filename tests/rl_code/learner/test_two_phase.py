"""The update in two phases equals the one in one phase, whatever the loss, the cut and the
devices.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from models.sharding import MeshConfig, make_mesh, parameter_shardings
from rl_code.learner.batching import PackConfig, pack
from rl_code.learner.two_phase import make_two_phase_logprobs, make_two_phase_update, residual_bytes
from rl_code.learner.two_phase_batching import pack_completions, pack_prompts
from rl_code.learner.update import init_state, make_token_logprobs
from rl_code.metrics.values import CompilationCounter
from tests.rl_code.learner.steps import (
    LOSS,
    ONE,
    OPTIMIZER,
    SIZES,
    TWO,
    advantages_of,
    assert_close,
    assert_left_alone,
    first_step,
    fresh,
    laid_out,
    loss_of,
    without_targets,
)


def layouts(build):
    """(Batch of one phase, Prompts, Batch of completions) of the same multi-turn groups."""
    groups = build.turns(SIZES, seed=1)
    advantages = advantages_of(SIZES)
    prompts = laid_out(groups)
    completions, _ = pack_completions(groups, advantages, prompts, TWO, version=0)
    return pack(groups, advantages, ONE, version=0)[0], prompts, completions


def assert_equal_steps(one, two):
    """Gradients and metrics agree; the second is of an update in two phases."""
    assert_close(one[0], two[0])
    metrics = dict(two[1])
    assert metrics.pop("train/residual_mib") > 0
    assert_close(one[1], metrics)


@pytest.mark.parametrize(
    "changes",
    [
        dict(loss="ppo", aggregation="token", correction="none", kl_estimator="k1"),
        dict(
            loss="cispo",
            aggregation="constant",
            correction="masked_sequence",
            kl_estimator="k2",
            temperature=1.0,
        ),
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
@pytest.mark.long
def test_every_loss_and_aggregation_and_each_kind_of_correction(build, changes):
    """None and of trajectories; one of their geometric means is in LOSS, with the third loss and the
    third aggregation.
    """
    changes = dict(changes)
    loss = loss_of(changes.pop("loss"), **changes)
    batch, prompts, completions = layouts(build)
    model = build.toy()
    prox = None if loss.correction == "none" else "sampler"
    one = first_step(model, batch, loss, prox=prox)
    assert_equal_steps(one, first_step(model, completions, loss, prox=prox, prompts=prompts))


@pytest.mark.long
def test_neither_micro_batches_nor_devices_change_anything(build):
    """Each of four devices has one row of each of two micro-batches."""
    batch, prompts, completions = layouts(build)
    whole = first_step(build.toy(), batch)
    mesh = make_mesh(MeshConfig(4, 1))
    with jax.set_mesh(mesh):
        model = jax.device_put(fresh(build.toy()), NamedSharding(mesh, PartitionSpec()))
        rows = NamedSharding(mesh, PartitionSpec("data"))
        prompts, completions = jax.device_put((prompts, completions), rows)
        assert_equal_steps(whole, first_step(model, completions, micro_batches=2, prompts=prompts))


def test_groups_that_are_left_out_and_rows_without_completions_change_nothing(build):
    groups = build.turns(SIZES, seed=1)
    prompts = pack_prompts(
        [group.trajectories[0].tokens[: group.trajectories[0].prompt_length] for group in groups],
        TWO,
    )
    # of rows 2 to 4
    advantages = [np.ones(size) * (2 <= number < 5) for number, size in enumerate(SIZES)]
    one, two = (dataclasses.replace(config, drop_uninformative=True) for config in (ONE, TWO))
    batch, _ = pack(groups, advantages, one, version=0)
    completions, metrics = pack_completions(groups, advantages, prompts, two, version=0)
    assert metrics["pack/rows"] == 3 and metrics["pack/uninformative"] == sum(SIZES) - sum(
        SIZES[2:5]
    )
    # of two rows each: one has two with completions, one has one, and the others have none
    step = first_step(build.toy(), completions, micro_batches=4, prompts=prompts)
    assert_equal_steps(first_step(build.toy(), batch), step)


@pytest.mark.long
def test_a_rematerialised_transformer_on_a_mesh_steps_as_without_on_one_device_and_compiles_once(
    build,
):
    batch, prompts, completions = layouts(build)
    alone = first_step(build.model(), batch)
    mesh = make_mesh(MeshConfig(2, 2))
    model = fresh(build.model(remat=True))
    prefill, update = make_two_phase_update(LOSS, OPTIMIZER, 2)
    with jax.set_mesh(mesh), CompilationCounter() as compilations:
        state = init_state(jax.device_put(model, parameter_shardings(model, mesh)), OPTIMIZER)
        rows = NamedSharding(mesh, PartitionSpec("data"))
        counts = []
        steps = []
        ref = completions.logprobs - 0.2 * np.sin(completions.targets)
        prox = completions.logprobs + 0.1 * np.cos(completions.targets)
        prompts, completions, prox, ref = jax.device_put((prompts, completions, prox, ref), rows)
        for _ in range(3):
            state, metrics = update(state, prefill(state.model, prompts), completions, prox, ref)
            counts.append(compilations.count)
            steps.append(jax.device_get((optax.tree.get(state.opt_state, "mu"), metrics)))
        idle = without_targets(completions)
        idle = dataclasses.replace(idle, mask=jax.device_put(idle.mask, rows))
        assert_left_alone(update, state, prefill(state.model, prompts), idle, prox, ref)
        assert counts[0] == counts[1] == counts[2] == compilations.count
        assert_equal_steps(alone, steps[0])


@pytest.mark.long
def test_log_probabilities_are_those_of_one_phase(build):
    batch, prompts, completions = layouts(build)
    model = build.model()
    one = np.asarray(make_token_logprobs(0.8, 1)(model, batch))[batch.mask > 0]
    two = np.asarray(make_two_phase_logprobs(0.8, 4)(model, prompts, completions))[
        completions.mask > 0
    ]
    orders = [np.argsort(x.trajectories[x.mask > 0], kind="stable") for x in (batch, completions)]
    np.testing.assert_allclose(one[orders[0]], two[orders[1]], rtol=1e-5)


def test_rematerialisation_keeps_less(build):
    _, prompts, _ = layouts(build)
    prefill, _ = make_two_phase_update(LOSS, OPTIMIZER, 1)
    kept = [
        residual_bytes(jax.eval_shape(prefill, build.model(remat=remat), prompts))
        for remat in (False, True)
    ]
    assert kept[1] < kept[0] / 2


@pytest.mark.long
def test_a_prompt_of_one_token_leaves_nothing_to_prefill(build):
    members = [
        build.trajectory([7, 3 + i, 5], [0, 1, 1], prompt_length=1, index=i) for i in range(2)
    ]
    groups = [build.group(members)]
    advantages = [np.array([1.0, -0.5])]
    two = PackConfig(1, 8, 4, 0, False, prompt_slots=4)
    prompts = pack_prompts([members[0].tokens[:1]], two)
    assert not np.any(prompts.segments)
    completions, _ = pack_completions(groups, advantages, prompts, two, version=0)
    np.testing.assert_array_equal(completions.tokens[0], [7, 3, 7, 4, 0, 0, 0, 0])
    np.testing.assert_array_equal(completions.sources[0], [0, 1, 2, 3])
    batch, _ = pack(groups, advantages, PackConfig(1, 8, 4, 0, False), version=0)
    assert_equal_steps(
        first_step(build.toy(), batch), first_step(build.toy(), completions, prompts=prompts)
    )


def test_what_does_not_fit_or_belong_is_named(build):
    members = [
        build.trajectory([1, 2, 3, 4 + i, 5], [0, 0, 0, 1, 1], prompt_length=3, index=i)
        for i in range(2)
    ]
    group = build.group(members)
    config = PackConfig(1, 6, 4, 0, False, prompt_slots=2)
    with pytest.raises(
        ValueError, match=r"prompt 1 of 2 tokens does not fit row 0, in which 2 of prompt_slots=2"
    ):
        pack_prompts([[1, 2, 3], [4, 5]], config)
    with pytest.raises(ValueError, match=r"prompt 0 of 0 tokens"):
        pack_prompts([[]], config)
    prompts = pack_prompts([[1, 2, 3]], config)
    values = [np.ones(2)]
    pack_completions([group], values, prompts, config, version=0)
    for name, found in (("slots", "4 slots"), ("targets", "4 targets"), ("runs", "3 runs")):
        with pytest.raises(
            ValueError, match=f"row 0 needs .*{found}.* for task 'task0'.*{name}=[23]"
        ):
            small = dataclasses.replace(config, **{name: 3 if name != "runs" else 2})
            pack_completions([group], values, prompts, small, version=0)
    with pytest.raises(
        ValueError, match="task 'task0': its prompt is not prompt 0 of those laid out"
    ):
        pack_completions([group], values, pack_prompts([[1, 9, 3]], config), config, version=0)
    with pytest.raises(ValueError, match="runs=1 must be 0 or at least 2"):
        dataclasses.replace(config, runs=1)
