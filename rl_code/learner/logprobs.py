"""Log-probabilities of the targets of a batch under a model, perhaps with the sampler's picks."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention.layout import Before
from attention.picks import Noted
from models.sharding import constrain, context_size
from models.target_logprobs import Head
from models.target_logprobs import target_logprobs as of_targets
from models.transformer import LayerTerms
from pallas_kernels.tokens import Tokens
from rl_code.learner import picks
from rl_code.learner.batch import Batch
from rl_code.learner.batching import tokens_of


class Model(Protocol):
    """The learner's view of a model, a pytree of parameters."""

    def hidden_routed(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        where: Tokens,
        runs: int = 0,
        before: Before | None = None,
        align: int = 1,
        documents: bool = False,
    ) -> tuple[jax.Array, LayerTerms]:
        """Int32 [B, T] each -> (hidden states [B, T, D], where tokens went); as
        ``models.transformer.Transformer.hidden_routed``.
        """

    def hidden_noted(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        where: Tokens,
        noted: Noted,
        runs: int = 0,
        documents: bool = False,
    ) -> tuple[jax.Array, jax.Array | None, LayerTerms]:
        """As ``models.transformer.Transformer.hidden_noted``; only for batches with choices."""

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> float32 [..., V]."""

    def head(self) -> Head:
        """The matrix that makes ``logits``."""


def target_logits(
    model: Model, hidden: Float[Array, "R M D"], temperature: float
) -> Float[Array, "R M V"]:
    """Float32 logits of each target / temperature, from the hidden states before the targets."""
    # targets are cut like the tokens of rows, where they can be
    places = None if hidden.shape[1] % context_size() else "slots"
    hidden = constrain(hidden, "batch", places, None)
    logits = constrain(model.logits(hidden).astype(jnp.float32), "batch", places, "vocab")
    return logits / temperature if temperature != 1.0 else logits


def logprobs_of(
    logits: Float[Array, "R M V"], targets: Int[Array, "R M"], entropy_gradient: bool = False
) -> tuple[Float[Array, "R M"], Float[Array, "R M"]]:
    """Log-probability of each target and entropy of its distribution, in nats, of softmax(logits).

    The entropy carries a gradient only when asked to.
    """
    norm = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    if not entropy_gradient:
        logits = jax.lax.stop_gradient(logits)
    log_probs = logits - (norm if entropy_gradient else jax.lax.stop_gradient(norm))[..., None]
    return chosen - norm, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def target_logprobs(
    model: Model,
    hidden: Float[Array, "R M D"],
    targets: Int[Array, "R M"],
    temperature: float,
    entropy_gradient: bool = False,
) -> tuple[Float[Array, "R M"], Float[Array, "R M"]]:
    """``logprobs_of`` the targets that follow these hidden states, without all their logits."""
    return of_targets(model.head(), hidden, targets, temperature, entropy_gradient)


def batch_logprobs(
    model: Model,
    batch: Batch,
    temperature: float,
    entropy_gradient: bool = False,
    runs: int = 0,
    before: Before | None = None,
    replay: bool = False,
) -> tuple[Float[Array, "R M"], Float[Array, "R M"]]:
    """``target_logprobs`` of a batch's targets, differentiable in the model and in ``before.keys``.

    runs: ``PackConfig.runs``. Layers that choose blocks of keys need it to number the blocks of
    each context from the start of its own prompt, so that sharing the prompt changes nothing for
    them. before: what the first phase of a two-phase update computed; ``runs`` counts it too.
    replay: whether layers attend to the blocks that the sampler chose, where ``batch.choices`` has
    them, instead of their own.

    Raises:
      ValueError: ``runs`` is 0 and a layer chooses blocks.
    """
    hidden, _, _ = target_hidden(model, batch, runs, before, replay)
    return target_logprobs(model, hidden, batch.targets, temperature, entropy_gradient)


def target_hidden(
    model: Model, batch: Batch, runs: int, before: Before | None = None, replay: bool = False
) -> tuple[Float[Array, "R M D"], Float[Array, "R M 2"] | None, LayerTerms]:
    """The hidden states that predict a batch's targets; of a batch with choices, how those of the
    model agree with them; and what layers tell beside them.

    Arguments and errors as for ``batch_logprobs``.
    """
    rows = (batch.tokens, batch.positions, tokens_of(batch))
    documents = batch.documents is not None
    shares = None
    if batch.choices is None:
        hidden, layers = model.hidden_routed(*rows, runs, before, documents=documents)
    else:
        noted = picks.noted(batch, replay)
        hidden, shares, layers = model.hidden_noted(*rows, noted, runs, documents=documents)
    return jnp.take_along_axis(hidden, batch.sources[..., None], axis=1), shares, layers
