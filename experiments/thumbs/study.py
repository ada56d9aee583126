"""A policy that learns from thumbs or from retention, among people of whom some vote more.

An answer is one of a few *manners*, from all effort spent on pleasing words to all of it spent on
being right. The policy is a softmax over them. People keep what is right. Those who like to vote
are pleased by words; the others hardly vote. All this is assumed, so the study shows what follows
from such a bias and not how large it is among real people.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float64

from people.feedback.records import HORIZONS_S, AnswerRecord, Event
from people.feedback.rewards.answered import answered
from people.feedback.rewards.combine import FeedbackReward, FeedbackRewardConfig, make_reward
from rl_code.config.named import Named
from rl_code.rewards.combine import SignalConfig

# Seconds after the acceptance at which it is looked at again.
_HORIZON_S = HORIZONS_S[1]


@dataclasses.dataclass(frozen=True)
class ThumbsStudy:
    """The people, and how the policy learns."""

    # Share of effort spent on being right, for each manner; the rest goes into pleasing words.
    manners: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    # Share of people who like to vote, and how often they and the others do.
    voters: float = 0.1
    votes: float = 0.5
    other_votes: float = 0.01
    steps: int = 100
    # Answers in a step, and the step size of REINFORCE.
    answers: int = 64
    learning_rate: float = 1.0


# Name of a run -> the reward's signal, and whether those who vote are pleased by words.
RUNS: Mapping[str, tuple[str, bool]] = {
    "retention": ("retention", True),
    "thumbs, voters differ": ("thumbs", True),
    "thumbs, all vote alike": ("thumbs", False),
}


@dataclasses.dataclass(frozen=True)
class Learned:
    """Results of a step's answers, one number for each step."""

    # Share of the tokens that was kept, over all people.
    retained: Float64[np.ndarray, " steps"]
    # Share of thumbs up among the thumbs; nan where nobody voted.
    thumbs_up: Float64[np.ndarray, " steps"]


def run(study: ThumbsStudy, name: str, seed: int) -> Learned:
    """Trains one policy from nothing."""
    signal, differ = RUNS[name]
    reward = make_reward(FeedbackRewardConfig((SignalConfig(Named(signal)),)))
    rng = np.random.default_rng(seed)
    logits = np.zeros(len(study.manners))
    retained, thumbs_up = [], []
    for _ in range(study.steps):
        chances = np.exp(logits - logits.max())
        chances /= chances.sum()
        chosen = rng.choice(len(chances), study.answers, p=chances)
        earned, kept, votes = _people(study, reward, chosen, differ, rng)
        # REINFORCE, with the mean as the baseline
        advantages = earned - earned.mean()
        gradient = np.bincount(chosen, advantages, len(chances)) / study.answers
        logits += study.learning_rate * (gradient - chances * advantages.mean())
        retained.append(kept)
        thumbs_up.append(np.mean(votes > 0) if len(votes) else np.nan)
    return Learned(np.array(retained), np.array(thumbs_up))


def _people(
    study: ThumbsStudy,
    reward: FeedbackReward,
    chosen: np.ndarray,
    differ: bool,
    rng: np.random.Generator,
) -> tuple[np.ndarray, float, np.ndarray]:
    """Rewards of answers of some manners: the mean share kept, and the votes."""
    joined, kept, votes = [], [], []
    for number, manner in enumerate(chosen):
        right = study.manners[manner]
        is_voter = rng.random() < study.voters
        share = float(rng.beta(1 + 6 * right, 1 + 6 * (1 - right)))
        events = [
            Event("a", str(number), "accepted", 1.0, 1.0),
            Event("r", str(number), "retained", 1.0 + _HORIZON_S, share, _HORIZON_S),
        ]
        often = study.votes if is_voter or not differ else study.other_votes
        if rng.random() < often:
            pleased = 1 - right if is_voter and differ else share
            vote = 1.0 if rng.random() < pleased else -1.0
            events.append(Event("t", str(number), "thumbs", 2.0, vote))
            votes.append(vote)
        joined.append((_answer(number), events))
        kept.append(share)
    earned = np.array([reward(one).total for one in answered(joined)])
    return earned, float(np.mean(kept)), np.array(votes)


def _answer(number: int) -> AnswerRecord:
    return AnswerRecord(
        id=str(number),
        user=str(number),
        session="",
        model="manners",
        version=0,
        adapter="",
        arm="",
        asked_at=0.0,
        answered_at=0.0,
        first_token_s=0.0,
        kind="chat",
        finish_reason="stop",
        context=0,
        parent=-1,
        kept=0,
        given=(),
        tokens=(),
        logprobs=(),
        versions=(),
    )
