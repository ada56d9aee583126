"""Rows whose tokens are drawn in a way of their own, beside others that are drawn as configured.

A client of a served model may ask for another temperature, for biases, or for a text of some form.
Such rows have dispatches of their own, so that the others run the same program as without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rl_code.rollout.sampling import SamplingConfig, invert_cdf, truncate
from rl_code.types import MOST_ALTERNATIVES


class OwnWay(Protocol):
    """Drawing of the tokens of one row. Its methods are called between two dispatches."""

    # 0 takes the most likely token.
    temperature: float
    # As ``SamplingConfig.top_p``.
    top_p: float
    # True if the biases depend on the tokens so far, so that a dispatch samples one.
    one_by_one: bool
    # How many draws were not kept so far. What is drawn again has other random numbers.
    redrawn: int

    def prepare(self, message: Sequence[int], biases: np.ndarray, allowed: np.ndarray) -> None:
        """Writes what is added to the logits of the next tokens, float32 [V], and which tokens may
        come first, bool [V].

        message: the tokens that were sampled so far.
        """
        ...

    def kept(self, tokens: Sequence[int]) -> int:
        """Number of the tokens drawn next that are kept: those in front of the first one
        that may not stand where it does. At least 1, since the first one was allowed.

        So a text of a form is guessed freely and drawn again, with the rule, where the guess was
        wrong. Each token has the distribution of one that is drawn with the rule: p(t) of a guess
        that fits, and of one that does not the share p(t) / P(fits) once more.
        """
        ...

    def note(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Takes the most likely tokens in place of each token that was sampled, with their
        log-probabilities: [sampled, MOST_ALTERNATIVES] each, the most likely first.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OwnWays:
    """The ways of all rows of a dispatch."""

    # float32 [slots] each.
    temperatures: jax.Array
    top_ps: jax.Array
    # float32 [slots, V], added to the logits.
    biases: jax.Array
    # bool [slots, V], whether a token may be the first one of the dispatch.
    allowed: jax.Array


def empty_ways(rows: int, vocab: int) -> OwnWays:
    """Numpy arrays that change nothing."""
    return OwnWays(
        temperatures=np.ones(rows, np.float32),
        top_ps=np.ones(rows, np.float32),
        biases=np.zeros((rows, vocab), np.float32),
        allowed=np.ones((rows, vocab), bool),
    )


def sample_own(
    logits: Float[Array, "B V"],
    uniforms: Float[Array, " B"],
    first: Bool[Array, " B"],
    ways: OwnWays,
    config: SamplingConfig,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Int[Array, "B A"], Float[Array, "B A"]]:
    """Draws a token per row in its own way; returns (tokens, their log-probabilities, the most
    likely tokens, their log-probabilities).

    first: whether the token is the first one of its row in the dispatch.
    Log-probabilities are those of ``sampling.sample`` with the config's temperature and without
    biases: what the model says, however a client has it drawn. The config's top-k holds too.
    """
    logprobs = jax.nn.log_softmax(logits / (config.temperature or 1.0))
    may_come = ways.allowed | ~first[:, None]
    biased = jnp.where(may_come, logits + ways.biases, -jnp.inf)
    best = jnp.argmax(biased, axis=-1)
    greedy = ways.temperatures == 0
    probs = jax.nn.softmax(biased / jnp.where(greedy, 1.0, ways.temperatures)[:, None])
    cuts = (config.top_k > 0) | jnp.any(ways.top_ps < 1)
    probs = jax.lax.cond(
        cuts, lambda: truncate(probs, config.top_k, ways.top_ps[:, None]), lambda: probs
    )
    tokens = jnp.where(greedy, best, invert_cdf(probs, uniforms)).astype(jnp.int32)
    likely, alternatives = jax.lax.top_k(logprobs, min(MOST_ALTERNATIVES, logits.shape[-1]))
    drawn = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return tokens, drawn, alternatives.astype(jnp.int32), likely
