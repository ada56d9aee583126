"""Sessions of simulated people that a router gives to one of several agents, and what that costs.

The people and the rewards are those of ``agent_people.sizes``: agents that are right in a known
share of turns. Nothing is served. The routers are the server's own (``people.serving.router``) with
its settings. As there, a session is first counted at the reward of silence, and its reward takes
the place of that once it is known, so many sessions later.

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
from people.serving.router import Router, Shares, Thompson

# Sessions of a run, and users of them.
SESSIONS, USERS = 3_000, 160
# Sessions of each user with each agent that are simulated, to be drawn from.
_DRAWN = 12
# Sessions of each arm after which a fixed test decides (docs/results/realtime_agent.md).
TESTED = 300
# Of a session of which nothing is known yet.
_SILENCE = 0.0


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

    def reward(self, arm: str, value: float, before: float | None = None) -> None:
        """Rewards of silence are no news."""
        if before is None or self._best:
            return
        self._rewards[arm].append(value)
        if all(len(found) >= self._least for found in self._rewards.values()):
            self._best = max(self.arms, key=lambda one: np.mean(self._rewards[one]))

    def forget(self, user: str) -> None:
        """Nothing is kept of users."""


# Name -> the router of a run, given its arms (the deployed one first) and its seed.
ROUTERS: Mapping[str, Callable[[Sequence[str], int], Router]] = {
    "Thompson sampling": lambda arms, seed: Thompson(arms, seed=seed),
    "equal shares": lambda arms, seed: Shares(f"{seed}", dict.fromkeys(arms, 1 / len(arms))),
    "80 % deployed": lambda arms, seed: Shares(
        f"{seed}", {arms[0]: 0.8} | dict.fromkeys(arms[1:], 0.2 / (len(arms) - 1))
    ),
    f"equal shares, the best after {TESTED} each": lambda arms, seed: TestThenAll(
        arms, f"{seed}", TESTED
    ),
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
    for number in range(SESSIONS):
        now = setting.right
        if setting.later is not None and number >= SESSIONS // 2:
            now = setting.later
        user = int(rng.integers(USERS))
        arm = router.choose(f"{user:032x}", str(number))
        chosen = now[arms.index(arm)]
        waiting.append((arm, float(rng.choice(sessions_of(chosen)[user]))))
        router.reward(arm, _SILENCE)
        if number >= setting.late:
            known, value = waiting[number - setting.late]
            router.reward(known, value, before=_SILENCE)
        regret[number] = max(sessions_of(one).mean() for one in now) - sessions_of(chosen).mean()
    return regret


def regrets(setting: Setting, name: str, seeds: int) -> Float64[np.ndarray, "seeds sessions"]:
    """Sum of the regret until each session, a row for each seed."""
    arms = [f"policy@{number}" for number in range(len(setting.right))]
    runs = [play(setting, ROUTERS[name](arms, seed), seed) for seed in range(seeds)]
    return np.cumsum(runs, axis=1)
