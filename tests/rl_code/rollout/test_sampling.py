"""Sampling draws from the distribution it reports, and only from what top-k and top-p allow."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_code.rollout.own_way import OwnWays, sample_own
from rl_code.rollout.sampling import SamplingConfig, sample, stop_mask, token_uniforms

drawn = jax.jit(sample, static_argnames="config")
drawn_own = jax.jit(sample_own, static_argnames="config")


def _logits(vocab: int, seed: int = 0) -> np.ndarray:
    return 2.0 * np.random.default_rng(seed).standard_normal(vocab, np.float32)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


@pytest.mark.parametrize("vocab", [16, 7, 50])
@pytest.mark.quick(first=1)
def test_frequencies_follow_the_softmax(vocab):
    draws = 40_000
    # a stratified sample: frequencies are exact to one draw per token
    uniforms = (np.arange(draws, dtype=np.float32) + np.float32(0.5)) / np.float32(draws)
    logits = np.broadcast_to(_logits(vocab), (draws, vocab))
    tokens, _ = drawn(logits, uniforms, SamplingConfig(temperature=0.7, top_k=0, top_p=1.0))
    found = np.bincount(tokens, minlength=vocab) / draws
    expected = np.exp(_log_softmax(_logits(vocab) / 0.7))
    np.testing.assert_allclose(found, expected, atol=3 / draws)


def test_log_probability_is_of_the_whole_vocabulary_at_the_temperature():
    logits = _logits(30)[None]
    config = SamplingConfig(temperature=0.5, top_k=3, top_p=1.0)
    token, logprob = drawn(logits, np.array([0.4], np.float32), config)
    expected = _log_softmax(logits[0] / 0.5)[token[0]]
    np.testing.assert_allclose(logprob[0], expected, rtol=1e-6)


# few k, since each is a program
@settings(max_examples=25, deadline=None)
@given(k=st.sampled_from([1, 2, 5, 12]), p=st.floats(0.05, 0.95), seed=st.integers(0, 100))
def test_top_k_and_top_p_keep_the_smallest_set(k, p, seed):
    uniforms = np.linspace(0.0, 0.999999, 500, dtype=np.float32)
    logits = np.broadcast_to(_logits(12, seed), (500, 12))
    tokens, _ = sample(logits, uniforms, SamplingConfig(temperature=1.0, top_k=k, top_p=p))
    probs = np.exp(_log_softmax(_logits(12, seed)))
    order = np.argsort(-probs)[:k]
    kept = np.cumsum(probs[order]) - probs[order] < p * probs[order].sum() - 1e-6
    # one token of slack for rounding at the boundary
    allowed = set(order[: max(1, int(kept.sum()) + 1)])
    assert set(np.unique(tokens)) <= allowed


def test_greedy_takes_the_largest_logit():
    logits = np.stack([_logits(20, seed) for seed in range(5)])
    config = SamplingConfig(temperature=0.0, top_k=0, top_p=1.0)
    tokens, _ = drawn(logits, np.zeros(5, np.float32), config)
    assert (tokens == np.argmax(logits, axis=-1)).all()


def test_impossible_tokens_are_never_drawn():
    logits = np.full((200, 10), -np.inf, np.float32)
    logits[:, [3, 8]] = 0.0
    uniforms = np.linspace(0.0, 1.0, 200, dtype=np.float32)
    tokens, _ = drawn(logits, uniforms, SamplingConfig(1.0, 0, 1.0))
    assert set(np.unique(tokens)) == {3, 8}


def test_random_numbers_depend_on_the_sequence_and_not_on_its_row():
    keys = np.array([[0, 3], [0, 3], [0, 3], [0, 4]], np.uint32)
    groups = np.array([5, 6, 5, 5])
    samples = np.array([0, 0, 1, 1])
    positions = np.array([9, 9, 9, 9])
    uniforms = jax.jit(token_uniforms)
    together = np.asarray(uniforms(keys, groups, samples, positions))
    turned = np.asarray(uniforms(keys[::-1], groups[::-1], samples[::-1], positions[::-1]))
    assert (together == turned[::-1]).all()
    assert len(set(together.tolist())) == 4


def test_stop_tokens_are_recognised():
    assert stop_mask(np.array([1, 7, 9]), (7, 9)).tolist() == [False, True, True]
    # guesses of a row, and no guesses at all
    assert stop_mask(np.array([[1, 7], [9, 2]]), (7, 9)).tolist() == [[False, True], [True, False]]
    assert stop_mask(np.zeros((2, 0), int), (7, 9, 11)).shape == (2, 0)


@pytest.mark.parametrize(
    "change", [{"temperature": -1.0}, {"top_k": -2}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_a_bad_value_is_named(change):
    name, value = next(iter(change.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        SamplingConfig(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **change})


def test_rows_with_ways_of_their_own_are_drawn_as_a_config_that_says_the_same():
    logits = np.stack([_logits(20, seed) for seed in range(5)])
    uniforms = np.array([0.1, 0.3, 0.5, 0.7, 0.95], np.float32)
    asked = [(0.0, 1.0), (0.5, 1.0), (1.0, 0.4), (1.0, 1.0), (1.0, 1.0)]
    biases = np.zeros((5, 20), np.float32)
    biases[3, 7] = 100.0
    allowed = np.zeros((5, 20), bool)
    allowed[4, 0] = True
    first = np.arange(5) == 4
    temperatures, top_ps = (np.array(each, np.float32) for each in zip(*asked, strict=True))
    ways = OwnWays(temperatures, top_ps, biases, allowed)
    found = drawn_own(logits, uniforms, first, ways, SamplingConfig())
    tokens, logprobs, alternatives, likely = map(np.asarray, found)
    for row, (temperature, top_p) in enumerate(asked[:3]):
        config = SamplingConfig(temperature=temperature, top_p=top_p)
        own, _ = drawn(logits[row : row + 1], uniforms[row : row + 1], config)
        assert tokens[row] == own[0]
    assert tokens[3] == 7
    assert tokens[4] == 0  # the only one that may come first
    # what the model says, however the token was drawn
    expected = _log_softmax(logits)
    np.testing.assert_allclose(logprobs, expected[np.arange(5), tokens], rtol=1e-6)
    np.testing.assert_array_equal(alternatives, np.argsort(-expected, axis=-1)[:, :20])
    np.testing.assert_allclose(likely, -np.sort(-expected, axis=-1)[:, :20], rtol=1e-6)


def test_guesses_that_are_drawn_again_with_the_rule_have_the_distribution_of_the_rule():
    """A token of three that fit, guessed freely and drawn again where it does not fit."""
    draws = 40_000
    logits = np.broadcast_to(_logits(8), (draws, 8))
    allowed = np.zeros((draws, 8), bool)
    allowed[:, [1, 4, 6]] = True
    one = np.ones(draws, np.float32)
    ways = OwnWays(one, one, np.zeros((draws, 8), np.float32), allowed)
    guess, again = np.random.default_rng(0).random((2, draws), np.float32)
    never = np.zeros(draws, bool)
    guessed = drawn_own(logits, guess, never, ways, SamplingConfig())[0]
    redrawn = drawn_own(logits, again, ~never, ways, SamplingConfig())[0]
    kept = np.where(np.isin(guessed, [1, 4, 6]), guessed, redrawn)
    expected = np.where(allowed[0], np.exp(_log_softmax(_logits(8))), 0.0)
    expected /= expected.sum()
    found = np.bincount(kept, minlength=8) / draws
    np.testing.assert_allclose(found, expected, atol=0.01)
