"""The policy is asked by the weights that sampled, and its answer does not depend on padding."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention.methods.dense import Dense
from attention.methods.nsa import NSA
from models.sharding import MeshConfig, make_mesh
from models.transformer import Transformer
from pallas_kernels.tokens import Tokens
from rl_code.config.read_config import ConfigError
from rl_code.run.asking import ask
from tests import draws
from tests.models.small import small_config
from tests.rl_code.rewards.folders import make_tokenizer

TEXTS = ["Task: add one", "Work:\n+x = 1\nIs it right?", "<|eot|>"]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def model(tokenizer, method, seed: int) -> Transformer:
    config = small_config(
        vocab_size=tokenizer.vocab_size, num_layers=1, qk_norm=True, attention=(method,)
    )
    with draws.fewer_programs():
        made = Transformer(config, nnx.Rngs(seed))
    return jax.device_put(made, jax.devices()[0])


def asked(tokenizer, schedulers, texts=TEXTS, newest: int = 3, most: int = 60):
    trajectory = SimpleNamespace(versions=np.array([-1, newest - 1, newest]))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    return ask(schedulers, tokenizer, mesh, trajectory, texts, most)


def by_hand(tokenizer, one: Transformer, text: str) -> str:
    ids = np.array([tokenizer.encode(tokenizer.marks.quote(text))])
    return tokenizer.decode([int(np.argmax(last_logits(one, ids)))])


@jax.jit
def last_logits(one: Transformer, ids: jax.Array) -> jax.Array:
    places = jnp.arange(ids.shape[1])[None]
    none = jnp.zeros_like(places)
    where = Tokens(segments=none + 1, branches=none, documents=none, order=places)
    return one.logits(one.hidden(ids, places, where)[0, -1])


def test_the_answer_is_the_most_likely_token_of_the_weights_that_sampled(tokenizer):
    models = [model(tokenizer, Dense(), seed) for seed in range(3)]
    schedulers = [
        SimpleNamespace(weights=one, version=version)
        for one, version in zip((*models, None), (3, 4, 2, 3), strict=True)
    ]
    for newest, right in ((3, 0), (4, 1)):
        found = asked(tokenizer, schedulers, newest=newest)
        assert found == [by_hand(tokenizer, models[right], text) for text in TEXTS]
    # of no version: those that are loaded
    assert None not in asked(tokenizer, schedulers, newest=9)


def test_a_text_that_is_too_long_has_no_answer(tokenizer):
    one = SimpleNamespace(weights=model(tokenizer, Dense(), 0), version=3)
    found = asked(tokenizer, [one], ["x" * 200, TEXTS[0], ""])
    assert [answer is None for answer in found] == [True, False, True]
    with pytest.raises(ConfigError, match="no weights are loaded"):
        asked(tokenizer, [])


@pytest.mark.long
def test_layers_that_choose_blocks_are_asked_in_whole_blocks(tokenizer):
    one = SimpleNamespace(weights=model(tokenizer, NSA(block=32), 0), version=3)
    assert None not in asked(tokenizer, [one], most=50)
