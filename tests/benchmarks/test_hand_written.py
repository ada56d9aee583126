"""The step written by hand samples the engine's tokens and has the update's gradients."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from benchmarks import hand_written
from benchmarks import model as bench_model
from benchmarks.episodes import FixedEpisode, prompts
from models.families import PRESETS
from models.sharding import MeshConfig, make_mesh
from models.transformer import Transformer
from rl_code.learner.advantages import GRPO, group_advantages
from rl_code.learner.batching import PackConfig, pack
from rl_code.learner.objective import Denominators
from rl_code.learner.update import init_state, loss_share, make_update
from tests.models.small import VOCABULARY, small_config

COUNT, SAMPLES, PROMPT, COMPLETION = 2, 3, 12, 5
KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def model():
    """With biases that are not 0, as trained ones."""
    made = Transformer(small_config(qkv_bias=True, num_layers=2), nnx.Rngs(0))
    for bias in (made.layers.q_bias, made.layers.k_bias, made.layers.v_bias):
        bias[...] = 0.3 * jax.random.normal(jax.random.key(1), bias.shape)
    return made


@pytest.fixture(scope="module")
def groups(model):
    """What the engine samples."""
    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    engine = bench_model.engine_config(COUNT * SAMPLES, COUNT, PROMPT, COMPLETION, 1, "float32")
    scheduler = bench_model.make_scheduler(model.config, engine, mesh)
    with jax.set_mesh(mesh):
        found, _ = scheduler.rollout(
            model,
            prompts(COUNT, PROMPT, VOCABULARY, 0),
            lambda *a: FixedEpisode(*a, message=COMPLETION),
            group_size=SAMPLES,
            version=0,
            key=KEY,
        )
    scheduler.close()
    return found


@pytest.fixture(scope="module")
def samples(groups):
    """The same as arrays."""
    rows = [[t.contexts[0] for t in group.trajectories] for group in groups]
    return hand_written.Samples(
        np.stack([group.trajectories[0].tokens[:PROMPT] for group in groups]),
        np.stack([[context.tokens[PROMPT:] for context in row] for row in rows]),
        np.stack([[context.logprobs[PROMPT:] for context in row] for row in rows]),
    )


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Causal attention in several blocks, the last of them not full."""
    monkeypatch.setattr(hand_written, "_BLOCK", 5)


@pytest.mark.long
def test_it_samples_the_tokens_of_the_engine(model, groups, samples):
    numbers = np.array([group.trajectories[0].group for group in groups])
    key = jax.random.key_data(KEY)
    found = hand_written.rollout(model, samples.prompts, numbers, key, SAMPLES, COMPLETION)
    np.testing.assert_array_equal(found.completions, samples.completions)
    np.testing.assert_allclose(found.logprobs, samples.logprobs, atol=1e-5)


@pytest.mark.long
def test_its_gradients_are_those_of_the_update(model, groups, samples):
    credit = group_advantages(groups, GRPO())
    config = PackConfig(COUNT, 64, SAMPLES * COMPLETION, 0, False, align=4)
    batch, _ = pack(groups, credit, config, version=0)
    total = Denominators.of(batch.mask, batch.lengths, batch.segments)

    def theirs(model, batch):
        return loss_share(bench_model.LOSS, 0, total, model, (batch, None, None))[0]

    ours = jax.device_get(jax.jit(jax.grad(theirs))(model, batch))
    assert optax.tree.norm(ours) > 1e-2
    advantages = hand_written.advantages(samples.completions)
    np.testing.assert_allclose(advantages, credit, atol=1e-6)
    gradient = jax.jit(jax.grad(hand_written.loss), static_argnums=3)
    for share in (True, False):
        found = gradient(model, samples, advantages, share)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), found, ours
        )


@pytest.mark.long
def test_an_update_changes_the_model_as_the_projects_does(model, groups, samples):
    credit = group_advantages(groups, GRPO())
    config = PackConfig(COUNT, 64, SAMPLES * COMPLETION, 0, False)
    batch, _ = pack(groups, credit, config, version=0)
    ours = init_state(jax.tree.map(jax.numpy.copy, model), bench_model.OPTIMIZER)
    ours, _ = make_update(bench_model.LOSS, bench_model.OPTIMIZER, 1)(ours, batch)
    hand = hand_written.init_state(jax.tree.map(jax.numpy.copy, model))
    advantages = hand_written.advantages(samples.completions)
    hand, _ = hand_written.update(hand, samples, advantages, True)
    # a first step of AdamW has the size of the learning rate, 1e-5, wherever a gradient is not tiny
    moved = jax.tree.map(lambda x, y: x - y, hand.model, model)
    assert optax.tree.norm(moved) > 1e-4
    apart = optax.tree.norm(jax.tree.map(lambda x, y: x - y, hand.model, ours.model))
    assert apart < 0.02 * optax.tree.norm(moved)


def test_a_model_that_it_is_not_written_for_is_refused():
    with pytest.raises(ValueError, match="without experts"):
        hand_written.check(PRESETS["tiny_moe"])
