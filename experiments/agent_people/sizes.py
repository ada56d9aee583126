"""Sizes of an agent's cycle, from what simulated people do with an agent of a known quality.

Their decisions are those of ``people.simulated``, their rewards those of an agent. So the effect,
the spread between people and that between the sessions of one person are simulated, and all else
follows:

- users of each arm until the test of the cycle has seen the effect in so many of all tests;
- by the noise scale B of the gradient (1812.06162, eq. 2.10) a batch of b answers does b / (b + B)
  of what a batch without noise does in an update.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import rich.table

from experiments.report import table
from people.feedback.records import AnswerRecord, Event
from people.feedback.rewards.answered import answered
from people.feedback.rewards.combine import FeedbackRewardConfig, make_reward
from people.realtime import sequential
from people.simulated.agent_habits import KINDS
from people.simulated.agent_person import AgentPerson, Happened, Turn, is_late, unhurried
from people.simulated.changes import Change
from people.simulated.fit import embedded

KIND_NAMES = ("steady", "careful", "hurried", "terse")
# Share of turns that are right, before and after.
BEFORE, AFTER = 0.40, 0.60
# Sessions of a user while a candidate is watched; half of the users have it.
SESSIONS = (2, 4, 8)
BATCHES = (128, 256, 512, 1_024, 2_048)
_ALPHA, _SCALE = 0.05, 0.3
# Standard normal quantile of a power of 80 %.
_POWER = 0.8416

_FILE = "f.py"
_EMPTY = {_FILE: "def f(xs):\n    pass\n"}
_RIGHT = {_FILE: "def f(xs):\n    return [x + 2 for x in xs]\n"}
_WRONG = {_FILE: "def f(xs):\n    return [x + 3 for x in xs]\n"}


@dataclasses.dataclass(frozen=True)
class Users:
    """Rewards and true satisfaction of simulated users, each [users, sessions]."""

    rewards: np.ndarray
    satisfaction: np.ndarray

    @property
    def correlation(self) -> float:
        """Correlation of both over sessions."""
        return float(np.corrcoef(self.rewards.ravel(), self.satisfaction.ravel())[0, 1])

    @property
    def mean(self) -> float:
        """Mean over users."""
        return float(self.rewards.mean())

    @property
    def within(self) -> float:
        """Standard deviation of the sessions of one user."""
        return float(math.sqrt(self.rewards.var(axis=1, ddof=1).mean()))

    @property
    def between(self) -> float:
        """Standard deviation of users' own means, without what their few sessions add."""
        spread = self.rewards.mean(axis=1).var(ddof=1) - self.within**2 / self.rewards.shape[1]
        return float(math.sqrt(max(spread, 0.0)))

    def variance(self, sessions: int) -> float:
        """Variance of the mean of a user who has so many sessions."""
        return self.between**2 + self.within**2 / sessions


def simulate(
    right: float, users: int, sessions: int, seed: int = 0, *, seldom: bool = False
) -> Users:
    """Users whose agent is right with a chance, in each turn anew. seldom: True where they look
    only hours later (``AgentCrowdConfig.seldom``).
    """
    fit, reward = embedded(), make_reward(FeedbackRewardConfig())
    rng = np.random.default_rng(seed)
    rewards, satisfaction = np.empty((2, users, sessions))
    for user in range(users):
        habits = KINDS[KIND_NAMES[user % len(KIND_NAMES)]]
        habits = unhurried(habits) if seldom else habits
        for session in range(sessions):
            person = AgentPerson(fit, habits, f"{seed}/{user}", str(session))
            joined, content, attempt = [], [], 0
            while True:
                id = f"{user}-{session}-{attempt}"
                decision = person.decide(_turn(id, bool(rng.random() < right)), attempt)
                told = [one for one in decision.happened if not seldom or is_late(one)]
                joined.append((_record(id, attempt), events_of(told)))
                content.append(decision.satisfaction)
                attempt += 1
                if decision.done or attempt > habits.patience:
                    break
            totals = [reward(one).total for one in answered(joined)]
            rewards[user, session] = np.mean(totals)
            satisfaction[user, session] = np.mean(content)
    return Users(rewards, satisfaction)


def events_of(happened: Sequence[Happened]) -> list[Event]:
    """Events with keys of their own, seconds from 0 on."""
    return [
        Event(f"{i}-{id}", id, one.kind, one.after_s, one.value, one.horizon_s, one.extra)
        for i, one in enumerate(happened)
        for id in one.answers
    ]


def users_needed(effect: float, variance: float, *, power: bool = True) -> int:
    """Users of each arm at which the sequence of the test excludes 0: on average (a power of one
    half), or in 80 % of all tests.
    """
    users = 2
    while users < 1_000_000:
        error = 2 * variance / users
        width = float(sequential.radius(np.float64(error), _SCALE, _ALPHA))
        if width + (_POWER * math.sqrt(error) if power else 0.0) <= effect:
            return users
        users = max(users + 1, int(users * 1.02))
    return users


def done_by(batch: int, noise_scale: float) -> float:
    """Share of the progress of an update without noise that one of so many answers makes."""
    return batch / (batch + noise_scale)


def tests(before: Users, after: Users) -> rich.table.Table:
    """Users of each arm for the effect, and for half of it."""
    rows = []
    effect = after.mean - before.mean
    for sessions in SESSIONS:
        variance = max(before.variance(sessions), after.variance(sessions))
        cells = [
            str(users_needed(part * effect, variance, power=power))
            for part in (1.0, 0.5)
            for power in (False, True)
        ]
        rows.append([str(sessions), *cells])
    columns = ["sessions of a user", "+20 points: power 50 %", "80 %", "+10 points: 50 %", "80 %"]
    caption = (
        f"users of each arm. Reward {before.mean:+.3f} -> {after.mean:+.3f}, effect {effect:+.3f}; "
        f"users differ by {before.between:.3f}, sessions of one user by {before.within:.3f}"
    )
    return table(columns, rows, caption)


def looks(quick: Sequence[Users], seldom: Sequence[Users]) -> rich.table.Table:
    """Feedback at once beside that of people who look only hours later, each before and after: at
    as many sessions of a user, so at as many answers.
    """
    sessions, rows = SESSIONS[1], []
    for name, (before, after) in (("at once", quick), ("hours later", seldom)):
        effect = after.mean - before.mean
        noise = max(before.within, after.within)
        variance = max(before.variance(sessions), after.variance(sessions))
        needed = users_needed(effect, variance)
        numbers = (effect, noise, effect / noise, before.correlation, after.correlation)
        rows.append([name, *(f"{one:.3f}" for one in numbers), str(needed)])
    columns = ["feedback", "effect", "sessions differ by", "effect / noise"]
    columns += ["correlation before", "after", "users of each arm"]
    caption = (
        f"of {SESSIONS[1]} sessions each: effect of +20 points on the reward, its noise, its "
        "correlation with true satisfaction, and users that see the effect in 80 % of all tests"
    )
    return table(columns, rows, caption)


def updates(noise_scale: float) -> rich.table.Table:
    """Progress of updates of several sizes."""
    rows = [
        [str(batch), f"{done_by(batch, noise_scale):.0%}", f"{1 / done_by(batch, noise_scale):.1f}"]
        for batch in BATCHES
    ]
    columns = ["answers of an update", "of a step without noise", "updates for one such step"]
    return table(columns, rows, f"noise scale {noise_scale:g} answers", texts=0)


def _turn(id: str, right: bool) -> Turn:
    return Turn(
        answers=(id,),
        questions=(),
        change=Change(_EMPTY, _RIGHT if right else _WRONG),
        wanted=_RIGHT,
        handed_in=True,
        ambiguous=False,
        tested=None,
        passes=right,
        right=right,
    )


def _record(id: str, number: int) -> AnswerRecord:
    return AnswerRecord(
        id=id,
        user="u",
        session="s",
        model="policy",
        version=0,
        adapter="",
        arm="",
        asked_at=float(number),
        answered_at=float(number),
        first_token_s=0.1,
        kind="chat",
        finish_reason="stop",
        context=0,
        parent=-1,
        kept=0,
        given=(),
        tokens=(1,),
        logprobs=(-0.1,),
        versions=(0,),
    )
