"""A value function beside the policy: its loss by hand, its gradient, and the updates that it makes
and leaves alone.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.sharding import MeshConfig, make_mesh, parameter_shardings
from models.transformer import abstract_model
from rl_code.checkpoint import arrays, checkpoint
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.learner.batching import PackConfig, pack
from rl_code.learner.config import LearnerConfig
from rl_code.learner.learner import Learner
from rl_code.learner.logprobs import target_hidden
from rl_code.learner.objective import LossConfig
from rl_code.learner.update import abstract_state, init_state
from rl_code.learner.value_config import ValueConfig
from rl_code.learner.value_function import (
    carried,
    init_value,
    scaled_gradient,
    value_loss,
)
from rl_code.types import Reward
from tests.rl_code.learner.steps import (
    MAKERS,
    OPTIMIZER,
    advantages_of,
    assert_close,
    fresh,
    update_for,
)

SIZES = (3, 5, 2, 4)
PACK = PackConfig(rows=8, slots=80, targets=64, max_staleness=0, drop_uninformative=False)
# with b1 = 0 the first moment is the gradient itself
SHARED = ValueConfig(optimizer=OPTIMIZER, coef=0.5, clip=0.4)
SEPARATE = dataclasses.replace(SHARED, backbone="separate")
PRETRAINING = dict(pretrain_steps=2, pretrain_epochs=3)
PRETRAINED = dataclasses.replace(SHARED, **PRETRAINING)
RATE = dataclasses.replace(OPTIMIZER, learning_rate=1e-3)
LOSS = LossConfig().for_staleness(0)
pytestmark = pytest.mark.usefixtures("shared_programs")


def values_for(micro_batches, runs=0):
    return MAKERS["make_token_values"](micro_batches, runs, False)


def value_update_for(config, micro_batches, runs=0):
    return MAKERS["make_value_update"](config, micro_batches, runs, False)


@pytest.fixture(scope="module")
def model(build):
    return build.model()


def packed(build, config=PACK):
    """A batch with values and returns that any packing has alike."""
    batch, _ = pack(build.groups(SIZES, seed=1), advantages_of(SIZES), config, version=0)
    return targeted(batch)


def targeted(batch):
    """With old values and returns that depend on the target alone."""
    real = batch.mask > 0
    values = np.where(real, 0.3 * np.sin(batch.targets), 0.0).astype(np.float32)
    returns = np.where(real, np.cos(batch.targets), 0.0).astype(np.float32)
    return dataclasses.replace(batch, values=values, returns=returns)


def state_of(model, config, seed=0):
    """The state before the first update, with a head that is not zero."""
    state = init_state(fresh(model), OPTIMIZER, config)
    rng = np.random.default_rng(seed)
    head = jax.tree.map(
        lambda x: jax.device_put(0.3 * rng.standard_normal(x.shape).astype(np.float32), x.sharding),
        state.value.critic.head,
    )
    critic = dataclasses.replace(state.value.critic, head=head)
    return dataclasses.replace(state, value=dataclasses.replace(state.value, critic=critic))


def mu(opt_state):
    """The first moment, which is the gradient of the update before."""
    return optax.tree.get(opt_state, "mu")


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


# --- By hand --------------------------------------------------------------------------------------


# values 1, old 0: V - G = 1 - G; brought to within 0.5: 0.5 - G
@pytest.mark.parametrize(
    "returns, clip, loss, gradient",
    [
        (0.0, None, 0.5, 1.0),
        # 1/2 at 1 is more than 1/8 at 0.5
        (0.0, 0.5, 0.5, 1.0),
        # 1/2 * 1.5^2 at 0.5 is more than 1/2 at 1: no gradient
        (2.0, 0.5, 1.125, 0.0),
        (2.0, None, 0.5, -1.0),
        (2.0, 1.0, 0.5, -1.0),
    ],
)
def test_the_loss_is_half_the_square_and_may_be_clipped_around_the_old_value(
    returns, clip, loss, gradient
):
    one = np.ones((1, 1), np.float32)

    def of(value):
        padded = jnp.concatenate([value, jnp.full((1, 1), jnp.nan)], axis=1)
        others = (x * one for x in (0.0, returns))
        old, wanted = (jnp.concatenate([x, jnp.nan * one], axis=1) for x in others)
        mask = jnp.array([[1.0, 0.0]])
        return value_loss(padded, old, wanted, mask, jnp.float32(2.0), clip)

    (found, means), grads = jax.jit(jax.value_and_grad(of, has_aux=True))(one)
    assert found == loss / 2 == means["value/loss"]
    assert grads.item() == gradient / 2
    assert means["value/clip_fraction"] == (gradient == 0.0) / 2


def test_a_scaled_gradient_leaves_the_values_alone():
    x = np.array([0.1, -3.0, 1e-8], jnp.bfloat16)
    coefs = (0.0, 0.3, 1.0)

    @jax.jit
    def of(x, one):
        found = [jax.vjp(lambda y, coef=coef: scaled_gradient(y, coef), x) for coef in coefs]
        return [(out, back(one)[0]) for out, back in found]

    for coef, (out, back) in zip(coefs, of(x, np.ones_like(x)), strict=True):
        assert bits(out) == bits(x)
        np.testing.assert_allclose(np.asarray(back, float), coef, rtol=1e-2)


# --- Updates --------------------------------------------------------------------------------------


def naive_loss(model, head, batch, clip):
    """The mean over tokens of the clipped value loss."""
    hidden, _, _ = target_hidden(model, batch, 0, None, False)
    values = jnp.einsum("RMD,D->RM", hidden, head.weight[...]) + head.bias[0]
    near = batch.values + jnp.clip(values - batch.values, -clip, clip)
    loss = jnp.maximum(jnp.square(values - batch.returns), jnp.square(near - batch.returns))
    return 0.5 * jnp.sum(loss * batch.mask) / jnp.sum(batch.mask)


naive = jax.jit(jax.value_and_grad(naive_loss, argnums=(0, 1)), static_argnums=3)


@pytest.mark.long
def test_a_shared_backbone_gets_the_weighted_gradient_and_the_head_its_own(build, model):
    batch = packed(build)
    plain, _ = update_for(LOSS, OPTIMIZER, 1)(
        init_state(fresh(model), OPTIMIZER), dataclasses.replace(batch, values=None, returns=None)
    )
    state = state_of(model, SHARED)
    head = fresh(state.value.critic.head)
    loss, grads = naive(model, head, batch, SHARED.clip)
    state, metrics = update_for(LOSS, OPTIMIZER, 1, value=SHARED)(state, batch)
    assert_close(mu(state.value.opt_state).head, grads[1])
    wanted = jax.tree.map(lambda x, y: x + SHARED.coef * y, mu(plain.opt_state), grads[0])
    assert_close(mu(state.opt_state), wanted, rtol=1e-4)
    assert metrics["value/loss"] == pytest.approx(float(loss), rel=1e-5)
    policy = metrics["train/policy_loss"]
    assert metrics["train/loss"] == pytest.approx(float(policy + SHARED.coef * loss), rel=1e-4)
    assert state.value.updates == 1 and 0 < metrics["value/clip_fraction"] < 1


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("config", [PRETRAINED, SEPARATE])
def test_an_update_of_values_alone_leaves_every_bit_of_the_policy(build, model, config):
    batch = packed(build)
    state = state_of(model, config)
    before = bits((state.model, state.opt_state, state.step))
    head = fresh(state.value.critic.head)
    loss, grads = naive(model, head, batch, config.clip)
    state, metrics = value_update_for(config, 2)(state, batch)
    assert bits((state.model, state.opt_state, state.step)) == before
    assert metrics["value/loss"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["value/finite"] == 1.0
    found = mu(state.value.opt_state)
    assert_close(found.head, grads[1])
    if config.backbone == "separate":
        assert_close(found.backbone, grads[0])
        assert bits(state.value.critic.backbone) != bits(model)


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("config", [PRETRAINED, SEPARATE])
def test_what_is_not_finite_changes_no_bit(build, model, config):
    batch = packed(build)
    batch = dataclasses.replace(batch, returns=np.where(batch.mask > 0, np.inf, 0.0))
    state = state_of(model, config)
    before = bits((state.model, state.value.critic, state.opt_state, state.value.opt_state))
    if config.backbone == "shared":  # by the learner's program below
        state, metrics = update_for(LOSS, RATE, 2, value=config)(state, batch)
        assert metrics["train/finite"] == 0.0
    else:
        state, metrics = value_update_for(config, 2)(state, batch)
        assert metrics["value/finite"] == 0.0
    after = bits((state.model, state.value.critic, state.opt_state, state.value.opt_state))
    assert after == before


# --- States ---------------------------------------------------------------------------------------


def test_a_separate_backbone_is_a_copy_without_the_matrix_of_logits(build):
    untied = build.model(tied_embeddings=False)
    value = init_value(untied, SEPARATE)
    names = set(arrays.describe(value.critic.backbone))
    assert names == set(arrays.describe(untied)) - {"unembed.value"}
    own = {id(x) for x in jax.tree.leaves(untied)}
    assert not own & {id(x) for x in jax.tree.leaves(value)}
    assert init_value(untied, SHARED).critic.backbone is None
    # none of the policy's parameters has moments twice
    moments = arrays.describe(mu(init_value(untied, SHARED).opt_state))
    assert len(moments) == 2


@pytest.mark.parametrize("config", [SHARED, SEPARATE])
def test_an_abstract_state_is_the_layout_of_the_state(build, config):
    mesh = make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        model = build.model()
        placed = jax.device_put(fresh(model), parameter_shardings(model, mesh))
        state = init_state(placed, OPTIMIZER, config)
        found = abstract_state(abstract_model(model.config, mesh), OPTIMIZER, config)
    assert arrays.describe(found) == arrays.describe(state)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True)
    assert all(one.sharding.is_equivalent_to(two.sharding, two.ndim) for one, two in pairs)


def test_a_state_without_values_has_the_arrays_that_it_had(model):
    state = init_state(fresh(model), OPTIMIZER)
    assert state.value is None
    assert not any(name.startswith("value") for name in arrays.describe(state))


def test_a_value_function_is_carried_over_where_it_fits(model):
    value = init_value(model, SEPARATE)
    assert carried(value, model, dataclasses.replace(SEPARATE, lam=0.5)) is value
    assert carried(value, model, None) is None
    other = carried(value, model, SHARED)
    assert other.critic.backbone is None and other.updates == 0
    assert carried(None, model, SHARED).updates == 0


# --- The learner ----------------------------------------------------------------------------------


def learner_of(model, value, **train):
    config = LearnerConfig(
        RATE,
        advantage=Named("gae", {"lam": 0.95}),
        value=value,
        pack=PACK,
        micro_batches=2,
        **train,
    )
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return config, Learner(config, here, model)


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("config", [SHARED, SEPARATE])
def test_steps_pretrain_the_values_and_then_train_both(build, model, config, tmp_path):
    value = dataclasses.replace(config, **PRETRAINING)
    train, learn = learner_of(model, value)
    groups = build.groups(SIZES, seed=1)
    state = init_state(fresh(model), train.optimizer, value)
    before = bits(state.model)
    errors = []
    for step in range(2):
        state, metrics = learn(state, groups, 0)
        errors.append(metrics["value/error"])
        assert metrics["train/finite"] and metrics["train/no_signal"] == 0.0
        assert bits(state.model) == before and state.step == 0
        assert state.value.updates == 3 * (step + 1)
    assert errors[1] < errors[0]
    with Checkpoints(tmp_path, {}, keep=1) as checkpoints:
        checkpoints.save(2, state, {})
    restored = checkpoint.load(tmp_path, state).state
    state, metrics = learn(state, groups, 0)
    assert bits(state.model) != before and state.step == 1 and state.value.updates == 7
    for name in ("policy/entropy", "value/loss", "value/grad_norm", "value/explained_variance"):
        assert np.isfinite(metrics[name]), name
    resumed, again = learn(restored, groups, 0)
    assert bits(resumed) == bits(state)
    assert again["batch/crc32"] == metrics["batch/crc32"]


@pytest.mark.long
def test_with_a_separate_backbone_the_policy_learns_from_groups_as_without_values(build, model):
    groups = build.groups(SIZES, seed=1)
    states = []
    for value in (None, SEPARATE):
        config = LearnerConfig(OPTIMIZER, value=value, pack=PACK, micro_batches=2)
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        learn = Learner(config, here, model)
        state, _ = learn(init_state(fresh(model), OPTIMIZER, value), groups, 0)
        states.append(state)
    assert bits(states[0].model) == bits(states[1].model)


def test_equal_rewards_are_a_signal_for_values(build, model):
    groups = [
        build.group([dataclasses.replace(t, reward=Reward(1.0, {})) for t in group.trajectories])
        for group in build.groups((2, 1), seed=4)
    ]
    train, learn = learner_of(model, PRETRAINED)
    state = init_state(fresh(model), train.optimizer, PRETRAINED)
    updates = jax.device_put(np.int32(PRETRAINED.pretrain_updates), state.value.updates.sharding)
    state = dataclasses.replace(state, value=dataclasses.replace(state.value, updates=updates))
    before = bits(state.model)
    state, metrics = learn(state, groups, 0)
    assert metrics["train/no_signal"] == 0.0 and bits(state.model) != before


def test_what_does_not_go_with_values_is_refused():
    with pytest.raises(ConfigError, match=r"'gae' makes advantages of values, and .*value = None"):
        LearnerConfig(OPTIMIZER, advantage=Named("gae"))
    with pytest.raises(ConfigError, match=r"drop_uninformative = True drops groups .* False"):
        LearnerConfig(OPTIMIZER, value=SHARED)
    pack = dataclasses.replace(PACK, prompt_slots=8)
    with pytest.raises(ConfigError, match=r"prompt_slots = 8 means an update in two phases"):
        LearnerConfig(OPTIMIZER, value=SHARED, pack=pack)
    assert LearnerConfig(OPTIMIZER, advantage=Named("gae"), value=SHARED, pack=PACK).value == SHARED
