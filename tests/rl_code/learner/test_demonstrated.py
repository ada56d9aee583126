"""A demonstration in a group: its weights on numbers worked out by hand, and its way to the loss."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_code.learner.batching import PackConfig, pack
from rl_code.learner.objective import Denominators, LossConfig, policy_loss, policy_metrics
from rl_code.store import serialization
from tests.rl_code.learner.conftest import make_group, make_trajectory

# Two tokens of a trajectory of the policy's own, and two of a demonstration; and a row of padding,
# with which arrays have the shapes, and calls the programs, of test_losses.py.
P = np.array([[0.5, 0.25, 0.1, 0.4], [0.5, 0.5, 0.5, 0.5]])
SHOWN = np.array([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
ADVANTAGES = np.array([[-0.75, -0.75, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
MASK = np.array([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
LENGTHS = np.full((2, 4), 2.0)


LOGP = np.log(P).astype(np.float32)


def run(logp=None, shown=SHOWN, ref=None, **changes):
    """(loss, metrics) of the four tokens. The sampler had the trainer's probabilities, and the
    demonstrator was sure.
    """
    loss, terms = policy_loss(
        LossConfig(**{"correction": "none"} | changes),
        SimpleNamespace(
            logprobs=jnp.asarray(np.where(SHOWN > 0, 0.0, np.log(P))),
            advantages=jnp.asarray(ADVANTAGES),
            mask=jnp.asarray(MASK),
            trajectories=jnp.array([[0, 0, 1, 1], [2, 2, 2, 2]]),
            lengths=jnp.asarray(LENGTHS),
            staleness=jnp.asarray(np.zeros((2, 4), np.int32)),
            demonstrated=None if shown is None else jnp.asarray(shown),
        ),
        Denominators.of(MASK, LENGTHS),
        logp=jnp.asarray(LOGP) if logp is None else logp,
        entropy=jnp.asarray(np.ones((2, 4), np.float32)),
        prox=jnp.asarray(LOGP),
        ref=ref,
    )
    return loss, policy_metrics(terms)


def gradient(**changes):
    return np.asarray(jax.grad(lambda logp: run(logp, **changes)[0])(jnp.asarray(LOGP)))[0]


@pytest.mark.parametrize(
    ("weight", "values", "slopes"),
    [
        # f(pi), and f'(pi) pi
        ("importance", [0.1, 0.4], [0.1, 0.4]),
        ("shaped", [0.1 / 0.2, 0.4 / 0.5], [0.1 * 0.1 / 0.2**2, 0.1 * 0.4 / 0.5**2]),
        ("imitated", [math.log(0.1), math.log(0.4)], [1.0, 1.0]),
    ],
)
@pytest.mark.parametrize("correction", ["none", "decoupled", "masked_sequence"])
def test_weights_equal_hand_computed_numbers(weight, values, slopes, correction):
    changes = dict(demonstrated=weight, correction=correction)
    loss, _ = run(**changes)
    np.testing.assert_allclose(loss, (2 * 0.75 - 2.0 * sum(values)) / 4, rtol=1e-5)
    expected = np.array([0.75, 0.75, -2.0 * slopes[0], -2.0 * slopes[1]]) / 4
    np.testing.assert_allclose(gradient(**changes), expected, rtol=1e-5)


def test_the_shape_is_the_probability_at_which_a_token_counts_most():
    probabilities = np.linspace(0.01, 0.99, 99)
    weights = 0.3 * probabilities / (probabilities + 0.3) ** 2
    assert probabilities[np.argmax(weights)] == pytest.approx(0.3)
    slope = gradient(demonstrated_shape=0.4)[3] * 4 / -2.0
    assert slope == pytest.approx(0.4 * 0.4 / 0.8**2, rel=1e-5)


def test_demonstrations_have_no_part_in_what_is_about_the_sampler():
    _, metrics = run()
    assert metrics["policy/mismatch_max"] == 0.0 and metrics["policy/ess"] == pytest.approx(1.0)
    assert metrics["policy/clip_fraction"] == 0.0 and metrics["policy/truncated_fraction"] == 0.0
    assert metrics["policy/demonstrated"] == 0.5 and metrics["policy/entropy"] == 1.0
    expected = (math.log(0.1) + math.log(0.4)) / 2
    assert metrics["policy/demonstrated_logp"] == pytest.approx(expected)
    # Two of four tokens have a divergence and an entropy.
    d = 0.3
    ref = jnp.asarray(LOGP + np.where(SHOWN > 0, 2.0, d).astype(np.float32))
    loss, metrics = run(ref=ref, kl_coef=0.1, entropy_coef=0.2)
    assert metrics["policy/kl"] == pytest.approx(math.exp(d) - d - 1, rel=1e-5)
    assert metrics["policy/kl_k1"] == pytest.approx(-d, rel=1e-5)
    penalties = (2 * 0.1 * (math.exp(d) - d - 1) - 2 * 0.2) / 4
    assert loss == pytest.approx(float(run()[0]) + penalties, rel=1e-5)


def test_a_batch_without_demonstrations_has_the_same_loss_with_and_without_the_mask():
    none = np.zeros((2, 4))
    with_mask, metrics = run(shown=none)
    without, others = run(shown=None)
    assert with_mask == without
    assert set(metrics) - set(others) == {"policy/demonstrated", "policy/demonstrated_logp"}
    assert metrics["policy/demonstrated_logp"] == 0.0


def example_group():
    own = make_trajectory([1, 2, 3, 4], [0, 0, 1, 1], prompt_length=2)
    shown = make_trajectory([1, 2, 5, 6, 7], [0, 0, 1, 0, 1], prompt_length=2, index=1)
    return make_group([own, dataclasses.replace(shown, demonstrated=True)])


def test_a_batch_says_which_targets_were_demonstrated():
    config = PackConfig(1, 20, 8, 0, False, demonstrated=True)
    batch, _ = pack([example_group()], [[0.5, -0.5]], config, version=0)
    np.testing.assert_array_equal(batch.targets[0], [3, 4, 5, 7, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch.demonstrated[0], [0, 0, 1, 1, 0, 0, 0, 0])
    assert batch.demonstrated.dtype == np.float32


def test_a_run_without_demonstrations_has_no_such_array_and_refuses_one():
    config = PackConfig(1, 20, 8, 0, False)
    own = make_group(example_group().trajectories[:1])
    batch, _ = pack([own], [[0.5]], config, version=0)
    assert batch.demonstrated is None
    with pytest.raises(ValueError, match=r"trajectory 1 is a demonstration; set config\.train"):
        pack([example_group()], [[0.5, -0.5]], config, version=0)


def test_demonstrations_do_not_count_as_the_policys_success():
    group = example_group()
    solved = [dataclasses.replace(t, solved=t.index == 1) for t in group.trajectories]
    group = dataclasses.replace(group, trajectories=tuple(solved))
    assert group.solved == (0, 1) and len(group.own) == 1


def test_records_without_demonstrations_do_not_name_them():
    own, shown = example_group().trajectories
    assert b"demonstrated" not in serialization.dumps(own)
    assert serialization.loads(serialization.dumps(shown)).demonstrated is True


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"demonstrated": "cloned"}, "demonstrated='cloned' is not one of"),
        ({"demonstrated_shape": 0.0}, "demonstrated_shape=0.0 must be above 0"),
    ],
)
def test_wrong_settings_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        LossConfig(**changes)
