"""The learner: one step of training from sampled groups to the next weights.

It works out the advantages, packs the batch and makes the updates. It knows nothing of files, of
stores or of how the groups were sampled, so that a replay and a run use the same one.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from models.transformer import Transformer
from rl_code.config import named
from rl_code.learner import picks
from rl_code.learner.advantages import ADVANTAGES, Credit, group_advantages, reads_values
from rl_code.learner.batch import Batch
from rl_code.learner.batching import pack
from rl_code.learner.config import LearnerConfig
from rl_code.learner.continuations import with_continuations
from rl_code.learner.distillation import TeacherConfig
from rl_code.learner.parts import credited, of_trained
from rl_code.learner.teacher import PromptWith, Teacher, moved
from rl_code.learner.two_phase import Prefilled, make_two_phase_logprobs, make_two_phase_update
from rl_code.learner.two_phase_batching import pack_completions, pack_prompts
from rl_code.learner.update import TrainState, make_token_logprobs, make_update
from rl_code.learner.value_credit import with_values
from rl_code.learner.value_update import make_token_values, make_value_update
from rl_code.types import Group


class Learner:
    """Turns the groups of a step into the next weights.

    The update has one phase or, where ``pack.prompt_slots`` is not 0, two: the first needs only the
    prompts, so it can run while the episodes are still being sampled.
    """

    def __init__(
        self,
        config: LearnerConfig,
        rows: jax.sharding.Sharding,
        model: Transformer,
        teacher: Transformer | None = None,
        prompt: PromptWith | None = None,
    ):
        """
        rows: the sharding of a batch's rows over the mesh.
        model: the model that training begins with. It is the reference policy of the KL divergence.
        teacher, prompt: as ``Teacher`` takes them, where the config has a teacher.
        """
        self._config = config
        self._rows = rows
        self._advantage = named.make(ADVANTAGES, config.advantage, "config.train.advantage")
        oldest = max(config.pack.max_staleness, config.pack.late_staleness)
        loss = config.loss.for_staleness(oldest)
        # A copy, since the first update donates the model.
        self._reference = (
            jax.tree.map(lambda x: x.copy(), model) if self._config.loss.kl_coef else None
        )
        runs = config.pack.runs
        way = (loss, config.optimizer, config.micro_batches, runs)
        self._teacher = None
        lesson = {}
        if config.teacher is not None:
            self._teacher = Teacher(config, rows, teacher, prompt)
            lesson = {"teacher": config.teacher}
        logprobs = (loss.temperature, config.micro_batches, runs)
        # What the sampler notes of each target. The reference policy makes its own choices.
        self._choices = {}
        if config.picks is not None:
            self._choices = picks.shapes(model.config, config.pack.slots)
        replay = config.picks == "replay"
        self._two_phase = config.pack.prompt_slots > 0
        if self._two_phase:
            self._prefill, self._update = make_two_phase_update(*way, **lesson)
            self._token_logprobs = make_two_phase_logprobs(*logprobs)
        else:
            value = config.value
            # a separate backbone has an update of its own
            joint = value if value is not None and value.backbone == "shared" else None
            self._update = make_update(*way, replay, value=joint, **lesson)
            self._token_logprobs = make_token_logprobs(*logprobs, replay)
            if value is not None:
                shapes = (config.micro_batches, runs, replay)
                self._token_values = make_token_values(*shapes)
                self._value_update = make_value_update(value, *shapes)

    def begin(self, state: TrainState, prompts: Iterable[Sequence[int]]) -> Prefilled | None:
        """Starts the first of two phases, which needs only the prompts of the step, and returns
        before the devices have finished it. None if the update has one phase.
        """
        if not self._two_phase:
            return None
        packed = pack_prompts(prompts, self._config.pack)
        return self._prefill(state.model, jax.device_put(packed, self._rows))

    def __call__(
        self,
        state: TrainState,
        groups: Sequence[Group],
        version: int,
        begun: Prefilled | None = None,
        late: Sequence[tuple[Group, float]] = (),
    ) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state after the step, and the metrics of the step. ``state`` is donated.
        "batch/crc32" among them is a checksum of the batch, for the record, and "train/no_signal"
        counts the updates that left the state as it was (``update.make_update``).

        version: the version of the weights in ``state``. begun: what ``begin`` returned for this
        step, or None. late: trajectories of earlier steps, each in a group of its own, that are
        credited now, with their advantage (``rl_code.rollout.late_credit``).
        """
        config = self._config

        # Credit: advantages within each group, then fixed shapes with each prompt once. Those that
        # are made of values come after the packing, since values are computed from the batch.
        groups, advantages = self._credited(groups)
        batch, begun, pack_metrics = self._packed(state, groups, advantages, version, begun, late)
        before = (begun.prompts,) if self._two_phase else ()
        if config.value is not None:
            placed = jax.device_put(batch, self._rows)
            values = np.asarray(self._token_values(state.model, state.value.critic, placed))
            seen = of_trained(groups, config.pack.untrained)
            batch, found = with_values(batch, seen, values, self._advantage, config.value)
            pack_metrics |= found
        pack_metrics["batch/crc32"] = _crc32(batch)
        pack_metrics["train/credited"] = _share_credited(batch, config.teacher)
        on_host = batch
        batch = jax.device_put(batch, self._rows)
        # no update sees the moving average
        average = state.average
        state = dataclasses.replace(state, average=None)

        # Values: where they are trained apart from the policy, their updates come first. A value
        # function that fails then leaves the policy as it is.
        pretrains = config.value is not None and (
            int(state.value.updates) < config.value.pretrain_updates
        )
        if pretrains or (config.value is not None and config.value.backbone == "separate"):
            updates = config.value.pretrain_epochs if pretrains else config.epochs
            state, found = self._fit(state, batch, updates)
            pack_metrics |= found
            if pretrains or not found["train/finite"]:
                return dataclasses.replace(state, average=average), pack_metrics
            # the policy's update is that of a run without values
            batch = dataclasses.replace(batch, values=None, returns=None)

        # What the teacher says of the sampled tokens, before the updates.
        lesson = ()
        if self._teacher is not None:
            whole = dataclasses.replace(state, average=average)
            lesson = self._teacher(whole, groups, advantages, on_host, version)

        # Update. With one epoch, the policy that is updated is itself the proximal policy. With
        # several, the proximal policy is that before the first update, so it is computed now.
        prox = self._token_logprobs(state.model, *before, batch) if config.epochs > 1 else None
        ref = (
            self._token_logprobs(self._reference, *before, dataclasses.replace(batch, choices=None))
            if self._reference is not None
            else None
        )
        finite = True
        no_signal = 0.0
        for _ in range(config.epochs):
            parts = (begun, batch) if self._two_phase else (batch,)
            state, metrics = self._update(state, *parts, prox, ref, *lesson)
            metrics = jax.device_get(metrics)
            finite = finite and metrics["train/finite"]
            no_signal += metrics["train/no_signal"]
        if average is not None:
            state = moved(config.teacher, dataclasses.replace(state, average=average))
        if config.teacher is not None and config.teacher.coef:
            heard = float(metrics["teacher/share"])
            pack_metrics["train/credited"] = max(pack_metrics["train/credited"], heard)
        over_epochs = {"train/finite": finite, "train/no_signal": no_signal}
        return state, pack_metrics | metrics | over_epochs

    def _credited(
        self, groups: Sequence[Group]
    ) -> tuple[Sequence[Group], Sequence[Sequence[Credit]]]:
        """The groups that are trained on, and the credit of each of their trajectories; 0 where
        advantages are made of values, until there are values.
        """
        if reads_values(self._advantage):
            return groups, [[0.0] * len(group.trajectories) for group in groups]
        advantages = group_advantages(groups, self._advantage)
        advantages = credited(groups, advantages, self._advantage, self._config.parts)
        if not self._config.continuations:
            return groups, advantages
        pairs = zip(groups, advantages, strict=True)
        trained = [with_continuations(*pair, self._advantage) for pair in pairs]
        return [group for group, _ in trained], [found for _, found in trained]

    def _packed(
        self,
        state: TrainState,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[Credit]],
        version: int,
        begun: Prefilled | None,
        late: Sequence[tuple[Group, float]],
    ) -> tuple[Batch, Prefilled | None, dict[str, Any]]:
        """The batch of a step in numpy, what its update begins with, and metrics."""
        pack_config = self._config.pack
        if not self._two_phase:
            batch, metrics = pack(
                [*groups, *(group for group, _ in late)],
                [*advantages, *([credit] for _, credit in late)],
                pack_config,
                version=version,
                choices=self._choices,
                late=len(late),
            )
            if late:
                metrics["memory/credited"] = float(len(late))
                metrics["memory/worth"] = float(np.mean([credit for _, credit in late]))
            return batch, None, metrics
        begun = begun or self.begin(state, [_prompt_of(group) for group in groups])
        batch, metrics = pack_completions(
            groups, advantages, begun.prompts, pack_config, version=version
        )
        return batch, begun, metrics

    def _fit(self, state: TrainState, batch: Batch, updates: int) -> tuple[TrainState, dict]:
        """The state after some updates of the value function alone, and the last one's metrics."""
        finite = True
        for _ in range(updates):
            state, metrics = self._value_update(state, batch)
            metrics = jax.device_get(metrics)
            finite = finite and metrics.pop("value/finite") > 0.0
        return state, metrics | {"train/finite": finite, "train/no_signal": 0.0}


def _share_credited(batch: Batch, teacher: TeacherConfig | None) -> float:
    """The share of the targets with an advantage other than 0; 0 where there are none, and where
    advantages count for nothing beside a teacher.
    """
    if teacher is not None and not teacher.rewards:
        return 0.0
    advantages = np.asarray(batch.advantages)[np.asarray(batch.mask) > 0]
    return np.count_nonzero(advantages) / max(1, advantages.size)


def _prompt_of(group: Group) -> np.ndarray:
    """The tokens that all trajectories of a group start with."""
    first = group.trajectories[0]
    return first.contexts[0].tokens[: first.prompt_length]


def _crc32(batch: Any) -> int:
    """A checksum of the arrays of a batch, which are still on the host. It tells whether two runs
    part before an update or in it.
    """
    value = 0
    for array in jax.tree.leaves(batch):
        value = zlib.crc32(np.ascontiguousarray(array), value)
    return value
