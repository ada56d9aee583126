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
from people.simulated.jumper import JUMP_HABITS, Jumper
from people.simulated.programmer import NAMED, Programmer
from rl_code.config.read_config import at_least
from rl_code.environment.tools.suggest import around
from rl_code.evaluation.suites import SuiteConfig
from rl_code.host.stop import Stopped
from rl_code.rollout.scheduler import Scheduler
from rl_code.run.run import Run
from rl_code.run.serving import ServingConfig
from rl_code.tasks.jumps import place_of
from rl_code.types import Group, Task, Trajectory

# What a task scores on which nothing is suggested: the chance of acceptance above which showing
# pays (``feedback.rewards.tab``). So a score above it is a suggestion that was worth showing.
NOTHING = Tab().threshold
# What is told of the episodes of a suite, each a mean (``played``).
RATES = ("shown", "invalid_calls", "questions", "edits", "tokens")


def _of_text(habits: str, person: str, task: Task, text: str) -> float:
    """The chance that a person accepts a text for a hole."""
    before, _ = around(task)
    programmer = Programmer(embedded(), NAMED[habits], person)
    return programmer.chance(before, text, task.meta["wanted"])


def _of_place(habits: str, person: str, task: Task, place: str) -> float:
    """The chance that a person takes a jump to a place."""
    return Jumper(embedded(), JUMP_HABITS[habits], person).chance(place, task.meta["remaining"])


def _place(task: Task, text: str) -> str:
    """The place that a text names; "" for one that names none, which no editor shows."""
    return str(place_of(task, text) or "")


# By what is suggested: the kinds of people, what they are shown of an answer, and their decision.
_JUDGES = {
    "text": (NAMED, lambda task, text: text, _of_text),
    "place": (JUMP_HABITS, _place, _of_place),
}


@dataclasses.dataclass(frozen=True)
class JudgeConfig:
    """Simulated people who judge suggestions; each task belongs to one person."""

    # What is suggested: a "text" for a hole, or the "place" of the next edit (``tasks.jumps``).
    suggests: str = "text"
    # A key of ``simulated.programmer.NAMED``, or of ``simulated.jumper.JUMP_HABITS`` for places.
    habits: str = "exacting"
    people: int = 64
    seed: int = 1

    def __post_init__(self) -> None:
        at_least(self, people=1)
        if self.suggests not in _JUDGES:
            raise ValueError(f"suggests={self.suggests!r} must be one of {', '.join(_JUDGES)}")
        kinds = _JUDGES[self.suggests][0]
        if self.habits not in kinds:
            raise ValueError(f"habits={self.habits!r} must be one of {', '.join(kinds)}")

    def shown(self, task: Task, text: str) -> str:
        """The part of an answer that a person is shown; "" for nothing."""
        return _JUDGES[self.suggests][1](task, text)

    def chance(self, task: Task, text: str) -> float:
        """The chance that the person of a task accepts what is shown."""
        digest = hashlib.sha256(f"{self.seed}/{task.id}".encode()).digest()
        number = int.from_bytes(digest[:8], "big") % self.people
        return _JUDGES[self.suggests][2](self.habits, f"judge/{self.seed}/{number}", task, text)


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
    text = judge.shown(task, suggested(trajectory))
    return judge.chance(task, text) if text else NOTHING


def played(groups: Sequence[Group], judge: JudgeConfig | None, serving: ServingConfig) -> Played:
    """Scores and rates of a suite. serving: names the tools that ask and that edit."""
    scores = {}
    episodes, shown = [], []
    for group in groups:
        worth = [score(group.task, one, judge) for one in group.trajectories]
        scores[group.task.id] = float(np.mean(worth))
        episodes += group.trajectories
        texts = map(suggested, group.trajectories)
        shown += texts if judge is None else [judge.shown(group.task, text) for text in texts]
    rates = {
        "shown": float(np.mean([bool(text) for text in shown])),
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
            self._run.task_sets.of_suite(suite),
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
