"""The suites of a config as the gate plays them: a score for each task, judged by a simulator that
people of the field are not drawn from, or by the tests of the task.

A version samples as it does for people, from the same seeds, so the same version comes to the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import numpy as np

from models.transformer import Transformer
from people.feedback.rewards.tab import Tab
from people.realtime.parts import Played, never
from people.simulated.fit import embedded
from people.simulated.programmer import NAMED, Programmer
from rl_code.config.read_config import at_least
from rl_code.environment.tools.suggest import around
from rl_code.evaluation.suites import SuiteConfig
from rl_code.host.stop import Stopped
from rl_code.rollout.scheduler import Scheduler
from rl_code.run.run import Run
from rl_code.run.serving import ServingConfig
from rl_code.types import Group, Task, Trajectory

# What a task scores on which nothing is suggested: the chance of acceptance above which showing
# pays (``feedback.rewards.tab``). So a score above it is a suggestion that was worth showing.
NOTHING = Tab().threshold
# What is told of the episodes of a suite, each a mean (``played``).
RATES = ("shown", "invalid_calls", "questions", "edits", "tokens")


@dataclasses.dataclass(frozen=True)
class JudgeConfig:
    """Simulated people who judge suggestions; each task belongs to one person."""

    # A key of ``simulated.programmer.NAMED``.
    habits: str = "exacting"
    people: int = 64
    seed: int = 1

    def __post_init__(self) -> None:
        at_least(self, people=1)
        if self.habits not in NAMED:
            raise ValueError(f"habits={self.habits!r} must be one of {', '.join(NAMED)}")

    def chance(self, task: Task, text: str) -> float:
        """The chance that the person of a task accepts a text."""
        digest = hashlib.sha256(f"{self.seed}/{task.id}".encode()).digest()
        number = int.from_bytes(digest[:8], "big") % self.people
        person = Programmer(embedded(), NAMED[self.habits], f"judge/{self.seed}/{number}")
        before, _ = around(task)
        return person.chance(before, text, task.meta["wanted"])


def suggested(trajectory: Trajectory) -> str:
    """The text that an episode suggests; "" for nothing."""
    for turn in trajectory.turns:
        for call in turn.calls:
            if call.name == "suggest" and not call.error:
                return call.arguments["text"].strip()
    return ""


def score(task: Task, trajectory: Trajectory, judge: JudgeConfig | None) -> float:
    """Score of one episode, 0 to 1; without a judge, 1 if the task is solved and else 0."""
    if judge is None:
        return float(trajectory.solved)
    text = suggested(trajectory)
    return judge.chance(task, text) if text else NOTHING


def played(groups: Sequence[Group], judge: JudgeConfig | None, serving: ServingConfig) -> Played:
    """Scores and rates of a suite. serving: names the tools that ask and that edit."""
    scores = {}
    episodes = []
    for group in groups:
        worth = [score(group.task, one, judge) for one in group.trajectories]
        scores[group.task.id] = float(np.mean(worth))
        episodes += group.trajectories
    rates = {
        "shown": float(np.mean([bool(suggested(one)) for one in episodes])),
        "invalid_calls": float(np.mean([one.malformed_calls > 0 for one in episodes])),
        "questions": float(np.mean([_calls(one, serving.ask_tools) for one in episodes])),
        "edits": float(np.mean([_calls(one, serving.edit_tools) for one in episodes])),
        "tokens": float(np.mean([one.sampled.sum() for one in episodes])),
    }
    return Played(scores, rates)


def _calls(trajectory: Trajectory, tools: Collection[str]) -> bool:
    """True if an episode has a well-formed call of one of these tools."""
    calls = (call for turn in trajectory.turns for call in turn.calls)
    return any(call.name in tools and not call.error for call in calls)


class HeldOut:
    """``parts.Suites``: the suites of a run's config."""

    def __init__(
        self,
        run: Run,
        scheduler: Scheduler,
        judge: JudgeConfig | None,
        model: Callable[[int], Transformer],
        made_of: Callable[[int], str | None],
        stop: Callable[[], bool] = never,
    ):
        """model: the weights of a version. made_of: tells weights of one number apart. stop: asked
        after each episode.
        """
        self._run, self._scheduler, self._judge = run, scheduler, judge
        self._model, self._made_of, self._stop = model, made_of, stop
        self._known: dict[tuple[int, str | None], dict[str, Played]] = {}

    def play(self, version: int) -> Mapping[str, Played]:
        """As ``parts.Suites``. Raises Stopped."""
        key = version, self._made_of(version)
        if key not in self._known:
            with jax.set_mesh(self._run.mesh):
                weights = self._run.sampler(self._model(version))
                suites = self._run.config.suites
                self._known[key] = {one.name: self._play(one, weights, version) for one in suites}
        return self._known[key]

    def _play(self, suite: SuiteConfig, weights: Transformer, version: int) -> Played:
        groups, _ = self._scheduler.rollout(
            weights,
            self._run.suite_tasks(suite),
            self._run.episode,
            group_size=suite.samples,
            version=version,
            key=jax.random.key(self._run.config.seed),
            on_finished=lambda trajectory: self._check_stop(version),
        )
        return played(groups, self._judge, self._run.config.serving)

    def _check_stop(self, version: int) -> None:
        if self._stop():
            raise Stopped(f"the suites of version {version} were stopped, and will be played again")
