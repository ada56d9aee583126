"""The four parts for real: a store of what people did, the learner, servers, and held-out suites.

One process serves, trains and goes through the cycle. Who uses the server over HTTP is not known to
it: simulated programmers are clients in processes of their own (``simulated.crowd``), started
beside it where the config asks for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import sqlalchemy
from absl import logging
from starlette.routing import BaseRoute

from models.sharding import MeshConfig, make_mesh
from people.feedback.config import FeedbackConfig
from people.feedback.identity import AnswerIds, load_secret
from people.feedback.outcomes import Selection
from people.feedback.poisoning import weigh
from people.feedback.records import AnswerRecord
from people.feedback.rewards.answered import answered
from people.feedback.rewards.combine import FeedbackReward, make_reward
from people.feedback.store import FeedbackStore
from people.realtime.held_out import RATES, HeldOut, JudgeConfig
from people.realtime.learned import LearnedReward, RewardModels
from people.realtime.ledger import forget_sessions
from people.realtime.parts import (
    Parts,
    Played,
    Routing,
    TrainingFailed,
    never,
)
from people.realtime.served_fleet import ServedFleet
from people.realtime.served_store import ServedStore
from people.realtime.training import groups_of, leave_one_out, spoiled
from people.realtime.versions import Versions
from people.serving.access import Access, KeyFile
from people.serving.begun import BEGUN, Begun
from people.serving.fleet import Fleet
from people.serving.of_run import make_engine, make_fleet, make_scheduler
from people.serving.probes import probes
from people.simulated.agent_crowd import AgentCrowdConfig
from people.simulated.crowd import Crowd, CrowdConfig
from people.simulated.jump_crowd import JumpCrowdConfig
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.harness.endpoint.endpoint import Endpoint
from rl_code.host.stop import Stopped, StopRequest
from rl_code.learner.learner import Learner
from rl_code.run.config import RunConfig
from rl_code.run.run import Run

# What simulated people who work with an agent write down for themselves, in the workdir. No part of
# the cycle reads it; ``realtime.satisfaction`` compares it with rewards for who looks at a run.
TRUTH = "people.truth.jsonl"
# Seconds after which whoever waits asks whether to stop.
_ASK_S = 1.0
# What is kept of the updates of a version: means, and those of the first one.
_TOLD = (
    "train/loss",
    "train/grad_norm",
    "train/no_signal",
    "policy/entropy",
    "policy/clip_fraction",
    "policy/mismatch_mean",
    "policy/mismatch_max",
    "rollout/staleness_max",
    "pack/fill",
)
_FIRST = ("policy/mismatch_mean", "policy/mismatch_max")
_BASELINED = Named("people.realtime.training:baselined")


@dataclasses.dataclass(frozen=True)
class Spoiled:
    """Versions that are made bad on purpose, to see what becomes of them."""

    # Cycles whose versions are.
    cycles: tuple[int, ...] = ()
    # Noise on each array of weights, as a multiple of its root mean square.
    noise: float = 1.0

    def __post_init__(self) -> None:
        if not self.noise > 0:
            raise ValueError(f"{self.noise=} must be positive")


@dataclasses.dataclass(frozen=True)
class Served:
    """Model that is served and trained, and the people who judge it."""

    # The model, its warm start, how it is served (``serving``) and trained (``train``), and the
    # suites of the gate. An update takes ``tasks_per_step * group_size`` answers; how many updates
    # a cycle makes follows from its answers, ``cycle.window`` at most. ``train.steps`` is not used.
    run: RunConfig
    feedback: FeedbackConfig = FeedbackConfig()
    # Judges what a suite's episodes suggest; None for the tests of its tasks.
    judge: JudgeConfig | None = JudgeConfig()
    # Reward model that each cycle trains, and by which the next ones pay; None for what people did
    # alone.
    learned: LearnedReward | None = None
    # Simulated programmers who use the server; None where people do.
    people: CrowdConfig | None = None
    # The same of people who work with an agent, who bring tasks and take them to the end.
    agents: AgentCrowdConfig | None = None
    # The same of programmers who edit several files, and are shown where to go next.
    jumpers: JumpCrowdConfig | None = None
    spoiled: Spoiled = Spoiled()
    # Name of the model, and the address that the server listens on.
    model: str = "policy"
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if not self.run.suites:
            raise ValueError("run.suites is empty: the gate has nothing to play")
        if self.run.train.loss.kl_coef:
            raise ValueError(
                f"run.train.loss.kl_coef={self.run.train.loss.kl_coef} must be 0: versions follow "
                "each other without end, and have no reference"
            )
        if self.run.train.teacher is not None:
            raise ValueError(
                "run.train.teacher must be None: answers that people got have no teacher context"
            )
        if self.learned is not None and self.run.documents is not None:
            raise ValueError(
                "learned is set, and so is run.documents: reward models read answers as one text "
                "and would see documents by another mask; set one of the two to None"
            )
        if self.feedback.database:
            raise ValueError(
                f"feedback.database={self.feedback.database!r}: answers, events and cycles are in "
                "one database, which config.database names"
            )
        make_reward(self.feedback.reward)  # a wrong name is found now

    def make(
        self, engine: sqlalchemy.Engine, folder: Path, config: Any, clock: Callable[[], float]
    ) -> Parts:
        """The parts. Nothing is built or loaded before it is needed, so that a dry run is quick.

        engine: of the database (``feedback.database.make_engine``), for all that is recorded.
        config: of the cycle.
        """
        secret = load_secret(folder / "secret")
        record = FeedbackStore(
            engine,
            ids=AnswerIds(secret),
            claims=self.feedback.claims,
            forget_sessions=forget_sessions,
        )
        reward = make_reward(self.feedback.reward)
        system = System(self, folder, config.anchor, config.window, secret, record, reward)
        kept = self.feedback.wait, self.feedback.poisoning, self.feedback.keep_days
        store = ServedStore(record, reward, *kept)
        names = dict(metrics=store.metrics, rates=RATES, rewards=store.rewards, stop=system.stop)
        names |= dict(update_size=self.run.train.tasks_per_step * self.run.train.group_size)
        return Parts(store, system, system, system, system.wait, system.serve, **names)


class System:
    """Trainer, fleet and suites of one process, on one run; each is built when it is first used."""

    def __init__(
        self,
        config: Served,
        folder: Path,
        first: int,
        window: int,
        secret: bytes,
        record: FeedbackStore,
        reward: FeedbackReward,
    ):
        """first: the version that the first cycle deploys. window: as of ``CycleConfig``."""
        self._config, self._folder, self._first = config, folder, first
        self._window = window
        self._secret, self._record, self._reward = secret, record, reward
        # Whoever runs the cycle takes the signals, and calls ``stop``.
        self._stop = StopRequest()
        self._ends = contextlib.ExitStack()
        self._url = ""
        self._crowds: list[Crowd] = []

    # --- What there is ----------------------------------------------------------------------------

    @functools.cached_property
    def _run(self) -> Run:
        return self._ends.enter_context(Run(self._config.run, self._folder))

    @functools.cached_property
    def _versions(self) -> Versions:
        versions = Versions(self._run, self._stop)
        versions.begin(self._first)
        return versions

    @functools.cached_property
    def _engine(self) -> Any:
        with jax.set_mesh(self._run.mesh):
            return make_engine(self._run)

    @functools.cached_property
    def _servers(self) -> Fleet:
        begun = Begun(self._folder / BEGUN)
        self._ends.callback(begun.close)
        with jax.set_mesh(self._run.mesh):
            ways = self._secret, self._record.submit_answer, self._engine, begun
            made = make_fleet(self._run, *ways)
        made.opening = "the deployed version is being loaded"
        return self._ends.enter_context(made)

    @functools.cached_property
    def _fleet(self) -> ServedFleet:
        return ServedFleet(
            self._servers.models,
            self._config.model,
            # no version is read, or trained, before one is asked for
            lambda version: self._versions.model(version),
            self._config.run.serving.drain_s,
        )

    @functools.cached_property
    def _suites(self) -> HeldOut:
        scheduler = make_scheduler(self._run, self._engine)
        self._ends.callback(scheduler.close)
        versions = self._versions
        judge = self._config.judge
        ways = (versions.model, versions.made_of, self._is_stopping)
        return HeldOut(self._run, scheduler, judge, *ways)

    @functools.cached_property
    def _learner(self) -> Learner:
        run = self._run
        train = run.config.train
        # The learner refuses what is older.
        pack = dataclasses.replace(train.pack, max_staleness=self._window - 1)
        train = dataclasses.replace(train, advantage=_BASELINED, pack=pack)
        return Learner(train, run.rows_sharding, run.init_model())

    @functools.cached_property
    def _reward_models(self) -> RewardModels | None:
        learned = self._config.learned
        if learned is None:
            return None
        first = functools.partial(self._versions.model, self._first)
        run = self._run
        mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
        return RewardModels(
            learned, self._folder, first, mesh, run.tokenizer.eos_id, run.config.seed
        )

    # --- Fleet and suites -------------------------------------------------------------------------

    def apply(self, routing: Routing) -> None:
        """As ``parts.Fleet``."""
        with jax.set_mesh(self._run.mesh):
            self._fleet.apply(routing)
        if self._servers.opening:
            self._servers.opening = "its programs are being compiled"
            self._servers.warm_up(self._is_stopping)
            self._servers.opening = ""

    def routing(self) -> Routing | None:
        """As ``parts.Fleet``."""
        return self._fleet.routing()

    def play(self, version: int) -> Mapping[str, Played]:
        """As ``parts.Suites``."""
        return self._suites.play(version)

    # --- Trainer ----------------------------------------------------------------------------------

    def train(
        self,
        cycle: int,
        base: int,
        version: int,
        selection: Selection,
        behind: Mapping[int, int],
    ) -> int:
        """As ``parts.Trainer``."""
        ids = hashlib.sha256(",".join(selection.ids).encode()).hexdigest()
        made_of = f"{base}/{selection.digest}/{ids}"
        if self._versions.made_of(version) == made_of:
            return self._versions.updates(version)
        given = answered(self._record.joined(selection.ids, selection.watermark))
        rewards = [self._reward(one) for one in given]
        found = weigh(given, self._config.feedback.poisoning)
        self._record.list_suspects(cycle, found.suspects)
        totals = np.array([one.total for one in rewards], np.float64)
        paid, judged = totals, {}
        if self._reward_models is not None:
            paid, judged = self._reward_models.pay(cycle, given, totals)
            judged = judged | self._reward_models.train(cycle, given, totals, made_of)
        answers = [one.answer for one in given]
        advantages = np.zeros(len(given))
        # suggestions and agents are paid in other ways, so each is compared with its like
        for kind in {answer.kind for answer in answers}:
            like = np.array([answer.kind == kind for answer in answers])
            advantages[like] = leave_one_out(paid[like], found.weights[like])
        # A session goes on over several cycles: what an earlier one trained on is read again.
        earlier = self._record.earlier(answers)
        counts = self._counts(answers, behind)
        groups, left_out = groups_of(answers, advantages, rewards, earlier, counts)
        if not groups:
            raise TrainingFailed(f"none of {len(given)} answers can be trained on")
        # shuffled, so that an update has not the answers of one hour alone
        order = np.random.default_rng([self._config.run.seed, cycle]).permutation(len(groups))
        told = {
            "answers": len(groups),
            "left_out": left_out,
            "reward": float(totals.mean()),
            "reward_version": self._reward.version,
            "suspects": len(found.suspects),
            **judged,
        }
        with jax.set_mesh(self._run.mesh):
            state = self._versions.state(base)
            state, metrics = self._updates(state, [groups[i] for i in order])
            if cycle in self._config.spoiled.cycles:
                logging.warning("version %d is made bad on purpose (parts.spoiled)", version)
                noise, seed = self._config.spoiled.noise, [self._config.run.seed, cycle]
                model = spoiled(state.model, noise, seed)
                state = dataclasses.replace(state, model=model)
                told["spoiled"] = noise
            self._versions.write(version, state, made_of, told | metrics)
        shown = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in (told | metrics).items()
        )
        logging.info("version %d of %d: %s", version, base, "  ".join(shown))
        return int(metrics["updates"])

    def _counts(self, answers: Sequence[AnswerRecord], behind: Mapping[int, int]) -> dict[int, int]:
        """Version -> the number that the learner has for it: it counts updates, of which the base
        has as many as the window, so that none is below 0. Raises TrainingFailed for answers that
        were selected with a wider window.
        """
        counts = {}
        for version in {one for answer in answers for one in answer.versions}:
            updates = behind.get(version)
            if updates is None or updates >= self._window:
                raise TrainingFailed(
                    f"version {version} is {updates} updates old, and "
                    f"config.cycle.window={self._window} allows {self._window - 1}"
                )
            counts[version] = self._window - updates
        return counts

    def _updates(self, state: Any, groups: Sequence[Any]) -> tuple[Any, dict[str, float]]:
        """One pass over the answers. Raises TrainingFailed where an update is not finite, or would
        be on answers that are too old, and Stopped.
        """
        train = self._config.run.train
        size = train.tasks_per_step * train.group_size
        count = -(-len(groups) // size)
        if count > self._window:
            raise TrainingFailed(
                f"{len(groups)} answers are {count} updates of {size}, and config.cycle.window="
                f"{self._window} allows {self._window}"
            )
        seen: dict[str, list[float]] = {}
        for number in range(count):
            start = number * size
            if self._stop.requested:
                raise Stopped(f"training was stopped before answer {start}, and will begin again")
            version = self._window + number
            state, metrics = self._learner(state, groups[start : start + size], version)
            if not metrics["train/finite"]:
                raise TrainingFailed(f"the loss is not finite in the update of answer {start}")
            for name, value in metrics.items():
                seen.setdefault(name, []).append(float(value))
        # of the first update, whose weights are those that sampled: how far server and learner are
        # apart
        first = {f"first/{name}": seen[name][0] for name in seen if name in _FIRST}
        means = {name: float(np.mean(seen[name])) for name in _TOLD if name in seen}
        return state, means | first | {"updates": count}

    # --- Serving ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def serve(
        self, routes: Sequence[BaseRoute], port: int | None, keys: KeyFile | None
    ) -> Iterator[str]:
        """Serves people until it is left, by the API, the routes of feedback, and others; yields
        the URL. port: None for any that is free. keys: None where everybody may ask. Raises
        ConfigError.
        """
        config = self._config
        with self._ends:
            access = Access(self._servers, keys)
            feedback = access.feedback_routes(self._record)
            all_routes = [*probes(self._servers), *feedback, *routes]
            way = dict(host=config.host, port=port or 0, routes=all_routes)
            try:
                endpoint = Endpoint(access.find, on_error=self._servers.metrics.refused, **way)
            except OSError as error:
                raise ConfigError(f"--port={port}: {error}") from error
            self._ends.enter_context(endpoint)
            self._ends.callback(self._servers.drain)  # before the endpoint ends
            self._url = endpoint.url
            yield endpoint.url

    def stop(self) -> None:
        """As ``parts.Parts``. Answers that are on their way go on beside the work in progress, and
        ``serve`` waits for what is left of them.
        """
        self._stop.requested = True
        if self._url:
            self._servers.refuse()

    def _is_stopping(self) -> bool:
        return self._stop.requested

    def wait(self, seconds: float, stop: Callable[[], bool] = never) -> None:
        """As ``parts.Wait``: people work. Simulated ones come when the first version is served."""
        self._start_people()
        end = time.monotonic() + seconds
        while not stop() and (left_s := end - time.monotonic()) > 0:
            time.sleep(min(left_s, _ASK_S))

    def _start_people(self) -> None:
        """Starts simulated people where the config asks for some and somebody is served; raises
        RuntimeError where they have ended by themselves.
        """
        config = self._config
        asked = [one for one in (config.people, config.agents, config.jumpers) if one is not None]
        if self._url and len(self._crowds) < len(asked):
            log, truth = self._folder / "people.log", self._folder / TRUTH
            for one in asked:
                crowd = Crowd(one, f"{self._url}/v1", log, truth=str(truth))
                self._crowds.append(self._ends.enter_context(crowd))
        for crowd in self._crowds:
            crowd.check()
