"""A scalar head reads one hidden state, in float32, and packing changes nothing."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.methods.dense import Dense
from models.scalar_head import ScalarHead, with_head
from rl_code.learner.scored import Text, pack_scored, scores_in
from tests.models.small import small_model


def test_a_head_is_a_product_and_a_bias():
    head = ScalarHead(3)
    hidden = jnp.array([[1.0, 2.0, 3.0], [0.0, -1.0, 0.5]], jnp.bfloat16)
    assert np.asarray(head(hidden)).tolist() == [0.0, 0.0]
    head.weight[...] = jnp.array([0.5, -1.0, 2.0])
    head.bias[...] = jnp.array([0.25])
    # 0.5 - 2 + 6 + 0.25, and 1 + 1 + 0.25
    assert np.asarray(head(hidden)).tolist() == [4.75, 2.25]
    assert head(hidden).dtype == jnp.float32


def random_head(tied: bool):
    model = with_head(small_model((Dense(),), num_layers=2, tied_embeddings=tied))
    drawn = np.random.default_rng(1).standard_normal(16).astype(np.float32)
    model.head.weight[...] = jax.device_put(drawn)
    return model


@functools.partial(jax.jit, static_argnames="length")
def scores_of(model, batch, length: int):
    """The head's value at every one of the first slots of a batch, float32 [rows, length]."""
    parts = batch.tokens, batch.positions, batch.where
    return model.head(model.backbone.hidden(*jax.tree.map(lambda x: x[:, :length], parts)))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.quick(first=1)
def test_a_packed_text_has_the_score_that_it_has_alone(tied):
    model = random_head(tied)
    assert not hasattr(model.backbone, "unembed")
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 32, n).tolist() for n in (5, 9, 3, 12, 7)]
    batch, places = pack_scored([[Text.whole(x)] for x in texts], rows=3, slots=16, most=3)
    scores = np.asarray(scores_in(model, batch))
    assert len(places) == 5 == np.count_nonzero(batch.mask)
    for text, ((row, index),) in zip(texts, places, strict=True):
        alone, _ = pack_scored([[Text.whole(text)]], rows=3, slots=16, most=3)
        one = np.asarray(scores_in(model, alone))[0, 0]
        assert scores[row, index] == pytest.approx(one, abs=1e-5)
        # all slots of it, and of the longest one also without those behind it
        for length in (16, 12)[: 1 + (len(text) == 12)]:
            expected = np.asarray(scores_of(model, alone, length))[0, len(text) - 1]
            assert one == pytest.approx(float(expected), abs=1e-5)
