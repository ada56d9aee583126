"""A teacher's part of the loss: divergences worked out by hand, their gradients, and their bounds."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.learner.distillation import (
    Full,
    Sampled,
    Taught,
    TeacherConfig,
    TopK,
    finished,
    lesson,
)

# pi and pi_T over three tokens, in two places; the second place has equal ones.
POLICY = np.log([[[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]]).astype(np.float32)
TEACHER = np.log([[[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]]]).astype(np.float32)
TARGETS = np.array([[0, 1]])
MASK = np.ones((1, 2), np.float32)
OPD = TeacherConfig(weights="runs/teacher@1")


def chosen_in(distributions):
    return jnp.take_along_axis(jnp.asarray(distributions), TARGETS[..., None], -1)[..., 0]


def taught_by(form, teacher=TEACHER, mask=MASK):
    """What a teacher with these distributions says."""
    teacher = jnp.asarray(teacher)
    return Taught(jnp.asarray(mask), chosen_in(teacher), **form.kept(None, teacher))


def divergence(form, policy=POLICY, teacher=TEACHER):
    return _divergences((form,), policy, teacher)[0]


@functools.partial(jax.jit, static_argnums=0)
def _divergences(forms, policy, teacher):
    return [
        form(policy, chosen_in(policy), taught_by(form, teacher), lambda: teacher) for form in forms
    ]


def lesson_of(config, policy=POLICY, teacher=TEACHER, mask=MASK, advantages=0.0, prox=None):
    form = config.form
    policy = jnp.asarray(policy)
    return lesson(
        config,
        taught_by(form, teacher, mask),
        policy=policy,
        chosen=chosen_in(policy),
        prox=prox,
        advantages=jnp.full((1, 2), advantages),
        mask=jnp.asarray(MASK),
        teacher=lambda: jnp.asarray(teacher),
    )


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        # 0.5 ln(0.5 / 0.25) + 0.25 ln(0.25 / 0.5)
        (Full(), 0.25 * np.log(2.0)),
        # the teacher's likeliest is token 1: 0.25 ln(0.25 / 0.5), and 0.75 ln(0.75 / 0.5) of the rest
        (TopK(1), 0.25 * np.log(0.5) + 0.75 * np.log(1.5)),
        # token 0 was sampled: ln(0.5 / 0.25)
        (Sampled(), np.log(2.0)),
    ],
)
def test_divergence_is_that_by_hand(form, expected):
    found = divergence(form)
    np.testing.assert_allclose(found, [[expected, 0.0]], atol=1e-6)


def test_more_tokens_tell_more_and_all_but_one_tell_all():
    rng = np.random.default_rng(0)
    policy, teacher = (
        np.log(rng.dirichlet(np.ones(6), (1, 2))).astype(np.float32) for _ in range(2)
    )
    *found, whole = _divergences((*map(TopK, range(1, 6)), Full()), policy, teacher)
    for less, more in itertools.pairwise(found):
        assert np.all(np.asarray(less) <= np.asarray(more) + 1e-6)
    np.testing.assert_allclose(found[-1], whole, atol=1e-5)


def test_the_sampled_form_has_the_mean_of_the_whole():
    each = [POLICY[0, 0, v] - TEACHER[0, 0, v] for v in range(3)]
    mean = np.sum(np.exp(POLICY[0, 0]) * each)
    np.testing.assert_allclose(mean, divergence(Full())[0, 0], atol=1e-6)


@pytest.mark.parametrize("form", [Full(), TopK(2)])
def test_gradient_is_that_by_hand(form):
    """Of D by the logits: pi (log pi - log pi_T - D), with all tokens told apart (k = V - 1)."""

    def total(logits):
        policy = jax.nn.log_softmax(logits)
        return jnp.sum(form(policy, None, taught_by(form), lambda: jnp.asarray(TEACHER)))

    found = jax.jit(jax.grad(total))(POLICY)
    d = np.asarray(divergence(Full()))[..., None]
    np.testing.assert_allclose(found, np.exp(POLICY) * (POLICY - TEACHER - d), atol=1e-6)
    # where policy and teacher agree there is none
    np.testing.assert_allclose(found[0, 1], 0.0, atol=1e-6)


def test_a_token_without_probability_adds_nothing():
    policy = np.array([[[0.0, -1e9, -1e9], [0.0, -1e9, -1e9]]], np.float32)
    found = divergence(Full(), policy, TEACHER)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, [[np.log(4.0), np.log(5.0)]], rtol=1e-6)
    # a rest without probability, beside one with
    sure = np.array([[[-1e9, 0.0, -1e9], [-1e9, -1e9, 0.0]]], np.float32)
    np.testing.assert_allclose(divergence(TopK(1), sure), [[np.log(2.0), np.log(2.0)]], atol=1e-4)


def test_a_term_of_the_loss_has_weight_bound_and_mask():
    config = dataclasses.replace(OPD, coef=3.0, rewards=0.5)
    found = lesson_of(config, advantages=2.0)
    np.testing.assert_allclose(found.loss, [[3.0 * 0.25 * np.log(2.0), 0.0]], atol=1e-6)
    np.testing.assert_array_equal(found.advantages, [[1.0, 1.0]])

    bounded = dataclasses.replace(config, clip=0.1)
    np.testing.assert_allclose(lesson_of(bounded).loss, [[0.3, 0.0]], atol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(lesson_of(bounded, jax.nn.log_softmax(x)).loss))
    np.testing.assert_array_equal(gradient(jnp.asarray(POLICY))[0, 0], 0.0)
    means = finished(lesson_of(bounded).sums)
    assert float(means["teacher/clipped"]) == 0.5  # of the two tokens

    unasked = lesson_of(config, mask=np.array([[0.0, 1.0]], np.float32))
    np.testing.assert_array_equal(np.asarray(unasked.loss)[0, 0], 0.0)
    assert float(unasked.sums["teacher/share"]) == 1.0


def test_an_advantage_has_no_gradient_and_is_the_same_in_all_epochs():
    config = dataclasses.replace(OPD, divergence=Named("sampled"), coef=2.0, clip=0.5, rewards=1.0)
    found = lesson_of(config, advantages=1.0)
    # ln 2 is cut to 0.5
    np.testing.assert_allclose(found.advantages, [[1.0 - 2.0 * 0.5, 1.0]], atol=1e-6)
    np.testing.assert_array_equal(found.loss, 0.0)
    unlike = np.log([[[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]]]).astype(np.float32)
    later = lesson_of(config, unlike, advantages=1.0, prox=chosen_in(POLICY))
    np.testing.assert_array_equal(later.advantages, found.advantages)
    # the teacher finds the token likelier by more than the bound
    gained = lesson_of(config, TEACHER - 9.0, POLICY, advantages=1.0)
    np.testing.assert_allclose(gained.advantages, [[2.0, 2.0]], atol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(lesson_of(config, jax.nn.log_softmax(x)).advantages))
    np.testing.assert_array_equal(gradient(jnp.asarray(POLICY)), 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(weights=""), "the teacher is the policy itself"),
        (dict(average=0.9), "set one of the two"),
        (dict(weights="", average=1.0), r"average=1\.0 must be between 0 and 1"),
        (dict(coef=-1.0), r"coef=-1\.0 must be at least 0"),
        (dict(rewards=-1.0), r"rewards=-1\.0 must be at least 0"),
        (dict(clip=0.0), r"clip=0\.0 must be positive"),
        (dict(slots=1), "slots=1 must be at least 2"),
        (dict(divergence=Named("ful")), "config.train.teacher.divergence = 'ful'"),
        (dict(feedback=Named("hints")), "config.train.teacher.feedback = 'hints'"),
    ],
)
def test_bad_values_are_refused(changes, message):
    with pytest.raises((ValueError, ConfigError), match=message):
        dataclasses.replace(OPD, **changes)


def test_more_tokens_than_the_vocabulary_has_are_refused():
    with pytest.raises(ValueError, match="k=3 must be less than the 3 tokens"):
        TopK(3).check(3)
    TopK(2).check(3)
