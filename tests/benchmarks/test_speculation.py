"""The model of the benchmark quotes a file as its table says, and guesses pay where it says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.speculation import break_even, quoting
from models.transformer import Transformer
from pallas_kernels.tokens import packed_rows
from tests.models.small import small_config


def test_a_token_of_the_file_is_followed_by_its_next_one():
    config = small_config(vocab_size=96, embed_dim=128, num_layers=2, tied_embeddings=False)
    file = np.random.default_rng(0).permutation(96)[:32]

    @jax.jit
    def probabilities(file):
        model = quoting(Transformer(config, nnx.Rngs(0)), file)
        tokens = jnp.concatenate([file, file[:3]])[None]
        ones = jnp.ones_like(tokens)
        positions = jnp.cumsum(ones, axis=1) - 1
        hidden = model.hidden(tokens, positions, packed_rows(ones, 0 * ones, positions), align=0)
        return jax.nn.softmax(model.logits(hidden))[0]

    found = np.asarray(probabilities(jnp.asarray(file)))[:-1]
    following = np.append(file, file[:3])[1:]
    assert found[np.arange(len(found)), following].mean() > 0.9
    assert np.delete(found, file, axis=1).max() < 1e-6


def test_guesses_pay_from_where_a_step_brings_what_it_costs():
    # one guess: 1 + p tokens a step; two: 1 + p + p * p
    assert break_even(1.25, 1) == pytest.approx(0.25, abs=1e-5)
    assert break_even(1.75, 2) == pytest.approx(0.5, abs=1e-5)
    assert break_even(0.9, 4) == pytest.approx(0.0, abs=1e-5)
    assert break_even(5.0, 4) == pytest.approx(1.0, abs=1e-5)
    assert break_even(5.1, 4) == float("inf")
