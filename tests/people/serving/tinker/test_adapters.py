"""Gradients and losses of adapters beside the learner's own and numbers by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.adapted import with_adapters
from models.lora import trained, with_trained
from models.sharding import use_mesh
from pallas_kernels.tokens import sequences
from people.serving.tinker import adapters
from people.serving.tinker.adapters import AdapterSettings
from people.serving.tinker.losses import LOSSES, Terms, token_losses
from people.serving.tinker.trainer import Work
from people.serving.tinker.wire import read_forward
from rl_code.learner.supervised_batching import SupervisedBatch
from rl_code.learner.update import supervised_loss
from tests.people.serving.tinker.api import base, datum, forward, make_trainer, mesh, programs

SETTINGS = AdapterSettings(rank=2, seed=3, mlp=True, attention=True)


@pytest.fixture(autouse=True)
def on_mesh():
    """The mesh of the trainer's thread, so that programs are shared with the tests of the API."""
    with use_mesh(mesh()):
        yield


def moved(seed: int = 0, settings: AdapterSettings = SETTINGS):
    """An adapter that computes something."""
    state = adapters.begin(base(), settings)
    rng = np.random.default_rng(seed)

    def more(x):
        return jnp.asarray(np.asarray(x) + rng.normal(0, 0.03, x.shape).astype(np.float32))

    return dataclasses.replace(state, part=jax.tree.map(more, state.part))


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

    def loss(part):
        batch = SupervisedBatch(
            tokens=jnp.asarray([tokens]),
            positions=jnp.arange(6)[None],
            where=sequences(jnp.asarray([6]), 6),
            mask=jnp.asarray([[0.0, *weights]]),
            align=0,
        )
        return 3.0 * supervised_loss(with_trained(model, part), batch)[0]

    expected, gradient = jax.jit(jax.value_and_grad(loss))(trained(model))
    np.testing.assert_allclose(work.losses[0], expected, rtol=1e-5)
    leaves = (jax.tree.leaves(jax.device_get(x)) for x in (work.gradient, gradient))
    for one, other in zip(*leaves, strict=True):
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
    bad.part = jax.tree.map(lambda x: jnp.asarray(np.full(x.shape, np.nan, x.dtype)), bad.part)
    body = forward("m", 1, [datum([5, 9, 2, 7])])
    found = works(trainer, (good, body), (bad, body))
    assert np.isfinite(found[0].losses[0]) and not np.isfinite(found[1].losses[0])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found[0].gradient))


@jax.jit
def losses_and_slopes(p, terms: Terms):
    slopes, losses = jax.grad(
        lambda p: (jnp.sum(found := token_losses(p, terms)), found), has_aux=True
    )(p)
    return losses[0, :, 0], slopes[0, :, 0]


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
        return jnp.asarray(np.reshape(x, (1, 3, 1)).astype(np.float32))

    terms = Terms(
        kinds=jnp.asarray(np.asarray([list(LOSSES).index(loss)], np.int32)),
        targets=jnp.asarray(np.zeros((1, 3, 1), np.int32)),
        weights=shaped([1, 1, 1]),
        logprobs=shaped(Q),
        advantages=shaped(A),
        low=shaped([0.8] * 3),
        high=shaped([1.2] * 3),
        beta=jnp.asarray(np.asarray([0.05], np.float32)),
    )
    found, slope = losses_and_slopes(shaped(P), terms)
    np.testing.assert_allclose(found, values, rtol=1e-5)
    np.testing.assert_allclose(slope, slopes, rtol=1e-5, atol=1e-6)


def test_a_step_is_adamw_by_hand():
    state = moved()
    gradient = jax.tree.map(lambda x: jnp.asarray(np.full(x.shape, -4.0, np.float32)), state.part)
    params = dict(
        learning_rate=0.1, beta1=0.9, beta2=0.95, eps=0.0, weight_decay=0.5, grad_clip_norm=0.0
    )
    after, _ = adapters.step(dataclasses.replace(state, gradient=gradient), params)
    # the first step of Adam is the sign of the gradient; decay takes 0.1 * 0.5 of each weight
    leaves = (jax.tree.leaves(jax.device_get(each.part)) for each in (state, after))
    for old, new in zip(*leaves, strict=True):
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
    found = adapters.padded(state.part, programs().nothing)
    assert jax.tree.structure(found["layers"].q_a[...].shape) is not None
    assert found["layers"].scale == state.part["layers"].scale

    @jax.jit
    def added(layers):
        layer = jax.tree.map(lambda x: x[0], layers)
        return layer.added("q", jnp.ones((1, 3, 32)), 1)

    one, other = (added(part["layers"]) for part in (found, state.part))
    np.testing.assert_allclose(one, other, rtol=1e-5)
