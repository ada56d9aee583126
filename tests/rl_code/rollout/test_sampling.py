"""Sampling draws from the distribution it reports, and only from what top-k and top-p allow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_code.rollout.own_way import OwnWays, sample_own
from rl_code.rollout.sampling import SamplingConfig, sample, stop_mask, token_uniforms


def _logits(vocab: int, seed: int = 0) -> jax.Array:
    return 2.0 * jax.random.normal(jax.random.key(seed), (vocab,))


@pytest.mark.parametrize("vocab", [16, 7, 50])
@pytest.mark.quick(first=1)
def test_frequencies_follow_the_softmax(vocab):
    draws = 40_000
    # a stratified sample: frequencies are exact to one draw per token
    uniforms = (jnp.arange(draws) + 0.5) / draws
    logits = jnp.broadcast_to(_logits(vocab), (draws, vocab))
    tokens, _ = sample(logits, uniforms, SamplingConfig(temperature=0.7, top_k=0, top_p=1.0))
    found = np.bincount(tokens, minlength=vocab) / draws
    expected = jax.nn.softmax(_logits(vocab) / 0.7)
    np.testing.assert_allclose(found, expected, atol=3 / draws)


def test_log_probability_is_of_the_whole_vocabulary_at_the_temperature():
    logits = _logits(30)[None]
    token, logprob = sample(
        logits, jnp.array([0.4]), SamplingConfig(temperature=0.5, top_k=3, top_p=1.0)
    )
    expected = jax.nn.log_softmax(logits[0] / 0.5)[token[0]]
    np.testing.assert_allclose(logprob[0], expected, rtol=1e-6)


@settings(max_examples=25, deadline=None)
@given(k=st.integers(1, 12), p=st.floats(0.05, 0.95), seed=st.integers(0, 100))
def test_top_k_and_top_p_keep_the_smallest_set(k, p, seed):
    uniforms = jnp.linspace(0.0, 0.999999, 500)
    logits = jnp.broadcast_to(_logits(12, seed), (500, 12))
    tokens, _ = sample(logits, uniforms, SamplingConfig(temperature=1.0, top_k=k, top_p=p))
    probs = np.asarray(jax.nn.softmax(_logits(12, seed)), np.float64)
    order = np.argsort(-probs)[:k]
    kept = np.cumsum(probs[order]) - probs[order] < p * probs[order].sum() - 1e-6
    # one token of slack for rounding at the boundary
    allowed = set(order[: max(1, int(kept.sum()) + 1)])
    assert set(np.unique(tokens)) <= allowed


def test_greedy_takes_the_largest_logit():
    logits = jnp.stack([_logits(20, seed) for seed in range(5)])
    tokens, _ = sample(logits, jnp.zeros(5), SamplingConfig(temperature=0.0, top_k=0, top_p=1.0))
    assert (tokens == jnp.argmax(logits, axis=-1)).all()


def test_impossible_tokens_are_never_drawn():
    logits = jnp.full((200, 10), -jnp.inf).at[:, jnp.array([3, 8])].set(0.0)
    tokens, _ = sample(logits, jnp.linspace(0.0, 1.0, 200), SamplingConfig(1.0, 0, 1.0))
    assert set(np.unique(tokens)) == {3, 8}


def test_random_numbers_depend_on_the_sequence_and_not_on_its_row():
    keys = jnp.array([[0, 3], [0, 3], [0, 3], [0, 4]], jnp.uint32)
    groups = jnp.array([5, 6, 5, 5])
    samples = jnp.array([0, 0, 1, 1])
    positions = jnp.array([9, 9, 9, 9])
    together = token_uniforms(keys, groups, samples, positions)
    turned = token_uniforms(keys[::-1], groups[::-1], samples[::-1], positions[::-1])
    assert (together == turned[::-1]).all()
    assert len(set(together.tolist())) == 4


def test_stop_tokens_are_recognised():
    assert stop_mask(jnp.array([1, 7, 9]), (7, 9)).tolist() == [False, True, True]
    # guesses of a row, and no guesses at all
    assert stop_mask(jnp.array([[1, 7], [9, 2]]), (7, 9)).tolist() == [[False, True], [True, False]]
    assert stop_mask(jnp.zeros((2, 0), int), (7, 9, 11)).shape == (2, 0)


@pytest.mark.parametrize(
    "change", [{"temperature": -1.0}, {"top_k": -2}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_a_bad_value_is_named(change):
    name, value = next(iter(change.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        SamplingConfig(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **change})


def test_rows_with_ways_of_their_own_are_drawn_as_a_config_that_says_the_same():
    logits = jnp.stack([_logits(20, seed) for seed in range(5)])
    uniforms = jnp.array([0.1, 0.3, 0.5, 0.7, 0.95])
    asked = [(0.0, 1.0), (0.5, 1.0), (1.0, 0.4), (1.0, 1.0), (1.0, 1.0)]
    biases = np.zeros((5, 20), np.float32)
    biases[3, 7] = 100.0
    allowed = np.zeros((5, 20), bool)
    allowed[4, 0] = True
    first = jnp.arange(5) == 4
    temperatures, top_ps = (jnp.array(each, jnp.float32) for each in zip(*asked, strict=True))
    ways = OwnWays(temperatures, top_ps, jnp.asarray(biases), jnp.asarray(allowed))
    found = sample_own(logits, uniforms, first, ways, SamplingConfig())
    tokens, logprobs, alternatives, likely = found
    for row, (temperature, top_p) in enumerate(asked[:3]):
        config = SamplingConfig(temperature=temperature, top_p=top_p)
        own, _ = sample(logits[row : row + 1], uniforms[row : row + 1], config)
        assert tokens[row] == own[0]
    assert tokens[3] == 7
    assert tokens[4] == 0  # the only one that may come first
    # what the model says, however the token was drawn
    expected = jax.nn.log_softmax(logits)
    np.testing.assert_allclose(logprobs, expected[jnp.arange(5), tokens], rtol=1e-6)
    np.testing.assert_array_equal(alternatives, jnp.argsort(-expected, axis=-1)[:, :20])
    np.testing.assert_allclose(likely, -jnp.sort(-expected, axis=-1)[:, :20], rtol=1e-6)


def test_guesses_that_are_drawn_again_with_the_rule_have_the_distribution_of_the_rule():
    """A token of three that fit, guessed freely and drawn again where it does not fit."""
    draws = 40_000
    logits = jnp.broadcast_to(_logits(8), (draws, 8))
    allowed = np.zeros((draws, 8), bool)
    allowed[:, [1, 4, 6]] = True
    one = jnp.ones(draws, jnp.float32)
    ways = OwnWays(one, one, jnp.zeros((draws, 8)), jnp.asarray(allowed))
    guess, again = np.random.default_rng(0).random((2, draws), np.float32)
    never = jnp.zeros(draws, bool)
    guessed = sample_own(logits, jnp.asarray(guess), never, ways, SamplingConfig())[0]
    redrawn = sample_own(logits, jnp.asarray(again), ~never, ways, SamplingConfig())[0]
    kept = jnp.where(jnp.isin(guessed, jnp.array([1, 4, 6])), guessed, redrawn)
    expected = np.where(allowed[0], jax.nn.softmax(_logits(8)), 0.0)
    expected /= expected.sum()
    found = np.bincount(kept, minlength=8) / draws
    np.testing.assert_allclose(found, expected, atol=0.01)
