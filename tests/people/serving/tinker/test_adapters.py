"""Gradients and losses of adapters beside the learner's own and numbers by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.lora import new_adapters, trained, with_adapters, with_trained
from pallas_kernels.tokens import sequences
from people.serving.tinker import adapters
from people.serving.tinker.adapters import AdapterSettings
from people.serving.tinker.losses import LOSSES, Terms, token_losses
from people.serving.tinker.trainer import Work
from people.serving.tinker.wire import read_forward
from rl_code.learner.supervised_batching import SupervisedBatch
from rl_code.learner.update import supervised_loss
from tests.people.serving.tinker.api import base, datum, forward, make_trainer

SETTINGS = AdapterSettings(rank=2, seed=3, mlp=True, attention=True)


def moved(seed: int = 0, settings: AdapterSettings = SETTINGS):
    """An adapter that computes something."""
    state = adapters.begin(base(), settings)
    keys = iter(jax.random.split(jax.random.key(seed), 100))
    return dataclasses.replace(
        state,
        part=jax.tree.map(lambda x: x + 0.03 * jax.random.normal(next(keys), x.shape), state.part),
    )


def works(trainer, *given):
    """Computes (state, body) of each request in one batch."""
    found = []
    for state, body in given:
        asked = read_forward(body)
        work = Work(asked, state.part, lambda *_: None, list(range(len(asked.data))), state=state)
        found.append(work)
    rows = [(work, index) for work in found for index in list(work.left)]
    shape = trainer._shape(*rows[0])
    trainer.run_batch([*rows, *[None] * (shape[1] - len(rows))], shape)
    return found


@pytest.fixture
def trainer(tmp_path):
    found = make_trainer(tmp_path)
    yield found
    found.history.close()


def test_cross_entropy_has_the_learners_own_gradient(trainer):
    state, tokens = moved(), [5, 9, 2, 7, 7, 30]
    weights = [0.0, 1.0, 1.0, 0.0, 1.0]
    (work,) = works(trainer, (state, forward("m", 1, [datum(tokens, weights)])))
    lora = SETTINGS.lora(experts=False)
    model = with_adapters(base(), lora, state.part)
    batch = SupervisedBatch(
        tokens=jnp.asarray([tokens]),
        positions=jnp.arange(6)[None],
        where=sequences(jnp.asarray([6]), 6),
        mask=jnp.asarray([[0.0, *weights]]),
        align=0,
    )

    def loss(part):
        return 3.0 * supervised_loss(with_trained(model, part), batch)[0]

    expected, gradient = jax.jit(jax.value_and_grad(loss))(trained(model))
    np.testing.assert_allclose(work.losses[0], expected, rtol=1e-5)
    pairs = zip(jax.tree.leaves(work.gradient), jax.tree.leaves(gradient), strict=True)
    for one, other in pairs:
        assert np.linalg.norm(one - other) < 1e-3 * np.linalg.norm(other)


def test_the_rows_of_others_change_no_bit(trainer):
    one, other = moved(1), moved(2, dataclasses.replace(SETTINGS, rank=4, mlp=False))
    body = forward("m", 1, [datum([5, 9, 2, 7])])
    beside = forward("n", 1, [datum([1, 2, 3, 4, 5]), datum([8, 8, 8])])
    (alone,) = works(trainer, (one, body))
    together, _ = works(trainer, (one, body), (other, beside))
    assert alone.losses == together.losses
    for x, y in zip(*(jax.tree.leaves(w.gradient) for w in (alone, together)), strict=True):
        assert np.array_equal(x, y)


def test_what_is_not_finite_stays_in_its_adapter(trainer):
    good, bad = moved(1), moved(2)
    bad.part = jax.tree.map(lambda x: x * jnp.nan, bad.part)
    body = forward("m", 1, [datum([5, 9, 2, 7])])
    found = works(trainer, (good, body), (bad, body))
    assert np.isfinite(found[0].losses[0]) and not np.isfinite(found[1].losses[0])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found[0].gradient))


# p and q by hand: r = 2, 1/2, 1
P = np.log([0.5, 0.2, 0.25]).astype(np.float32)
Q = np.log([0.25, 0.4, 0.25]).astype(np.float32)
A = np.asarray([1.0, -1.0, 2.0], np.float32)


@pytest.mark.parametrize(
    ("loss", "values", "slopes"),
    [
        # -w p with w = 1, and its slope in p
        ("cross_entropy", -P, [-1.0, -1.0, -1.0]),
        # -r A, and the slope -r A
        ("importance_sampling", [-2.0, 0.5, -2.0], [-2.0, 0.5, -2.0]),
        # -min(r A, clip(r) A): -1.2, 0.8, -2; no slope where the clip took hold
        ("ppo", [-1.2, 0.8, -2.0], [0.0, 0.0, -2.0]),
        # -clip(r) A p, and the slope -clip(r) A
        ("cispo", [-1.2 * P[0], 0.8 * P[1], -2.0 * P[2]], [-1.2, 0.8, -2.0]),
        # -(p A - 0.025 (p - q)^2), and the slope -A + 0.05 (p - q)
        (
            "dro",
            -(P * A - 0.025 * np.asarray([np.log(2.0), -np.log(2.0), 0.0]) ** 2),
            [-1.0 + 0.05 * np.log(2.0), 1.0 - 0.05 * np.log(2.0), -2.0],
        ),
    ],
)
def test_losses_are_those_computed_by_hand(loss, values, slopes):
    def shaped(x):
        return jnp.asarray(x, jnp.float32).reshape(1, 3, 1)

    terms = Terms(
        kinds=jnp.asarray([list(LOSSES).index(loss)]),
        targets=jnp.zeros((1, 3, 1), jnp.int32),
        weights=shaped([1, 1, 1]),
        logprobs=shaped(Q),
        advantages=shaped(A),
        low=shaped([0.8] * 3),
        high=shaped([1.2] * 3),
        beta=jnp.asarray([0.05]),
    )
    found = token_losses(shaped(P), terms)[0, :, 0]
    slope = jax.grad(lambda p: jnp.sum(token_losses(p, terms)))(shaped(P))[0, :, 0]
    np.testing.assert_allclose(found, values, rtol=1e-5)
    np.testing.assert_allclose(slope, slopes, rtol=1e-5, atol=1e-6)


def test_a_step_is_adamw_by_hand():
    state = moved()
    gradient = jax.tree.map(lambda x: jnp.full(x.shape, -4.0), state.part)
    params = dict(
        learning_rate=0.1, beta1=0.9, beta2=0.95, eps=0.0, weight_decay=0.5, grad_clip_norm=0.0
    )
    after, _ = adapters.step(dataclasses.replace(state, gradient=gradient), params)
    # the first step of Adam is the sign of the gradient; decay takes 0.1 * 0.5 of each weight
    for old, new in zip(jax.tree.leaves(state.part), jax.tree.leaves(after.part), strict=True):
        np.testing.assert_allclose(new, 0.95 * old + 0.1, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="without a gradient"):
        adapters.step(after, params)


def test_a_file_gives_the_same_state_back():
    state = moved()
    data = adapters.dump(state, moments=True)
    again = adapters.load(base(), SETTINGS, data, steps=5)
    assert adapters.digest(again) == adapters.digest(state)
    assert again.steps == 5


def test_adapters_of_any_rank_are_padded_to_the_same_product():
    state = moved(1, dataclasses.replace(SETTINGS, mlp=False))
    wide = new_adapters(base(), AdapterSettings(4, 0, True, True).lora(False), nnx.Rngs(0))
    found = adapters.padded(state.part, wide)
    assert jax.tree.structure(found["layers"].q_a[...].shape) is not None
    assert found["layers"].scale == state.part["layers"].scale
    y = jnp.ones((1, 3, 32))
    layer = [jax.tree.map(lambda x: x[0], part["layers"]) for part in (found, state.part)]
    one, other = (each.added("q", y, 1) for each in layer)
    np.testing.assert_allclose(one, other, rtol=1e-5)
