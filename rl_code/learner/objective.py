"""The objective of an update: a policy loss, weighted for off-policy data, averaged, with
penalties; and its metrics.

Implements the KL estimators k1, k2 and k3. Implements three kinds of weights for tokens that were
sampled by another policy than the trainer's: decoupled (2505.24298, eq. 5), truncated, and masked
importance sampling.

Notation as in ``losses``; mu is the sampler's policy, w = prox / mu. Arrays are [R, M] float32.

Departures:
- Denominators are those of the whole batch (``Denominators``). The loss of a micro-batch is
  therefore a sum, which can be added up over micro-batches and devices.
- A token whose weight is masked to 0 still counts in the denominator.
- k1 is a part of the reward: ``kl_coef`` times its sum over the trajectory is taken off the
  trajectory's advantage, after the advantages were normalised.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from rl_code.config import named
from rl_code.config.named import Named
from rl_code.config.read_config import follows
from rl_code.learner.batch import Batch
from rl_code.learner.demonstrated import WEIGHTS
from rl_code.learner.distillation import Lesson, finished
from rl_code.learner.losses import (
    LOSSES,
    MOST_LOG_RATIO,
    LossTerms,
    PolicyLoss,
    Tokens,
    bounded,
    per_trajectory,
    ratio,
)


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Choice of the loss, of its average and of the weights of off-policy data."""

    # The policy loss: a member of LOSSES, with its settings. Its clip bounds the ratio to the
    # policy at the start of the step, and does nothing where ``train.epochs`` is 1: that ratio is
    # then 1, however stale the samples are. What bounds stale tokens is ``correction``.
    policy: Named = Named("ppo")
    # How the losses of tokens are averaged. "token": their sum / sampled tokens. "sequence": the
    # mean over trajectories of the mean over their tokens. "constant": their sum /
    # (constant_length * trajectories). Tokens and trajectories are counted over the whole batch.
    aggregation: Literal["token", "sequence", "constant"] = "token"
    # The divisor of aggregation "constant". In a run None means the most tokens that a trajectory
    # can sample.
    constant_length: int | None = None
    # Weight of the KL divergence from the reference policy; 0 for none.
    kl_coef: float = 0.0
    # How that divergence is estimated. "k2" and "k3" are terms of the loss; "k1" is taken off the
    # advantages.
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    # Weight of the entropy, which is rewarded; 0 for none.
    entropy_coef: float = 0.0
    # How tokens are weighted that another version of the weights sampled, see
    # ``correction_weights``. "auto" is "decoupled" where data may be stale, else "none".
    correction: Literal[
        "auto",
        "none",
        "decoupled",
        "truncated",
        "masked_token",
        "masked_sequence",
        "masked_geometric",
    ] = "auto"
    # The "masked_*" corrections give the weight 0 to a ratio below it.
    correction_low: float = 0.0
    # "truncated" lowers greater ratios to it; the "masked_*" corrections give them the weight 0.
    correction_high: float = 2.0
    # Weight of tokens of demonstrations (``train.demonstrations``), a key of
    # ``demonstrated.WEIGHTS``.
    demonstrated: Literal["importance", "shaped", "imitated"] = "shaped"
    # g of "shaped": the probability at which a demonstrated token counts most.
    demonstrated_shape: float = 0.1
    # The logits are divided by it, as the sampler did.
    temperature: float = follows("rollout.sampling.temperature", 1.0)

    def __post_init__(self):
        _ = self.member  # a wrong name or setting is an error of the config
        choices = {
            "aggregation": AGGREGATIONS,
            "kl_estimator": KL,
            "correction": ("auto", *CORRECTIONS),
            "demonstrated": WEIGHTS,
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ValueError(
                    f"{field}={getattr(self, field)!r} is not one of {sorted(allowed)}"
                )
        if self.constant_length is not None and self.constant_length <= 0:
            raise ValueError(f"constant_length={self.constant_length} must be positive")
        if not 0.0 < self.demonstrated_shape < math.inf:
            raise ValueError(
                f"demonstrated_shape={self.demonstrated_shape} must be above 0 and finite"
            )
        if not 0.0 <= self.correction_low <= self.correction_high:
            raise ValueError(
                f"correction_low={self.correction_low} must be in [0, "
                f"correction_high={self.correction_high}]"
            )
        if not 0.0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be positive and finite")
        for name in ("kl_coef", "entropy_coef"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be finite")

    @property
    def member(self) -> PolicyLoss:
        """The loss itself. Raises ConfigError for a name or a setting that there is not."""
        return named.make(LOSSES, self.policy, "config.train.loss.policy")

    def for_staleness(self, max_staleness: int) -> LossConfig:
        """With the correction that is meant for data of so many versions before."""
        automatic = "decoupled" if max_staleness else "none"
        return (
            dataclasses.replace(self, correction=automatic) if self.correction == "auto" else self
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Denominators:
    """Counts over the whole batch, float32 scalars."""

    # Sampled tokens.
    tokens: jax.Array
    # Trajectories with at least one sampled token.
    trajectories: jax.Array
    # Slots that hold a token, sampled or not.
    slots: jax.Array

    @classmethod
    def of(
        cls, mask: Tokens, lengths: Tokens, segments: Int[Array, "R S"] | None = None
    ) -> Denominators:
        """Counted from the mask and the trajectories' lengths; at least 1 each.

        segments: of every slot, 0 for padding; None counts the sampled tokens alone as slots.
        """
        tokens = jnp.sum(mask)
        # Each of a trajectory's n tokens adds 1 / n, so a trajectory adds 1, up to rounding.
        trajectories = jnp.sum(jnp.where(mask > 0.0, mask / lengths, 0.0))
        tokens = jnp.maximum(tokens, 1.0)
        slots = tokens if segments is None else real_slots(segments)
        return cls(tokens, jnp.maximum(jnp.round(trajectories), 1.0), slots)


def real_slots(segments: Int[Array, "R S"]) -> jax.Array:
    """Number of slots that hold a token; at least 1."""
    return jnp.maximum(jnp.sum((segments > 0).astype(jnp.float32)), 1.0)


# KL(pi || ref) of one sampled token from d = log ref - log pi
# (http://joschu.net/blog/kl-approx.html). k3 takes a d above MOST_LOG_RATIO for it.
KL: dict[str, Callable[[Tokens], Tokens]] = {
    "k1": lambda d: -d,
    "k2": lambda d: 0.5 * jnp.square(d),
    "k3": lambda d: jnp.expm1(bounded(d)) - bounded(d),
}


# Weight of each token in the sum: (config, mask, lengths, denominators) -> [R, M].
AGGREGATIONS: dict[str, Callable[..., Tokens]] = {
    "token": lambda config, mask, lengths, total: mask / total.tokens,
    "sequence": lambda config, mask, lengths, total: mask / (lengths * total.trajectories),
    "constant": lambda config, mask, lengths, total: (
        mask / (config.constant_length * total.trajectories)
    ),
}


CORRECTIONS = (
    "none",
    "decoupled",
    "truncated",
    "masked_token",
    "masked_sequence",
    "masked_geometric",
)


def correction_weights(
    config: LossConfig,
    log_w: Tokens,
    mask: Tokens,
    trajectories: Int[Array, "R M"],
    lengths: Tokens,
) -> tuple[Tokens, Bool[Array, "R M"]]:
    """The weight of each token's loss, since mu sampled the token, and where a bound changed it.

    The weights carry no gradient. log_w: log prox - log mu, 0 outside the mask. With w the
    ``losses.ratio`` of log_w the weight is

      none: 1.
      decoupled: w.
      truncated: min(w, correction_high).
      masked_token: w.
      masked_sequence: the product of w over the trajectory.
      masked_geometric: the geometric mean of w over the trajectory.

    The weights of the last three are 0 outside [correction_low, correction_high].
    """
    kind = config.correction
    log_w = jax.lax.stop_gradient(log_w)
    if kind not in CORRECTIONS:
        raise ValueError(f"correction={kind!r} is to be decided first, by for_staleness")
    nowhere = jnp.zeros(log_w.shape, bool)
    if kind == "none":
        return jnp.ones_like(log_w), nowhere
    if kind == "decoupled":
        return ratio(log_w), nowhere
    if kind == "truncated":
        weight = ratio(log_w)
        return jnp.minimum(weight, config.correction_high), weight > config.correction_high
    if kind != "masked_token":
        log_w = per_trajectory(log_w * mask, trajectories)
    if kind == "masked_geometric":
        log_w = log_w / lengths
    weight = ratio(log_w)
    outside = (weight < config.correction_low) | (weight > config.correction_high)
    return jnp.where(outside, 0.0, weight), outside


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Terms:
    """Metrics of a micro-batch, by name."""

    # Shares of means over the whole batch: added up over micro-batches they are the means.
    means: dict[str, jax.Array]
    # At least 0; over micro-batches their maximum is taken.
    maxima: dict[str, jax.Array]

    def merge(self, other: Terms) -> Terms:
        """The terms of both micro-batches together."""
        return Terms(
            jax.tree.map(jnp.add, self.means, other.means),
            jax.tree.map(jnp.maximum, self.maxima, other.maxima),
        )


# Means that tell of the policy's samples, so that tokens of demonstrations have no part in them.
OF_OWN_TOKENS = frozenset(
    {
        "policy/kl",
        "policy/kl_k1",
        "policy/entropy",
        "policy/clip_fraction",
        "policy/truncated_fraction",
        "policy/step_kl",
        "policy/mismatch_mean",
        "policy/mismatch_k1",
        "policy/mismatch_k3",
        "weight",
        "weight_squared",
    }
)


def policy_metrics(terms: Terms) -> dict[str, jax.Array]:
    """Metrics of the whole batch by name; policy/ess is the effective sample size of w as a share
    of the tokens. With demonstrations, policy/demonstrated is the share of tokens that stand in
    them, policy/demonstrated_logp the mean of log pi over these, and the other means of policy/ are
    over the policy's own tokens.
    """
    means = finished(terms.means)
    if "policy/demonstrated" in means:
        shown = means["policy/demonstrated"]
        own = 1.0 - shown
        for name in OF_OWN_TOKENS & means.keys():
            means[name] /= jnp.where(own > 0.0, own, 1.0)
        means["policy/demonstrated_logp"] /= jnp.where(shown > 0.0, shown, 1.0)
    first = means.pop("weight")
    second = means.pop("weight_squared")
    return (
        means
        | terms.maxima
        | {"policy/ess": jnp.square(first) / jnp.where(second > 0.0, second, 1.0)}
    )


def policy_loss(
    config: LossConfig,
    batch: Batch,
    denominators: Denominators,
    *,
    logp: Tokens,
    entropy: Tokens,
    prox: Tokens | None,
    ref: Tokens | None,
    lesson: Lesson | None = None,
) -> tuple[jax.Array, Terms]:
    """This micro-batch's share of the loss, a float32 scalar, and of the metrics.

    Args:
      logp: log pi, with gradient.
      entropy: the entropy of each token's distribution, in nats.
      prox: log prox. None means log pi without gradient, which is right for the first update on a
        batch. Log mu in its place gives the ratio to the sampler.
      ref: log-probabilities of the reference policy; needed if kl_coef is not 0.
      lesson: a teacher's part of the loss, with advantages in place of the batch's; None for none.
    Values where ``batch.mask`` is 0 do not matter, even NaN.

    Raises:
      ValueError: kl_coef is not 0 and ref is None.
    """
    mask, trajectories = batch.mask, batch.trajectories
    logp = _real(logp, mask)
    sampler = _real(batch.logprobs, mask)
    entropy = _real(entropy, mask)
    advantages = _real(batch.advantages if lesson is None else lesson.advantages, mask)
    lengths = jnp.where(mask > 0.0, batch.lengths, 1.0)
    prox = jax.lax.stop_gradient(logp if prox is None else _real(prox, mask))
    log_w = prox - sampler
    shown = None if batch.demonstrated is None else (batch.demonstrated > 0.0) & (mask > 0.0)
    if shown is not None:
        log_w = jnp.where(shown, 0.0, log_w)
        entropy = jnp.where(shown, 0.0, entropy)
    kl, values = _divergence(config, logp, None if ref is None else _real(ref, mask), shown)
    if config.kl_estimator == "k1":
        advantages = advantages - jax.lax.stop_gradient(per_trajectory(kl * mask, trajectories))
        kl = jnp.zeros_like(kl)
    surrogate, clipped = config.member(
        LossTerms(logp, prox, advantages, mask, trajectories, lengths)
    )
    weight, cut = correction_weights(config, log_w, mask, trajectories, lengths)
    surrogate = weight * surrogate
    if shown is not None:
        value = WEIGHTS[config.demonstrated](logp, config.demonstrated_shape)
        surrogate = jnp.where(shown, -advantages * value, surrogate)
    share = AGGREGATIONS[config.aggregation](config, mask, lengths, denominators)
    loss = jnp.sum(share * (surrogate + kl - config.entropy_coef * entropy))
    if lesson is not None:
        loss += jnp.sum(share * lesson.loss)

    values |= mismatch(log_w) | {
        "policy/entropy": entropy,
        "policy/clip_fraction": clipped,
        "policy/truncated_fraction": cut,
        "policy/step_kl": KL["k3"](jnp.clip(logp - prox, -MOST_LOG_RATIO, MOST_LOG_RATIO)),
    }
    if shown is not None:
        values = {name: jnp.where(shown, 0.0, x) for name, x in values.items()}
        values |= {"policy/demonstrated": shown, "policy/demonstrated_logp": shown * logp}
    means = {name: jnp.sum(x * mask) / denominators.tokens for name, x in values.items()}
    means["train/policy_loss"] = jnp.sum(share * surrogate)
    if lesson is not None:
        means |= {name: x / denominators.tokens for name, x in lesson.sums.items()}
    oldest = _oldest(batch)
    means["rollout/staleness_mean"] = jnp.sum(mask * oldest / lengths) / denominators.trajectories
    maxima = {
        "policy/mismatch_max": jnp.max(mask * jnp.abs(log_w)),
        "rollout/staleness_max": jnp.max(mask * oldest),
    }
    return loss, jax.lax.stop_gradient(Terms(means, maxima))


def _real(x: Tokens, mask: Tokens) -> Tokens:
    """Values in float32, 0 outside the mask."""
    return jnp.where(mask > 0.0, x.astype(jnp.float32), 0.0)


def _divergence(
    config: LossConfig, logp: Tokens, ref: Tokens | None, shown: Bool[Array, "R M"] | None
) -> tuple[Tokens, dict[str, Tokens]]:
    """The divergence from the reference policy per token, times its coefficient, and what is told
    of it. shown: tokens of demonstrations, whose divergence is no part of the loss.
    """
    if ref is None:
        if config.kl_coef != 0.0:
            raise ValueError(
                f"kl_coef={config.kl_coef} needs the reference's log-probabilities, ref is None"
            )
        return jnp.zeros_like(logp), {}
    d = jax.lax.stop_gradient(ref) - logp
    told = {"policy/kl": KL["k3"](d), "policy/kl_k1": KL["k1"](d)}
    kl = config.kl_coef * KL[config.kl_estimator](d)
    return kl if shown is None else jnp.where(shown, 0.0, kl), told


def _oldest(batch: Batch) -> Int[Array, "R M"]:
    """The staleness of the oldest token of each token's trajectory."""
    stale = jnp.where(batch.mask > 0.0, batch.staleness, 0)
    return per_trajectory(stale, batch.trajectories, jax.ops.segment_max)


def mismatch(log_w: Tokens) -> dict[str, Tokens]:
    """Per token how far the trainer's policy is from the sampler's, by name of the metric.

    weight and weight_squared become policy/ess once their sums are known (``policy_metrics``).
    """
    near = jnp.clip(log_w, -MOST_LOG_RATIO, MOST_LOG_RATIO)  # keeps the squares finite
    return {
        "policy/mismatch_mean": jnp.abs(log_w),
        "policy/mismatch_k1": KL["k1"](near),
        "policy/mismatch_k3": KL["k3"](near),
        "weight": jnp.exp(near),
        "weight_squared": jnp.exp(2.0 * near),
    }
