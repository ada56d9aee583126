"""Sessions of simulated people that a router gives to one of several agents, and what that costs.

The people and the rewards are those of ``agent_people.sizes``: agents that are right in a known
share of turns. Nothing is served. The routers are the server's own (``people.serving.router``) with
its standard settings. As there, the reward of a session is told once, when it is known, so many
sessions later.

The regret of a session is the mean reward of the best agent at that time, less that of the agent
that was chosen (Lai and Robbins 1985).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float64

from experiments.agent_people import sizes
from people.serving.changes import SinceChange
from people.serving.router import Router, Shares, Thompson, draw_mean
from rl_code.run.serving import AutoConfig

# Sessions of a run, and users of them.
SESSIONS, USERS = 3_000, 160
# Sessions of each user with each agent that are simulated, to be drawn from.
_DRAWN = 12
# Sessions of each arm after which a fixed test decides (docs/results/realtime_agent.md).
TESTED = 300


@dataclasses.dataclass(frozen=True)
class Setting:
    """Agents that are there, and when their rewards are known."""

    name: str
    # Share of right turns of each agent, the deployed one first.
    right: tuple[float, ...]
    # Sessions between one and its reward.
    late: int = 100
    # Shares from the middle of the run on; None where they stay.
    later: tuple[float, ...] | None = None


SETTINGS = (
    Setting("one better, one worse", (0.4, 0.3, 0.6)),
    Setting("rewards after 1,000 sessions", (0.4, 0.3, 0.6), late=1_000),
    Setting("nearly alike", (0.48, 0.46, 0.5)),
    Setting("the best one breaks half-way", (0.4, 0.3, 0.6), later=(0.4, 0.3, 0.2)),
    Setting("the worst becomes the best half-way", (0.4, 0.3, 0.6), later=(0.4, 0.8, 0.6)),
)


class TestThenAll:
    """Equal shares of users until each arm has so many rewards, then the best mean for all."""

    __test__ = False  # no test of pytest

    def __init__(self, arms: Sequence[str], experiment: str, least: int):
        self.arms = tuple(arms)
        self._shares = Shares(experiment, dict.fromkeys(arms, 1 / len(arms)))
        self._least, self._best = least, ""
        self._rewards: dict[str, list[float]] = {arm: [] for arm in arms}

    def choose(self, user: str, session: str) -> str:
        return self._best or self._shares.choose(user, session)

    def reward(self, arm: str, value: float) -> None:
        """The last reward that is needed decides, and later ones change nothing."""
        if self._best:
            return
        self._rewards[arm].append(value)
        if all(len(found) >= self._least for found in self._rewards.values()):
            self._best = max(self.arms, key=lambda one: np.mean(self._rewards[one]))

    def forget(self, user: str) -> None:
        """Nothing is kept of users."""


class SilenceFirst:
    """Thompson sampling as the server did it before: a session counts at the reward of silence, 0,
    until its reward is known, and nothing is forgotten.
    """

    def __init__(self, arms: Sequence[str], seed: int):
        self.arms = tuple(arms)
        self._prior = AutoConfig()
        self._rng = np.random.default_rng(seed)
        self._known = {arm: SinceChange(None, self._prior.scale) for arm in arms}
        # Sessions of each arm whose rewards are not known yet.
        self._waiting = dict.fromkeys(arms, 0)

    def choose(self, user: str, session: str) -> str:
        means = {arm: draw_mean(self._rng, self._prior, *self.seen(arm)) for arm in self.arms}
        arm = max(means, key=means.__getitem__)
        self._waiting[arm] += 1
        return arm

    def reward(self, arm: str, value: float) -> None:
        """The reward of a session that waited."""
        self._waiting[arm] -= 1
        self._known[arm].add(value)

    def seen(self, arm: str) -> tuple[int, float, float]:
        """Count, mean and sum of squares of an arm's rewards and of the zeros that wait."""
        known, zeros = self._known[arm], self._waiting[arm]
        count = known.count + zeros
        if count == 0:
            return 0, 0.0, 0.0
        between = known.count * zeros / count * known.mean**2
        return count, known.count * known.mean / count, known.squares + between

    def forget(self, user: str) -> None:
        """Nothing is kept of users."""


# Name -> the router of a run, given its arms (the deployed one first) and its seed.
ROUTERS: Mapping[str, Callable[[Sequence[str], int], Router]] = {
    "Thompson sampling": lambda arms, seed: Thompson(arms, AutoConfig(seed=seed)),
    "Thompson sampling before": SilenceFirst,
    "equal shares": lambda arms, seed: Shares(f"{seed}", dict.fromkeys(arms, 1 / len(arms))),
    "80 % deployed": lambda arms, seed: Shares(
        f"{seed}", {arms[0]: 0.8} | dict.fromkeys(arms[1:], 0.2 / (len(arms) - 1))
    ),
    f"a test with {TESTED} each": lambda arms, seed: TestThenAll(arms, f"{seed}", TESTED),
}


@functools.cache
def sessions_of(right: float) -> Float64[np.ndarray, "users drawn"]:
    """Rewards of sessions of each user with an agent."""
    return sizes.simulate(right, USERS, _DRAWN).rewards


def play(setting: Setting, router: Router, seed: int) -> Float64[np.ndarray, " sessions"]:
    """Regret of each session of a run, in order."""
    rng = np.random.default_rng(seed)
    waiting: list[tuple[str, float]] = []
    regret = np.empty(SESSIONS)
    arms = router.arms
    means = {right: sessions_of(right).mean() for right in setting.right + (setting.later or ())}
    for number in range(SESSIONS):
        now = setting.right
        if setting.later is not None and number >= SESSIONS // 2:
            now = setting.later
        user = int(rng.integers(USERS))
        arm = router.choose(f"{user:032x}", str(number))
        chosen = now[arms.index(arm)]
        waiting.append((arm, float(rng.choice(sessions_of(chosen)[user]))))
        if number >= setting.late:
            router.reward(*waiting[number - setting.late])
        regret[number] = max(means[one] for one in now) - means[chosen]
    return regret


def regrets(setting: Setting, name: str, seeds: int) -> Float64[np.ndarray, "seeds sessions"]:
    """Sum of the regret until each session, a row for each seed."""
    arms = [f"policy@{number}" for number in range(len(setting.right))]
    runs = [play(setting, ROUTERS[name](arms, seed), seed) for seed in range(seeds)]
    return np.cumsum(runs, axis=1)
