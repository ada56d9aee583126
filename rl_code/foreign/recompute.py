"""Log-probabilities of recorded tokens under weights that somebody names, in our own forward pass.

A dump says what the sampler found likely. With the weights that sampled it, or those that trained
on it, each sampled token can be asked again: a place where the two differ by more than rounding is
one where sampler and trainer are not the same model.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from models.sharding import MeshConfig, make_mesh
from models.transformer import Transformer
from pallas_kernels.tokens import sequences
from rl_code.config.read_config import ConfigError
from rl_code.learner.logprobs import target_logprobs
from rl_code.run import origin
from rl_code.types import Context, Trajectory

# Rows are padded to a power of two of tokens, at least so many: few programs for all lengths.
_LEAST = 64
# Targets whose logits are in memory at once.
_TARGETS = 256


class Recomputed:
    """A model that says what recorded tokens had been likely to be.

    weights: as ``config.model.weights``; temperature: at which the tokens were sampled. Raises
    ConfigError for weights that cannot be read.
    """

    def __init__(self, weights: str, temperature: float = 1.0):
        found = origin.find(weights, "--weights")
        if not found.weights:
            raise ConfigError("--weights='': name a folder of weights")
        if not temperature > 0:
            raise ConfigError(f"--temperature={temperature} must be above 0")
        self._mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        self._temperature = temperature
        with jax.set_mesh(self._mesh):
            self._model = found.load(found.shape(), self._mesh)

    def __call__(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with this model's log-probabilities as the trainer's. Raises ConfigError
        for tokens that the model does not have.
        """
        most = max(int(context.tokens.max(initial=0)) for context in trajectory.contexts)
        vocabulary = self._model.config.vocab_size
        if most >= vocabulary:
            raise ConfigError(
                f"token id {most} of {trajectory.task_id}: the weights have {vocabulary} tokens, "
                "so they are those of another model"
            )
        with jax.set_mesh(self._mesh):
            contexts = [
                self._context(context, trajectory.whole(index))
                for index, context in enumerate(trajectory.contexts)
            ]
        return dataclasses.replace(trajectory, contexts=tuple(contexts))

    def _context(self, context: Context, whole: np.ndarray) -> Context:
        """A context with the log-probabilities of its own tokens. whole: with those before it."""
        found = np.zeros(len(context.tokens), np.float32)
        places = np.flatnonzero(context.sampled)
        before = len(whole) - len(context.tokens)
        if not len(places):
            return dataclasses.replace(context, trainer_logprobs=found)
        size = max(_LEAST, 1 << (len(whole) - 1).bit_length())
        row = np.zeros((1, size), np.int32)
        row[0, : len(whole)] = whole
        hidden = _hidden(self._model, row, np.asarray([len(whole)], np.int32))
        for begin in range(0, len(places), _TARGETS):
            own = places[begin : begin + _TARGETS]
            at = np.zeros((1, _TARGETS), np.int32)
            at[0, : len(own)] = before + own
            targets = np.take_along_axis(row, at, axis=1)
            sources = np.maximum(at - 1, 0)
            logprobs = _logprobs(self._model, hidden, sources, targets, self._temperature)
            found[own] = np.asarray(logprobs)[0, : len(own)]
        if before + places[0] == 0:
            found[places[0]] = np.nan  # nothing stands before the first token
        return dataclasses.replace(context, trainer_logprobs=found)


@jax.jit
def _hidden(model: Transformer, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """[1, T, D], the hidden states of a row."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return model.hidden(tokens, positions, sequences(lengths, tokens.shape[1]))


@functools.partial(jax.jit, static_argnames="temperature")
def _logprobs(
    model: Transformer,
    hidden: jax.Array,
    sources: jax.Array,
    targets: jax.Array,
    temperature: float,
) -> jax.Array:
    """[1, M], log-probabilities of the targets that follow these sources."""
    chosen = jnp.take_along_axis(hidden, sources[..., None], axis=1)
    return target_logprobs(model, chosen, targets, temperature)[0]
