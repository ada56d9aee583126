"""Retraining of the reward model inside a run.

Version v of the reward model is trained after step v * every - 1, before the weights of that step
are published, on the groups of the newest steps up to it. So it is there when an episode begins
that it pays (``rewards.reward_model``). It is a function of the version before and of recorded
groups: a learner that is killed makes the same bits again, or finds the version on the disk, and
then checks that it was made of the same groups.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from absl import logging

from models.scalar_head import ScoredTransformer
from rl_code.checkpoint import checkpoint
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.config.read_config import ConfigError
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.rewards.calibration import auc, ece, platt, reliability, sigmoid
from rl_code.rewards.combine import RewardConfig, find_signals
from rl_code.rewards.reward_model import FOLDER, WORK, Retrain, RewardModel
from rl_code.rewards.reward_model_fit import Outcome, fit, scores_of
from rl_code.rewards.reward_model_folder import Weights, save
from rl_code.rewards.scorer import Scorer, scorer
from rl_code.run.config import RunConfig
from rl_code.store.errors import StoreError
from rl_code.store.group_records import GroupRecord
from rl_code.store.source import read_ahead
from rl_code.store.store import GroupStore
from rl_code.types import Group

# All versions stay, so that any trajectory can be played again.
_ALL = 1 << 30


def retrained(config: RewardConfig) -> tuple[str, RewardModel] | None:
    """(Component, signal) of the reward model that a run retrains; None for none. Raises
    ConfigError for several.
    """
    found = [
        (one.config.component, one.signal)
        for one in find_signals(config)
        if isinstance(one.signal, RewardModel) and one.signal.retrain is not None
    ]
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise ConfigError(f"config.reward: {names} are all retrained; a run retrains one")
    return found[0] if found else None


@contextlib.contextmanager
def retraining(
    config: RunConfig, workdir: Path, pool: SandboxPool, store: GroupStore, start: int
) -> Iterator[Retraining | None]:
    """Retraining of a run that goes on at a step; None for a run that has none. Versions which are
    missing by then are made again from the record. Raises ConfigError, and StoreError for a record
    that does not reach back far enough.
    """
    found = retrained(config.reward)
    if found is None:
        yield None
        return
    if jax.process_count() > 1:
        raise ConfigError(
            f"config.reward: retrain, and the learner is in {jax.process_count()} processes: only "
            "a learner in one process trains a reward model"
        )
    with Retraining(*found, config.seed, workdir, pool, store) as made:
        made.catch_up(start)
        yield made


class Retraining:
    """The versions of a run's reward model. A context manager: it holds their folder."""

    def __init__(
        self,
        component: str,
        signal: RewardModel,
        seed: int,
        workdir: Path,
        pool: SandboxPool,
        store: GroupStore,
    ):
        assert signal.retrain is not None
        self._component, self._seed = component, seed
        self._config: Retrain = signal.retrain
        self._folder = (workdir / FOLDER).absolute()
        self._pool, self._store = pool, store
        self._scorer: Scorer = scorer(Path(signal.folder).absolute(), self._folder)
        self._checkpoints = Checkpoints(self._folder, signal, keep=_ALL)

    def __enter__(self) -> Retraining:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpoints.close()

    def catch_up(self, start: int) -> None:
        """Makes the versions that pay episodes of the weights ``start``, where they are missing."""
        known = set(checkpoint.steps(self._folder))
        for version in range(1, start // self._config.every + 1):
            if version not in known:
                logging.info("version %d of the reward model is made again", version)
                self._make(version, self._recorded(version))

    def after(self, step: int, records: Sequence[GroupRecord]) -> dict[str, float]:
        """Trains the version that is due after a step, and returns metrics of it; {} where none is
        due. records: the step's groups. Raises StoreError for a version that was made of others.
        """
        version, rest = divmod(step + 1, self._config.every)
        if rest:
            return {}
        earlier = self._recorded(version, until=step)
        return self._make(version, [*earlier, *records])

    def _recorded(self, version: int, until: int | None = None) -> list[GroupRecord]:
        """The groups of a version's steps on record, before step ``until``."""
        end = version * self._config.every
        first = max(0, end - (self._config.window or self._config.every))
        steps = range(first, end if until is None else until)
        trained = {
            (step, item.number)
            for step in steps
            for item in self._store.items(step)
            if item.trained
        }
        places = [place for place in self._store.places(list(steps)) if place in trained]
        if {step for step, _ in places} != set(steps):
            raise StoreError(
                f"version {version} of the reward model is made of steps {first} to {end - 1}, "
                f"which are no longer on record in {self._store.folder}"
            )
        return list(read_ahead(self._store.folder, places))

    def _make(self, version: int, records: Sequence[GroupRecord]) -> dict[str, float]:
        made_of = _digest(records)
        groups = [record.group for record in records]
        outcomes, told = outcomes_of(groups, self._component, self._scorer, self._pool)
        metrics = self._judged(outcomes, told, version)
        if version in checkpoint.steps(self._folder):
            there = self._scorer.weights(version)
            if there.made_of != made_of:
                raise StoreError(
                    f"version {version} of the reward model in {self._folder} was made of other "
                    f"groups ({there.made_of}) than those on record ({made_of})"
                )
            return metrics | dict(there.metrics)
        before = self._scorer.weights(0 if self._config.begins == "first" else version - 1)
        model, found = fit(
            before.model,
            outcomes,
            self._config.fit,
            slots=self._scorer.slots,
            mesh=self._scorer.mesh,
            seed=[self._seed, version],
        )
        scale = before.scale
        if self._config.fit.kind == "pairs" and found:
            scale = platt(self._scores(model, outcomes), [one.good for one in outcomes])
        fitted = {f"reward_model/{name.partition('/')[2]}": x for name, x in found.items()}
        save(self._checkpoints, version, Weights(model, scale, made_of, fitted))
        return metrics | fitted

    def _judged(
        self, outcomes: Sequence[Outcome], told: Mapping[int, float], version: int
    ) -> dict[str, float]:
        """Metrics of the versions so far on outcomes that they were not trained on: of those that
        paid, and of the first, which tells how far the policy has drifted from it.

        told: index of an outcome -> probability that was paid.
        """
        metrics = {
            "reward_model/version": float(version),
            "reward_model/read": float(len(outcomes)),
        }
        if not outcomes:
            return metrics
        good = [one.good for one in outcomes]
        first = self._scorer.weights(0)
        scores = np.array(self._scores(first.model, outcomes))
        of_first = sigmoid(first.scale[0] * scores + first.scale[1]).tolist()
        paid = [told[number] for number in range(len(outcomes))]
        for name, values in (("", paid), ("first_", of_first)):
            metrics[f"reward_model/{name}ece"] = ece(reliability(values, good))
            if (area := auc(values, good)) is not None:
                metrics[f"reward_model/{name}auc"] = area
        metrics["reward_model/good"] = float(np.mean(good))
        metrics["reward_model/mean"] = float(np.mean(paid))
        return metrics

    def _scores(self, model: ScoredTransformer, outcomes: Sequence[Outcome]) -> list[float]:
        texts = [one.tokens for one in outcomes]
        one = self._scorer
        return scores_of(model, texts, slots=one.slots, mesh=one.mesh).tolist()


def outcomes_of(
    groups: Sequence[Group], component: str, one: Scorer, pool: SandboxPool | None
) -> tuple[list[Outcome], dict[int, float]]:
    """The outcomes that episodes left notes of, and the probability that each was given."""
    outcomes: list[Outcome] = []
    told: dict[int, float] = {}
    for group in groups:
        for trajectory in group.trajectories:
            notes = (trajectory.reward.notes or {}).get(component, {})
            if WORK not in notes:
                continue
            told[len(outcomes)] = notes["measures"]["probability"]
            tokens = tuple(one.ids(group.task, notes[WORK], pool))
            outcomes.append(Outcome(group.task.id, tokens, trajectory.solved))
    return outcomes, told


def _digest(records: Sequence[GroupRecord]) -> str:
    """Digest of the groups, in their order."""
    whole = "\n".join(str(record.digest) for record in records)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]
