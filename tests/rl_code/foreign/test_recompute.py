"""The log-probabilities of an imported run are those that its weights give, branch by branch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import huggingface
from models.sharding import MeshConfig, make_mesh
from models.transformer import Transformer
from pallas_kernels.tokens import sequences
from rl_code.config.read_config import ConfigError
from rl_code.foreign import mismatch
from rl_code.foreign.recompute import Recomputed
from rl_code.types import Group
from tests.models.small import small_config
from tests.models.test_huggingface import random_model
from tests.rl_code.foreign import dumps

LONGEST = 512  # tokens of a context

pytestmark = pytest.mark.usefixtures("quick_store")


def whole_logprobs(model: Transformer, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probability of each token but the first, in one plain pass over a sequence."""
    row = np.zeros((1, LONGEST), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(_logprobs(model, row, np.array([len(tokens)]), temperature))[
        : len(tokens) - 1
    ]


@jax.jit
def _logprobs(model, row, lengths, temperature):
    where = sequences(lengths, row.shape[1])
    hidden = model.hidden(row, jnp.arange(row.shape[1])[None], where)
    logits = jax.nn.log_softmax(model.logits(hidden) / temperature, axis=-1)[0, :-1]
    return jnp.take_along_axis(logits, row[0, 1:, None], axis=1)[:, 0]


def test_weights_say_again_what_they_said(tmp_path):
    tokenizer = dumps.tokenizer(tmp_path / "tok")
    dumps.read("prime_rl", dumps.DATA / "prime_rl_a", tmp_path / "run", tokenizer)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        model = random_model(small_config(vocab_size=257, num_layers=2))
        huggingface.save(tmp_path / "weights", model, max_positions=512)
        one = dumps.groups(tmp_path / "run", 1)[0].trajectories[0]
        contexts = []
        for index, context in enumerate(one.contexts):
            own = whole_logprobs(model, one.whole(index), 0.7)[-len(context.tokens) :]
            own = np.pad(own, (len(context.tokens) - len(own), 0))  # the first has none
            logprobs = np.where(context.sampled, own, 0.0).astype(np.float32)
            contexts.append(dataclasses.replace(context, logprobs=logprobs))
    said = dataclasses.replace(one, contexts=tuple(contexts))
    again = Recomputed(str(tmp_path / "weights"), temperature=0.7)(said)
    found = mismatch.of_groups([Group(dumps.groups(tmp_path / "run", 1)[0].task, (again,))])
    assert len(found.tokens) == said.sampled.sum() > 0
    np.testing.assert_allclose(found.trainer, found.sampler, rtol=1e-5, atol=1e-5)
    # what the dump itself has are other numbers
    assert np.abs(again.trainer_logprobs - one.trainer_logprobs).max() > 1
    few = dataclasses.replace(model.config, vocab_size=64)
    with jax.set_mesh(mesh):
        huggingface.save(tmp_path / "few", random_model(few), max_positions=512)
    with pytest.raises(ConfigError, match="the weights have 64 tokens"):
        Recomputed(str(tmp_path / "few"))(said)
    with pytest.raises(ConfigError, match="does not exist"):
        Recomputed(str(tmp_path / "nowhere"))
