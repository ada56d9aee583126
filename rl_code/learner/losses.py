"""Policy losses: from the log-probabilities and advantages of sampled tokens to a loss for each.

Implements the clipped surrogate of PPO with separate bounds (1707.06347; 2503.14476, eq. 10), GSPO
(2507.18071, eq. 5) and CISPO (2506.13585, eq. 4).

Notation: pi is the policy being trained, prox its log-probabilities at the start of the step
(computed by the trainer); r = pi / prox. Arrays are [R, M], one entry per sampled token; the tokens
of a trajectory are neighbours in one row. How losses are averaged and what is added to them is the
same for all of them (``objective``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Tokens = Float[Array, "R M"]

# Log-ratios above it count as it, so that a ratio is at most e^20 = 4.9e8: no ratio, and no product
# of two, is infinite. Beyond it a ratio has no gradient.
MOST_LOG_RATIO = 20.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossTerms:
    """Inputs of a loss, [R, M] each, one entry per sampled token.

    Where ``mask`` is 0, every other field is 0, except ``lengths``, which is 1, and
    ``trajectories``.
    """

    # log pi, float32, with gradient.
    logp: Tokens
    # log prox, float32, without gradient.
    prox: Tokens
    advantages: Tokens
    # 1 for a sampled token, 0 for padding.
    mask: Tokens
    # Number of the token's trajectory, int32; the tokens of a trajectory are neighbours.
    trajectories: Int[Array, "R M"]
    # How many sampled tokens the token's trajectory has, float32.
    lengths: Tokens


class PolicyLoss(Protocol):
    """A loss: a frozen dataclass whose fields are its settings."""

    def __call__(self, terms: LossTerms) -> tuple[Tokens, Bool[Array, "R M"]]:
        """(loss of each token, to be minimised; where the clip took hold)."""


@dataclasses.dataclass(frozen=True)
class Clip:
    """Bounds of a ratio r: [1 - clip_low, 1 + clip_high]. With ``train.epochs=1`` every r is 1."""

    # How far the ratio may fall below 1, and how far it may rise above 1, before it is clipped.
    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self):
        if not (0.0 <= self.clip_low <= 1.0 and self.clip_high >= 0.0):
            raise ValueError(
                f"clip_low={self.clip_low} must be in [0, 1] and clip_high={self.clip_high} at "
                "least 0"
            )

    def clip(self, ratio: Tokens) -> Tokens:
        """The ratio within the bounds."""
        return jnp.clip(ratio, 1.0 - self.clip_low, 1.0 + self.clip_high)

    def surrogate(self, ratio: Tokens, advantages: Tokens) -> tuple[Tokens, Bool[Array, "R M"]]:
        """-min(r A, clip(r) A), and where the second was less.

        Where both are equal the gradient is that of r A, also for a ratio on a bound.
        """
        plain = ratio * advantages
        clipped = self.clip(ratio) * advantages
        # A choice and not ``jnp.minimum``, which shares the gradient of equal values among them:
        # with ``clip_low`` = 0 a ratio of 1, as all are in a first update, would pass 75 % of it.
        cut = clipped < plain
        return -jnp.where(cut, clipped, plain), cut


@dataclasses.dataclass(frozen=True)
class PPO(Clip):
    """-min(r A, clip(r) A) per token (1707.06347, eq. 7; asymmetric bounds 2503.14476, eq. 10)."""

    def __call__(self, terms: LossTerms) -> tuple[Tokens, Bool[Array, "R M"]]:
        return self.surrogate(ratio(terms.logp - terms.prox), terms.advantages)


@dataclasses.dataclass(frozen=True)
class GSPO(Clip):
    """-min(s A, clip(s) A) with s = exp(mean of log r over the trajectory) on each of its tokens
    (2507.18071, eq. 5; bounds of section 5.1).
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __call__(self, terms: LossTerms) -> tuple[Tokens, Bool[Array, "R M"]]:
        log_ratio = (terms.logp - terms.prox) * terms.mask
        mean = per_trajectory(log_ratio, terms.trajectories) / terms.lengths
        return self.surrogate(ratio(mean), terms.advantages)


@dataclasses.dataclass(frozen=True)
class CISPO(Clip):
    """-sg(clip(r)) A log pi per token: clipping never takes a token's gradient away (2506.13585,
    eq. 4; without a lower bound, as there).
    """

    clip_low: float = 1.0

    def __call__(self, terms: LossTerms) -> tuple[Tokens, Bool[Array, "R M"]]:
        weight = jax.lax.stop_gradient(ratio(terms.logp - terms.prox))
        clipped = self.clip(weight)
        return -clipped * terms.advantages * terms.logp, clipped != weight


LOSSES: dict[str, Callable[..., PolicyLoss]] = {"ppo": PPO, "gspo": GSPO, "cispo": CISPO}


def ratio(log_ratio: Tokens) -> Tokens:
    """exp of a log-ratio, or of MOST_LOG_RATIO where it is greater."""
    return jnp.exp(bounded(log_ratio))


def bounded(log_ratio: Tokens) -> Tokens:
    """The log-ratio, at most MOST_LOG_RATIO."""
    return jnp.minimum(log_ratio, MOST_LOG_RATIO)


def per_trajectory(
    values: Tokens,
    trajectories: Int[Array, "R M"],
    reduce: Callable[..., jax.Array] = jax.ops.segment_sum,
) -> Tokens:
    """Each token gets the reduction (a sum) of ``values`` over the tokens of its own trajectory.

    Works within rows, so that no device waits for another: neighbours of equal ``trajectories``
    are one trajectory.
    """
    starts = jnp.concatenate(
        [jnp.zeros_like(trajectories[:, :1]), jnp.diff(trajectories, axis=1) != 0], axis=1
    )
    ids = jnp.cumsum(starts, axis=1)

    def row(values, ids):
        return reduce(values, ids, num_segments=ids.shape[0], indices_are_sorted=True)[ids]

    return jax.vmap(row)(values, ids)
