"""Conversion of answers and reactions to the learner's input: trajectories, rewards, advantages.

Token in, token out: ids, log-probabilities and versions are those that the server recorded, and
nothing is tokenised again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64

from people.feedback.records import AnswerRecord
from rl_code.environment.documents import OUTSIDE
from rl_code.learner.rounding import rounding_of
from rl_code.types import Context, Group, Reward, Task, Trajectory


def groups_of(
    answers: Sequence[AnswerRecord],
    advantages: Sequence[float],
    rewards: Sequence[Reward],
    earlier: Sequence[AnswerRecord] = (),
    counts: Mapping[int, int] | None = None,
) -> tuple[list[Group], int]:
    """A group of one trajectory for each answer, in order, and how many answers were left out.

    What stands before an answer in its session is read and not trained on: it is another answer's,
    with a reward of its own. Left out are answers of which an earlier part of the session is
    neither among ``answers`` nor among ``earlier``, so that what the policy saw is not known, and
    those without a sampled token, those that were sampled in another way than the server's own, and
    those that their client did not want to be trained on (``_may_train``). The total of a
    trajectory's reward is its advantage (``baselined``).

    earlier: other answers of the same sessions (``FeedbackStore.earlier``). They are read alone.
    counts: version -> the number by which the learner counts it; None for its own.
    """
    # (user, session) -> the tokens so far of each of its contexts
    sessions: dict[tuple[str, str], dict[int, _Seen]] = {}
    given: dict[str, _Seen] = {}
    for answer in sorted([*earlier, *answers], key=_order):
        if not answer.given and not answer.tokens:
            continue  # its server was killed: nothing is known of what it was asked
        # sessions are named by clients, so a name is its user's own
        contexts = sessions.setdefault((answer.user, answer.session), {})
        if answer.kept == 0:
            # A conversation counts its contexts up, so those from here on are of one that the
            # server had forgotten under the same name, such as before it was started again.
            for number in [one for one in contexts if one >= answer.context]:
                del contexts[number]
        seen = _before(answer, contexts)
        if seen is not None:
            given[answer.id] = seen
            contexts[answer.context] = seen.and_then(answer.tokens, None)
    groups = []
    for answer, advantage, reward in zip(answers, advantages, rewards, strict=True):
        if answer.id in given and answer.tokens and _may_train(answer):
            trajectory = _trajectory(answer, given[answer.id], float(advantage), reward, counts)
            groups.append(Group(Task(id=answer.id, messages=()), (trajectory,)))
    return groups, len(answers) - len(groups)


def baselined(group: Group) -> list[float]:
    """A member of ADVANTAGES: the rewards as they are, from which whoever made the groups has
    subtracted a baseline already.
    """
    return [trajectory.reward.total for trajectory in group.trajectories]


def leave_one_out(
    rewards: Float64[np.ndarray, " n"], weights: Float64[np.ndarray, " n"]
) -> Float64[np.ndarray, " n"]:
    """weight x (reward - weighted mean of the others' rewards); 0 where there are no others, and
    where the difference is rounding.

    The mean of the others does not depend on the answer itself, so it adds no bias (RLOO,
    2402.14740). It is weighted, so that who counts little moves the advantages of others little.
    """
    total, count = np.sum(weights * rewards), np.sum(weights)
    others = count - weights
    has_others = others > 1e-12 * max(count, 1e-12)
    mean = np.where(has_others, total - weights * rewards, 0.0) / np.where(has_others, others, 1.0)
    differs = np.abs(rewards - mean) > rounding_of(rewards)
    return np.where(has_others & differs, weights * (rewards - mean), 0.0)


def spoiled(model: Any, noise: float, seed: Sequence[int]) -> Any:
    """Weights with normal noise on each array: ``noise`` times the root mean square of the array.
    The same seed gives the same.
    """
    arrays, form = jax.tree.flatten(model)
    rng = np.random.default_rng(seed)
    keys = [jax.random.key(rng.integers(2**32)) for _ in arrays]

    def with_noise(array: jax.Array, key: jax.Array) -> jax.Array:
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return array
        scale = noise * jnp.sqrt(jnp.mean(jnp.square(array.astype(jnp.float32))))
        added = scale * jax.random.normal(key, array.shape)
        return jax.device_put((array + added).astype(array.dtype), array.sharding)

    return form.unflatten([with_noise(*pair) for pair in zip(arrays, keys, strict=True)])


def _may_train(answer: AnswerRecord) -> bool:
    """False for an answer that a client had sampled otherwise, at temperature 0 say, since the
    policy did not choose it; and for one of a request with ``store`` false.
    """
    return "sampling" not in answer.extra and answer.extra.get("store") is not False


def _order(answer: AnswerRecord) -> tuple[float, int]:
    """Sort key of answers: time, and for the answers to one request their index there."""
    return answer.asked_at, answer.extra.get("index", 0)


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Tokens of a context, and what each of them is; None for that without documents."""

    tokens: tuple[int, ...]
    kinds: tuple[int, ...] | None

    def first(self, count: int) -> _Seen:
        return _Seen(self.tokens[:count], self.kinds and self.kinds[:count])

    def and_then(self, tokens: tuple[int, ...], kinds: tuple[int, ...] | None) -> _Seen:
        """The context with further tokens; kinds: None for tokens outside of documents."""
        more = (OUTSIDE,) * len(tokens) if kinds is None else kinds
        own = None if self.kinds is None else self.kinds + more
        return _Seen(self.tokens + tokens, own)


def _before(answer: AnswerRecord, contexts: dict[int, _Seen]) -> _Seen | None:
    """All tokens that the policy saw before an answer; None where they are not known.

    contexts: the tokens so far of those of its session.
    """
    if answer.kept == 0:
        return _Seen(answer.given, answer.kinds)
    known = contexts.get(answer.context, contexts.get(answer.parent))
    if known is None or len(known.tokens) < answer.kept:
        return None
    return known.first(answer.kept).and_then(answer.given, answer.kinds)


def _trajectory(
    answer: AnswerRecord,
    given: _Seen,
    advantage: float,
    reward: Reward,
    counts: Mapping[int, int] | None,
) -> Trajectory:
    versions = answer.versions if counts is None else [counts[one] for one in answer.versions]
    whole = given.and_then(answer.tokens, None)
    read, written = len(given.tokens), len(answer.tokens)
    context = Context(
        tokens=np.array(whole.tokens, np.int32),
        sampled=np.arange(read + written) >= read,
        logprobs=np.concatenate([np.zeros(read), answer.logprobs]).astype(np.float32),
        versions=np.concatenate([np.full(read, -1), versions]).astype(np.int32),
        documents=None if whole.kinds is None else np.array(whole.kinds, np.int32),
    )
    return Trajectory(
        task_id=answer.id,
        group=0,
        index=0,
        contexts=(context,),
        prompt_length=read,
        turns=(),
        status="submitted",
        reward=Reward(advantage, reward.components),
    )
