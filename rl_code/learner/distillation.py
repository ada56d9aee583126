"""Distillation: a teacher's log-probabilities as a part of the loss of a policy.

Implements, for each sampled token, the reverse KL divergence from the policy pi to a teacher pi_T
in the place before the token,

    D = sum over v of pi(v) (log pi(v) - log pi_T(v)),

over the whole vocabulary, or over the teacher's k most likely tokens and all others as one, and its
estimate from the sampled token a, log pi(a) - log pi_T(a), as a negative advantage (on-policy
distillation). The teacher is another model, or the policy's own weights that read feedback beside
the context (SDPO, 2601.20802; OPSD, 2601.18734). ``teacher`` has the teacher's side of it.

Notation as in ``objective``. [R, M] are the targets of a batch, V the vocabulary, K tokens of it.

Departures:
- The k tokens are the teacher's most likely ones, so that they are known before the update.
- D has a gradient through pi in its own place alone: no token is credited with what the teacher
  says of later ones.
- A term is not weighted for off-policy data: D is an expectation over the policy's own next token,
  wherever its context came from. As an advantage it is weighted like every other.
- Terms are averaged as the policy's loss is (``LossConfig.aggregation``), so a trajectory without a
  teacher context counts in the denominator.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.lora import with_trained
from rl_code.config import named
from rl_code.config.named import Named
from rl_code.config.read_config import at_least
from rl_code.learner.feedback import FEEDBACKS, Feedback
from rl_code.learner.losses import Tokens

# Log-probabilities [R, M, V].
Distributions = Float[Array, "R M V"]

# The least probability that all tokens but the k most likely ones have together: in float32 their
# sum is known to about 1e-7. Below it the rest has no gradient.
LEAST_REST = 2.0**-20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Taught:
    """Words of a teacher on the targets of a batch, without gradient."""

    # float32 [R, M], 1 where the teacher read a context of the target, else 0.
    mask: jax.Array
    # float32 [R, M], the teacher's log-probability of the token that was sampled.
    logprobs: jax.Array
    # [R, M, D], the teacher's hidden state before the target, from which its ``logits`` follow.
    hidden: jax.Array | None = None
    # int32 [R, M, K], the teacher's most likely tokens, and their log-probabilities, float32.
    ids: jax.Array | None = None
    top: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Divergence:
    """A form of the divergence: a frozen dataclass whose fields are its settings."""

    # True if the term is taken off the advantage, False if it is a term of the loss.
    as_advantage: ClassVar[bool] = False
    # True if ``__call__`` asks for the teacher's distribution.
    whole: ClassVar[bool] = False
    # True if ``__call__`` reads the policy's distribution. Without it the logits of all targets
    # are never in memory together.
    reads_policy: ClassVar[bool] = True

    def check(self, vocabulary: int) -> None:
        """Raises ValueError for settings that do not go with a vocabulary of so many tokens."""

    def kept(
        self, hidden: Float[Array, "R M D"], teacher: Distributions
    ) -> Mapping[str, jax.Array]:
        """Fields of ``Taught`` beside mask and logprobs, from the teacher's hidden states and
        distributions. Where it asks for the whole distribution these are the hidden states.
        """
        return {"hidden": hidden} if self.whole else {}

    def __call__(
        self,
        policy: Distributions | None,
        chosen: Tokens,
        taught: Taught,
        teacher: Callable[[], Distributions],
    ) -> Tokens:
        """The divergence of each target.

        policy: log pi, with gradient; None without ``reads_policy``. chosen: log pi of the sampled
        tokens. teacher: makes log pi_T from ``taught.hidden``.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Full(Divergence):
    """The reverse KL divergence over the whole vocabulary."""

    whole: ClassVar[bool] = True

    def __call__(self, policy, chosen, taught, teacher):
        return _expected(policy, teacher())


@dataclasses.dataclass(frozen=True)
class TopK(Divergence):
    """The reverse KL divergence over the teacher's k most likely tokens and the rest as one."""

    # Tokens whose log-probabilities are kept of each place.
    k: int = 32

    def __post_init__(self):
        at_least(self, k=1)

    def check(self, vocabulary):
        if self.k >= vocabulary:
            raise ValueError(
                f"k={self.k} must be less than the {vocabulary} tokens of the vocabulary; "
                "divergence='full' takes all of them"
            )

    def kept(self, hidden, teacher):
        top, ids = jax.lax.top_k(teacher, self.k)
        return {"ids": ids.astype(jnp.int32), "top": top}

    def __call__(self, policy, chosen, taught, teacher):
        policy = jnp.take_along_axis(policy, taught.ids, axis=-1)
        return _expected(_with_rest(policy), _with_rest(taught.top))


@dataclasses.dataclass(frozen=True)
class Sampled(Divergence):
    """log pi(a) - log pi_T(a) of the sampled token, as a negative advantage."""

    as_advantage: ClassVar[bool] = True
    reads_policy: ClassVar[bool] = False

    def __call__(self, policy, chosen, taught, teacher):
        return chosen - taught.logprobs


DIVERGENCES: dict[str, Callable[..., Divergence]] = {
    "full": Full,
    "top_k": TopK,
    "sampled": Sampled,
}


@dataclasses.dataclass(frozen=True)
class TeacherConfig:
    """A teacher: its weights, its context, and the form of its part of the loss."""

    # Origin of the teacher's weights, as ``model.weights`` (``rl_code.run.origin``): a folder, a
    # .gguf file, or a run with @ and a step, so that a replay reads the same. "" for the weights
    # that are trained.
    weights: str = ""
    # With weights "": the teacher is the moving average of the weights. After each step it is
    # average x itself + (1 - average) x the new weights. None for the weights of the step.
    average: float | None = None
    # Text that the teacher's context has and the policy's has not: a member of
    # learner.feedback.FEEDBACKS, with its settings. None for a teacher that reads what the policy
    # reads.
    feedback: Named | None = None
    # The most tokens by which the feedback makes a prompt longer. What is longer is cut in its
    # middle.
    feedback_tokens: int = 256
    # Form of the divergence from the teacher: a member of DIVERGENCES, with its settings.
    divergence: Named = Named("full")
    # Weight of the divergence in the loss, or in the advantages. With 0 the teacher is asked for
    # metrics alone.
    coef: float = 1.0
    # Terms above it count as it, and have no gradient (as an advantage also those below its
    # negative): few tokens on which the teacher knows better must not outweigh all others. None
    # for no bound.
    clip: float | None = None
    # Weight of the advantages from rewards; 0 to learn from the teacher alone.
    rewards: float = 1.0
    # Slots of a row that holds the teacher's contexts. In a run None means those of a row of
    # ``train.pack`` and the feedback of its trajectories.
    slots: int | None = None

    def __post_init__(self):
        form = self.form  # a wrong name or setting is an error of the config
        _ = self.told
        at_least(self, feedback_tokens=1, slots=2)
        if self.average is not None and self.weights:
            raise ValueError(
                f"average={self.average} is of the weights that are trained, and the teacher has "
                f"weights={self.weights!r} of its own: set one of the two"
            )
        if self.average is not None and not 0.0 < self.average < 1.0:
            raise ValueError(f"average={self.average} must be between 0 and 1")
        if not self.weights and self.feedback is None and self.average is None:
            raise ValueError(
                "weights='', feedback=None and average=None: the teacher is the policy itself, "
                "which has nothing to teach; set one of the three"
            )
        if not 0.0 <= self.coef < math.inf:
            raise ValueError(f"coef={self.coef} must be at least 0 and finite")
        if not 0.0 <= self.rewards < math.inf:
            raise ValueError(f"rewards={self.rewards} must be at least 0 and finite")
        if self.clip is not None and not 0.0 < self.clip < math.inf:
            raise ValueError(f"clip={self.clip} must be positive and finite, or None")
        if form.as_advantage and form.whole:
            raise ValueError(
                f"divergence={self.divergence.name!r} is an advantage, which has no gradient, and "
                "asks for the teacher's whole distribution: make it a term of the loss"
            )

    @property
    def form(self) -> Divergence:
        """The form itself. Raises ConfigError for a name or a setting that there is not."""
        return named.make(DIVERGENCES, self.divergence, "config.train.teacher.divergence")

    @property
    def told(self) -> Feedback | None:
        """The maker of the feedback; None without. Raises ConfigError as ``form``."""
        if self.feedback is None:
            return None
        return named.make(FEEDBACKS, self.feedback, "config.train.teacher.feedback")


def head_of(config: TeacherConfig, model: Any, guide: Any) -> Any:
    """The teacher whose ``logits`` turn its hidden states into a distribution, without gradient.

    model: the one that is trained, before the update. guide: the teacher itself where its weights
    are others; else what takes the place of ``models.lora.trained`` of the model, or None for the
    model as it is.
    """
    if guide is not None and not config.weights:
        guide = with_trained(model, guide)
    return jax.lax.stop_gradient(model if guide is None else guide)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lesson:
    """A teacher's part of the loss of a micro-batch, [R, M] each."""

    # Advantages in place of the batch's.
    advantages: Tokens
    # A loss of each target, beside the policy's.
    loss: Tokens
    # Sums of metrics over the targets, for ``with_lesson``; no gradient.
    sums: dict[str, jax.Array]


def lesson(
    config: TeacherConfig,
    taught: Taught,
    *,
    policy: Distributions | None,
    chosen: Tokens,
    prox: Tokens | None,
    advantages: Tokens,
    mask: Tokens,
    teacher: Callable[[], Distributions],
) -> Lesson:
    """The teacher's part of a loss.

    policy, chosen, teacher: as for ``Divergence``. prox: log prox of the sampled tokens, or None
    for ``chosen`` without gradient: an advantage is the same in all epochs of a batch. mask: of
    the batch, 1 for a target.
    """
    form = config.form
    mask = mask * taught.mask
    if form.as_advantage:
        chosen = jax.lax.stop_gradient(chosen if prox is None else prox)
    found = jnp.where(mask > 0.0, form(policy, chosen, taught, teacher), 0.0)
    bounded = found
    if config.clip is not None:
        bounded = jnp.minimum(found, config.clip)
        if form.as_advantage:
            bounded = jnp.maximum(bounded, -config.clip)
    sums = {
        "teacher/share": mask,
        "teacher/divergence": found,
        "teacher/clipped": (bounded != found).astype(jnp.float32),
        # above 0 where the teacher finds the sampled token likelier than the policy does
        "teacher/advantage": jnp.where(mask > 0.0, taught.logprobs - chosen, 0.0),
    }
    sums = {name: jnp.sum(x * mask) for name, x in sums.items()}
    term = config.coef * bounded
    advantages = config.rewards * advantages
    if form.as_advantage:
        advantages = advantages - jax.lax.stop_gradient(term)
        term = jnp.zeros_like(term)
    return Lesson(advantages, term, jax.lax.stop_gradient(sums))


def finished(means: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Metrics of a whole batch: those of a teacher are means over the targets that it was asked
    about, which are teacher/share of all.
    """
    means = dict(means)
    share = means.get("teacher/share")
    if share is not None:
        for name in ("teacher/divergence", "teacher/clipped", "teacher/advantage"):
            means[name] = means[name] / jnp.where(share > 0.0, share, 1.0)
    return means


def _expected(policy: Distributions, teacher: Distributions) -> Tokens:
    """The sum of pi (log pi - log pi_T) over the last axis."""
    weight = jnp.exp(policy)
    # a token without probability adds nothing, however little the teacher thinks of it
    terms = jnp.where(weight > 0.0, weight * (policy - jax.lax.stop_gradient(teacher)), 0.0)
    return jnp.sum(terms, axis=-1)


def _with_rest(top: Float[Array, "R M K"]) -> Float[Array, "R M K+1"]:
    """Log-probabilities of some tokens, and that of all others as one."""
    mass = jnp.minimum(jax.nn.logsumexp(top, axis=-1, keepdims=True), math.log1p(-LEAST_REST))
    return jnp.concatenate([top, jnp.log(-jnp.expm1(mass))], axis=-1)


def chosen_of(policy: Distributions, targets: Int[Array, "R M"]) -> Tokens:
    """Log-probabilities of the sampled tokens."""
    return jnp.take_along_axis(policy, targets[..., None], axis=-1)[..., 0]
