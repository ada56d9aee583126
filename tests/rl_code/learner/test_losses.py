"""Losses, corrections and metrics against numbers worked out by hand, and what must not change
them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_code.config.named import Named
from rl_code.learner.config import LearnerConfig
from rl_code.learner.losses import LOSSES, per_trajectory
from rl_code.learner.objective import (
    AGGREGATIONS,
    CORRECTIONS,
    KL,
    Denominators,
    LossConfig,
    correction_weights,
    policy_loss,
    policy_metrics,
)
from rl_code.learner.optimizer import OptimizerConfig

# Two rows: trajectory 0 has three tokens, 1 has one, 2 has two; then padding (trajectory 3).
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], np.float32)
TRAJECTORIES = np.array([[0, 0, 0, 1], [2, 2, 3, 3]], np.int32)
LENGTHS = np.array([[3, 3, 3, 1], [2, 2, 1, 1]], np.float32)
ADVANTAGE = np.array([[1, 1, 1, -1], [2, 2, 0, 0]], np.float32)
PROX = np.array([[-1.0, -2.0, -0.5, -1.5], [-0.7, -0.2, 0, 0]], np.float32)
RATIO = np.array([[1.5, 0.5, 1.1, 0.5], [1.2, 2.0, 1, 1]], np.float32)
LOGP = PROX + np.log(RATIO)
STALENESS = np.array([[0, 2, 1, 0], [1, 1, 0, 0]], np.int32)


CLIP = ("clip_low", "clip_high")
ALL = slice(None)


def config(**changes):
    """A LossConfig; loss: name of the loss; clip_low, clip_high: its bounds, the same for each."""
    name = changes.pop("loss", "ppo")
    bounds = {side: changes.pop(side, {"clip_low": 0.2, "clip_high": 0.28}[side]) for side in CLIP}
    base = dict(
        policy=Named(name, bounds),
        aggregation="token",
        constant_length=10,
        kl_coef=0.0,
        kl_estimator="k3",
        entropy_coef=0.0,
        correction="none",
        correction_low=0.5,
        correction_high=2.0,
        temperature=1.0,
    )
    return LossConfig(**(base | changes))


def run(logp=LOGP, prox=PROX, sampler=None, ref=None, entropy=None, order=ALL, **changes):
    """(loss, metrics) of the batch above; ``order`` permutes its rows."""
    sampler = prox if sampler is None else sampler
    entropy = np.zeros_like(MASK) if entropy is None else entropy
    own = dict(logp=logp, prox=prox, ref=ref, entropy=entropy)
    arrays = dict(
        logprobs=sampler,
        advantages=ADVANTAGE,
        mask=MASK,
        trajectories=TRAJECTORIES,
        lengths=LENGTHS,
        staleness=STALENESS,
    )
    own, arrays = (
        {name: None if x is None else jnp.asarray(x) for name, x in part.items()}
        for part in (own, arrays)
    )
    if order != ALL:
        own, arrays = jax.tree.map(lambda x: x[order], (own, arrays))
    loss, terms = policy_loss(
        config(**changes),
        SimpleNamespace(**arrays, demonstrated=None),
        Denominators.of(MASK, LENGTHS),
        **own,
    )
    return loss, policy_metrics(terms)


def with_gradient(**changes):
    """((loss, metrics), the gradient for logp)."""
    logp = jnp.asarray(changes.pop("logp", LOGP))
    return jax.device_get(
        jax.value_and_grad(lambda logp: run(logp=logp, **changes), has_aux=True)(logp)
    )


def gradient(**changes):
    return with_gradient(**changes)[1]


# -min(r A, clip(r, 0.8, 1.28) A) per token, by hand:
PPO = np.array([[-1.28, -0.5, -1.1, 0.8], [-2.4, -2.56, 0, 0]])


def test_ppo_clips_each_side_at_its_own_bound():
    (loss, metrics), slopes = with_gradient()
    np.testing.assert_allclose(loss, PPO.sum() / 6, rtol=1e-6)
    assert metrics["policy/clip_fraction"] == pytest.approx(3 / 6)
    # d(r A)/d log pi = r A where not clipped
    np.testing.assert_allclose(slopes, -np.array([[0, 0.5, 1.1, 0], [2.4, 0, 0, 0]]) / 6, rtol=1e-5)


def test_gspo_clips_the_geometric_mean_of_the_ratio():
    s = [(1.5 * 0.5 * 1.1) ** (1 / 3), 0.5, (1.2 * 2.0) ** 0.5]  # 0.938, 0.5, 1.549
    (loss, metrics), slopes = with_gradient(loss="gspo", aggregation="sequence")
    np.testing.assert_allclose(loss, (-s[0] + 0.8 - 2 * 1.28) / 3, rtol=1e-6)
    assert metrics["policy/clip_fraction"] == pytest.approx(3 / 6)
    # ds/d log pi_t = s / |o|, the same for each token of the trajectory
    expected = np.array([[-s[0] / 3] * 3 + [0], [0] * 4]) / 3
    np.testing.assert_allclose(slopes, expected, rtol=1e-5)


def test_cispo_keeps_every_tokens_gradient_with_a_clipped_weight():
    weight = np.array([[1.28, 0.8, 1.1, 0.8], [1.2, 1.28, 0, 0]])
    (loss, metrics), slopes = with_gradient(loss="cispo")
    np.testing.assert_allclose(loss, -(weight * ADVANTAGE * LOGP).sum() / 6, rtol=1e-6)
    assert metrics["policy/clip_fraction"] == pytest.approx(4 / 6)
    np.testing.assert_allclose(slopes, -weight * ADVANTAGE / 6, rtol=1e-6)


@pytest.mark.parametrize("clip_low, clip_high", [(0.0, 0.28), (0.2, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_ratio_of_one_passes_the_whole_gradient_with_any_bounds(loss, clip_low, clip_high):
    """In a first update every ratio is 1, which lies on a bound of 0."""
    bounds = dict(loss=loss, clip_low=clip_low, clip_high=clip_high)
    found = jax.grad(lambda logp: run(logp=logp, **bounds)[0])(jnp.asarray(PROX))
    wanted = ADVANTAGE * MASK
    if loss == "gspo":  # the mean over a trajectory, on each of its tokens
        wanted = np.array([[1, 1, 1, -1], [2, 2, 0, 0]])
    np.testing.assert_allclose(found, -wanted / 6, rtol=1e-5)


# Each loss, each estimator and each correction at least once.
EXTREME = {
    "ppo": dict(kl_coef=0.1, correction="decoupled"),
    "gspo": dict(kl_coef=0.1, kl_estimator="k2", correction="truncated"),
    "cispo": dict(kl_coef=0.1, kl_estimator="k1", correction="masked_token"),
    "ppo of sequences": dict(correction="masked_sequence", aggregation="sequence"),
    "gspo of sequences": dict(correction="masked_geometric", aggregation="constant"),
    "cispo alone": dict(),
}


@pytest.mark.parametrize("way", EXTREME)
def test_log_ratios_of_any_size_overflow_nowhere(way):
    """Of pi to prox, of prox to mu and of the reference to pi, for tokens of either advantage."""
    given = []
    for by in (100.0, -100.0):
        moved = by * np.array([[1, 0, 0, 1], [0, 1, 0, 0]], np.float32)
        for places in (
            dict(logp=PROX + moved),
            dict(prox=LOGP + moved, sampler=LOGP),
            dict(prox=PROX, sampler=PROX - moved),
            dict(logp=PROX + moved, sampler=PROX - moved),
        ):
            places = dict(logp=LOGP, prox=PROX) | places
            own = dict(sampler=places["prox"], ref=places["logp"] + moved)
            given.append(own | places)
    given = {name: np.stack([each[name] for each in given]) for name in given[0]}
    options = dict(loss=way.split()[0]) | EXTREME[way]

    def loss_of(logp, others):
        return run(logp=logp, **others, **options)

    # each of the eight by itself, in the calls of one
    logp = given.pop("logp")
    found = jax.vmap(jax.value_and_grad(loss_of, has_aux=True))(logp, given)
    (loss, metrics), slopes = jax.device_get(found)
    assert np.isfinite(slopes).all() and np.isfinite(loss).all() and loss.shape == (8,)
    assert all(np.isfinite(value).all() for value in metrics.values()), metrics


def test_the_clip_holds_for_a_ratio_that_would_overflow():
    """Good tokens that have become far likelier: nothing more to gain, and no gradient."""
    far = dict(logp=PROX + np.array([[100, 0, 0, 0], [0, 0, 0, 0]], np.float32))
    loss, metrics = run(**far)
    np.testing.assert_allclose(loss, -(1.28 + 1 + 1 - 1 + 2 + 2) / 6, rtol=1e-6)
    found = jax.grad(lambda logp: run(logp=logp)[0])(jnp.asarray(far["logp"]))
    wanted = -(ADVANTAGE * MASK) / 6
    wanted[0, 0] = 0.0
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert metrics["policy/clip_fraction"] == pytest.approx(1 / 6)


def test_a_policy_far_above_the_reference_is_still_pulled_back():
    """There k3 is almost -d, which needs no bound."""
    slope = jax.grad(lambda d: KL["k3"](d).sum())(jnp.array([-100.0, -1000.0]))
    np.testing.assert_allclose(slope, [-1.0, -1.0], rtol=1e-6)


@pytest.mark.parametrize(
    "aggregation, expected",
    [
        ("token", PPO.sum() / 6),
        ("sequence", ((-1.28 - 0.5 - 1.1) / 3 + 0.8 + (-2.4 - 2.56) / 2) / 3),
        ("constant", PPO.sum() / (10 * 3)),
    ],
)
def test_aggregations_equal_hand_computed_numbers(aggregation, expected):
    np.testing.assert_allclose(run(aggregation=aggregation)[0], expected, rtol=1e-6)


def test_kl_estimators_equal_their_formulas():
    d = jnp.array([0.5, -1.0, 0.0])
    np.testing.assert_allclose(KL["k1"](d), [-0.5, 1.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(KL["k2"](d), [0.125, 0.5, 0.0], rtol=1e-6)
    np.testing.assert_allclose(KL["k3"](d), [math.exp(0.5) - 1.5, math.exp(-1), 0.0], rtol=1e-6)


def test_expected_kl_gradients_are_right_for_k2_and_k3_as_losses():
    def exact(logits, ref):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logp) * (logp - ref))

    def estimated(logits, ref, name):
        """Expectation over samples; its gradient is that of the sampled loss."""
        probabilities = jax.lax.stop_gradient(jax.nn.softmax(logits))
        return jnp.sum(probabilities * KL[name](ref - jax.nn.log_softmax(logits)))

    def reverse(logits, ref):  # KL(ref || pi), up to what does not depend on pi
        return -jnp.sum(jnp.exp(ref) * jax.nn.log_softmax(logits))

    @jax.jit
    def gradients(logits, other):
        ref = jax.nn.log_softmax(other)
        found = {name: jax.grad(estimated)(logits, ref, name) for name in KL}
        return found, jax.grad(exact)(logits, ref), jax.grad(reverse)(logits, ref)

    logits, other = np.array([[0.3, -1.0, 0.8, 0.1], [1.0, 0.2, -0.5, 0.0]], np.float32)
    found, of_exact, of_reverse = gradients(logits, other)
    np.testing.assert_allclose(found["k1"], np.zeros(4), atol=1e-6)
    np.testing.assert_allclose(found["k2"], of_exact, atol=1e-6)
    np.testing.assert_allclose(found["k3"], of_reverse, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_is_added_with_the_aggregation_of_the_loss(estimator):
    d = np.array([[0.5, -1.0, 0.0, 0.3], [0.2, 0.4, 0, 0]], np.float32)
    term = {"k2": d**2 / 2, "k3": np.exp(d) - d - 1}[estimator]
    loss, metrics = run(ref=LOGP + d, kl_coef=0.1, kl_estimator=estimator, aggregation="sequence")
    plain = run(aggregation="sequence")[0]
    np.testing.assert_allclose(loss - plain, 0.1 * (term * MASK / LENGTHS).sum() / 3, rtol=1e-4)
    np.testing.assert_allclose(
        metrics["policy/kl"], (np.exp(d) - d - 1)[MASK > 0].mean(), rtol=1e-5
    )
    np.testing.assert_allclose(metrics["policy/kl_k1"], -d[MASK > 0].mean(), rtol=1e-5)


def test_k1_is_taken_off_the_reward_of_the_whole_trajectory():
    # sums of k1 = -d: 0.5, -0.3, -0.2
    d = np.array([[0.5, -1.0, 0.0, 0.3], [0.2, 0.0, 9, 9]], np.float32)
    options = dict(loss="cispo", clip_low=1.0, clip_high=9.0)
    advantages = np.array([[1 - 0.05] * 3 + [-1 + 0.03], [2 + 0.02] * 2 + [0, 0]])
    loss, _ = run(ref=LOGP + d, kl_coef=0.1, kl_estimator="k1", **options)
    np.testing.assert_allclose(loss, -(RATIO * advantages * LOGP * MASK).sum() / 6, rtol=1e-5)
    np.testing.assert_allclose(
        gradient(ref=LOGP + d, kl_coef=0.1, kl_estimator="k1", **options),
        -RATIO * advantages * MASK / 6,
        rtol=1e-5,
    )


def test_entropy_is_rewarded():
    entropy = np.array([[0.5, 1.0, 0.0, 2.0], [0.5, 2.0, 9, 9]], np.float32)
    loss, metrics = run(entropy=entropy, entropy_coef=0.3)
    np.testing.assert_allclose(loss, run()[0] - 0.3, rtol=1e-5)
    assert metrics["policy/entropy"] == pytest.approx(1.0)


# w = prox / mu per token: trajectory 0 has 4, 1, 0.25; trajectory 1 has 0.4; trajectory 2 has 2,
# 1.5.
W = np.array([[4.0, 1.0, 0.25, 0.4], [2.0, 1.5, 1.0, 1.0]], np.float32)


@functools.cache
def uncorrected(loss):
    """The gradient of a loss with a constant denominator, without corrections."""
    return gradient(loss=loss, aggregation="constant")


@pytest.mark.parametrize(
    "correction, weight, cut",
    [
        ("none", np.ones((2, 4)), 0),
        ("decoupled", W, 0),
        ("truncated", np.minimum(W, 3.5), 1),
        ("masked_token", [[0, 1, 0, 0], [2, 1.5, 1, 1]], 3),
        ("masked_sequence", [[1, 1, 1, 0], [3, 3, 1, 1]], 1),  # products: 1, 0.4, 3
        ("masked_geometric", [[1, 1, 1, 0], [3**0.5, 3**0.5, 1, 1]], 1),
    ],
)
def test_corrections_weigh_the_loss_by_hand_computed_factors(correction, weight, cut):
    options = dict(correction=correction, correction_low=0.5, correction_high=3.5)
    result, outside = correction_weights(config(**options), jnp.log(W), MASK, TRAJECTORIES, LENGTHS)
    np.testing.assert_allclose(result * MASK, np.array(weight) * MASK, rtol=1e-5)
    assert int(jnp.sum(outside * MASK)) == cut
    for loss in LOSSES:
        # the denominator stays: masked tokens are counted
        changes = dict(sampler=PROX - np.log(W), loss=loss, aggregation="constant", **options)
        (whole, metrics), grads = with_gradient(**changes)
        assert metrics["policy/truncated_fraction"] == pytest.approx(cut / 6)
        if loss != "gspo":  # there a token's gradient mixes the weights of its trajectory
            plain = uncorrected(loss)
            np.testing.assert_allclose(grads, plain * np.array(weight), rtol=1e-5, atol=1e-8)
        assert np.isfinite(whole)


@pytest.mark.parametrize(
    ("correction", "fresh", "stale"),
    [("auto", "none", "decoupled"), ("none", "none", "none"), ("truncated",) * 3],
)
def test_stale_data_are_weighted_by_the_decoupled_loss_unless_another_is_asked_for(
    correction, fresh, stale
):
    made = config(correction=correction)
    assert [made.for_staleness(bound).correction for bound in (0, 1, 4)] == [fresh, stale, stale]


def test_a_correction_that_was_not_decided_is_refused():
    with pytest.raises(ValueError, match="correction='auto' is to be decided first"):
        correction_weights(config(correction="auto"), jnp.log(W), MASK, TRAJECTORIES, LENGTHS)


def test_a_sequence_ratio_beyond_float_range_is_masked_and_not_nan():
    ones = np.ones((2, 4), np.float32)
    weight, outside = correction_weights(
        config(correction="masked_sequence"),
        jnp.asarray(60.0 * ones),
        jnp.asarray(ones),
        jnp.asarray(0 * TRAJECTORIES),
        jnp.asarray(4.0 * ones),
    )
    np.testing.assert_array_equal(weight, 0.0 * ones)
    assert np.asarray(outside).all()


def test_mismatch_ess_and_staleness_are_always_logged():
    _, metrics = run(sampler=PROX - np.log(W))
    log_w = np.log(W)[MASK > 0]
    w = W[MASK > 0]
    expected = {
        "policy/mismatch_mean": np.abs(log_w).mean(),
        "policy/mismatch_max": math.log(4.0),
        "policy/mismatch_k1": -log_w.mean(),
        "policy/mismatch_k3": (w - log_w - 1).mean(),
        "policy/ess": w.sum() ** 2 / (6 * (w**2).sum()),
        "rollout/staleness_mean": (2 + 0 + 1) / 3,  # of each trajectory's oldest token
        "rollout/staleness_max": 2.0,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(run()[1]["policy/ess"], 1.0, rtol=1e-6)


def test_without_prox_the_ratio_is_one_and_the_gradient_is_policy_gradient():
    for loss in ("ppo", "cispo"):
        grads = gradient(prox=None, sampler=PROX, loss=loss)
        np.testing.assert_allclose(grads, -ADVANTAGE * MASK / 6, rtol=1e-6)
    grads = gradient(prox=None, sampler=PROX, loss="gspo", aggregation="sequence")
    np.testing.assert_allclose(grads, -ADVANTAGE * MASK / LENGTHS / 3, rtol=1e-6)


# Every two values of different settings.
PAIRS = [
    (loss, correction, list(KL)[(first + second) % len(KL)])
    for first, loss in enumerate(LOSSES)
    for second, correction in enumerate(CORRECTIONS)
]


@pytest.mark.parametrize("loss, correction, estimator", PAIRS)
@pytest.mark.quick(each=True)
def test_padding_content_and_row_order_do_not_matter(loss, correction, estimator):
    def poison(x):
        return np.where(MASK > 0, x, np.nan)

    options = dict(
        loss=loss, correction=correction, kl_coef=0.1, kl_estimator=estimator, entropy_coef=0.1
    )
    inputs = dict(prox=PROX, sampler=PROX - 0.1 * np.log(W), ref=PROX + 0.2, entropy=-PROX)
    (loss, metrics), clean = with_gradient(**inputs, **options)
    poisoned = {name: poison(x) for name, x in inputs.items()}
    (value, others), grads = with_gradient(logp=poison(LOGP), **poisoned, **options)
    assert float(value) == float(loss) and {k: float(v) for k, v in others.items()} == {
        k: float(v) for k, v in metrics.items()
    }
    np.testing.assert_array_equal(grads, clean)
    assert not grads[MASK == 0].any()
    np.testing.assert_allclose(
        run(**inputs, order=slice(None, None, -1), **options)[0], loss, rtol=1e-6
    )


def test_shares_of_micro_batches_add_up_to_the_whole():
    for loss in LOSSES:
        for aggregation in AGGREGATIONS:
            options = dict(
                loss=loss,
                aggregation=aggregation,
                correction="masked_geometric",
                ref=PROX,
                kl_coef=0.1,
            )
            whole = run(sampler=PROX - np.log(W), **options)[0]
            parts = [
                run(sampler=PROX - np.log(W), order=slice(i, i + 1), **options)[0] for i in range(2)
            ]
            np.testing.assert_allclose(sum(parts), whole, rtol=1e-6)


def test_per_trajectory_sums_neighbours_within_a_row():
    numbers = np.array([[1, 2, 4, 8], [16, 32, 64, 128]], np.float32)
    trajectories = np.array([[7, 7, 2, 9], [9, 9, 7, 7]], np.int32)
    result = per_trajectory(jnp.asarray(numbers), jnp.asarray(trajectories))
    np.testing.assert_array_equal(result, [[3, 3, 4, 8], [48, 48, 192, 192]])


def test_an_empty_batch_has_zero_loss_and_finite_metrics():
    zeros = jnp.zeros((2, 4))
    loss, terms = policy_loss(
        config(correction="masked_sequence"),
        SimpleNamespace(
            logprobs=zeros,
            advantages=zeros,
            mask=zeros,
            trajectories=jnp.zeros((2, 4), jnp.int32),
            lengths=jnp.ones((2, 4)),
            staleness=jnp.zeros((2, 4), jnp.int32),
            demonstrated=None,
        ),
        Denominators.of(zeros, zeros + 1.0),
        logp=zeros,
        entropy=zeros,
        prox=None,
        ref=zeros,
    )
    assert loss == 0.0 and all(np.isfinite(value) for value in policy_metrics(terms).values())


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(loss="trpo"), "train.loss.policy = 'trpo': expected one of 'cispo', 'gspo', 'ppo'"),
        (dict(aggregation="mean"), "aggregation='mean'"),
        (dict(kl_estimator="k4"), "kl_estimator='k4'"),
        (dict(correction="yes"), "correction='yes'"),
        (dict(clip_low=1.5), "clip_low=1.5"),
        (dict(constant_length=0), "constant_length=0"),
        (dict(correction_low=3.0), "correction_low=3.0"),
        (dict(temperature=0.0), "temperature=0.0"),
    ],
)
def test_a_wrong_value_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_kl_without_a_reference_is_an_error():
    with pytest.raises(ValueError, match=r"kl_coef=0\.1.*ref is None"):
        run(kl_coef=0.1)


@pytest.mark.parametrize("name", ["kl_coef", "entropy_coef", "temperature"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be"):
        LossConfig(**{name: value})


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("side", ["clip_low", "clip_high"])
def test_bounds_that_are_no_numbers_are_refused(loss, side):
    with pytest.raises(ValueError, match=f"{side}=nan"):
        LOSSES[loss](**{side: float("nan")})


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_bounds_of_the_only_update_of_a_batch_are_named(kind):
    bounded = LossConfig(policy=Named(kind, {"clip_high": 0.1}))
    once = LearnerConfig(OptimizerConfig(1e-3), loss=bounded)
    assert once.without_effect() == ("train.loss.policy.clip_high",)
    assert dataclasses.replace(once, epochs=2).without_effect() == ()
    assert dataclasses.replace(once, loss=LossConfig(policy=Named(kind))).without_effect() == ()
