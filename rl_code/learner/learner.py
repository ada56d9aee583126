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
from rl_code.learner.advantages import ADVANTAGES, group_advantages
from rl_code.learner.batching import pack
from rl_code.learner.config import LearnerConfig
from rl_code.learner.parts import credited
from rl_code.learner.two_phase import Prefilled, make_two_phase_logprobs, make_two_phase_update
from rl_code.learner.two_phase_batching import pack_completions, pack_prompts
from rl_code.learner.update import TrainState, make_token_logprobs, make_update
from rl_code.types import Group


class Learner:
    """Turns the groups of a step into the next weights.

    The update has one phase or, where ``pack.prompt_slots`` is not 0, two: the first needs only the
    prompts, so it can run while the episodes are still being sampled.
    """

    def __init__(self, config: LearnerConfig, rows: jax.sharding.Sharding, model: Transformer):
        """
        rows: the sharding of a batch's rows over the mesh.
        model: the model that training begins with. It is the reference policy of the KL divergence.
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
        logprobs = (loss.temperature, config.micro_batches, runs)
        # What the sampler notes of each target. The reference policy makes its own choices.
        self._choices = {}
        if config.picks is not None:
            self._choices = picks.shapes(model.config, config.pack.slots)
        replay = config.picks == "replay"
        self._two_phase = config.pack.prompt_slots > 0
        if self._two_phase:
            self._prefill, self._update = make_two_phase_update(*way)
            self._token_logprobs = make_two_phase_logprobs(*logprobs)
        else:
            self._update = make_update(*way, replay)
            self._token_logprobs = make_token_logprobs(*logprobs, replay)

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

        # Credit: advantages within each group, then fixed shapes with each prompt once.
        advantages = group_advantages(groups, self._advantage)
        advantages = credited(groups, advantages, self._advantage, config.parts)
        if self._two_phase:
            begun = begun or self.begin(state, [_prompt_of(group) for group in groups])
            batch, pack_metrics = pack_completions(
                groups, advantages, begun.prompts, config.pack, version=version
            )
            before = (begun.prompts,)
        else:
            batch, pack_metrics = pack(
                [*groups, *(group for group, _ in late)],
                [*advantages, *([credit] for _, credit in late)],
                config.pack,
                version=version,
                choices=self._choices,
                late=len(late),
            )
            before = ()
        if late:
            pack_metrics["memory/credited"] = float(len(late))
            pack_metrics["memory/worth"] = float(np.mean([credit for _, credit in late]))
        pack_metrics["batch/crc32"] = _crc32(batch)
        batch = jax.device_put(batch, self._rows)

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
            state, metrics = self._update(state, *parts, prox, ref)
            metrics = jax.device_get(metrics)
            finite = finite and metrics["train/finite"]
            no_signal += metrics["train/no_signal"]
        over_epochs = {"train/finite": finite, "train/no_signal": no_signal}
        return state, pack_metrics | metrics | over_epochs


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
