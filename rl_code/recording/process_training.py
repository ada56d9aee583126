"""Trains a process reward model on the recorded steps of runs (``rewards.process_model``).

The runs forked their episodes (``rollout.forks``), so their records say of turn borders which share
of the continuations solved the task (``rewards.step_labels``). The backbone begins as the policy of
a checkpoint with the same tokenizer. Tasks that are held out judge it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding

from models.model_config import ModelConfig
from models.padding import cut_config
from models.scalar_head import ScoredTransformer, with_head
from models.sharding import MeshConfig, make_mesh, partition_spec, row_shards
from models.transformer import Transformer
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.config.read_config import ConfigError, at_least, to_dict
from rl_code.host.stop import Stopped, StopRequest
from rl_code.learner.optimizer import OptimizerConfig
from rl_code.learner.scored import ScoredBatch, make_scored_update, pack_scored, scores_in
from rl_code.learner.update import TrainState, init_state
from rl_code.metrics.progress import Progress
from rl_code.metrics.writers import JsonLines, MetricLog
from rl_code.recording import kept_config
from rl_code.rewards import process_model
from rl_code.rewards.calibration import auc, ece, reliability, sigmoid
from rl_code.rewards.process_model import Description
from rl_code.rewards.reward_model_folder import names_of
from rl_code.rewards.step_labels import Estimation, Labelled, labelled, split
from rl_code.run import origin as origin_lib
from rl_code.run.workdir import STORE, refuse_run
from rl_code.store.source import read_ahead
from rl_code.store.store import GroupStore

# Keys that may change on a folder that was begun: more updates, kept more often.
_MAY_CHANGE = ("steps", "checkpoint_every")
_BACKBONE = "config.backbone"


@dataclasses.dataclass(frozen=True)
class ProcessModelConfig:
    """Training of a process reward model."""

    # Workdirs of runs with ``rollout.forks``, whose recorded steps are read.
    runs: tuple[str, ...]
    # The policy that the backbone begins as: the workdir of a run, perhaps with @ and a step.
    backbone: str
    optimizer: OptimizerConfig
    # Updates.
    steps: int = 300
    # The recorded steps of each run that are read: the first, and one past the last; None for all.
    first: int = 0
    last: int | None = None
    # The label of a border: the share of its continuations that solved the task ("soft"), or
    # whether any did ("hard").
    estimation: Estimation = "soft"
    # Whether ends of episodes are labelled too, by their outcome.
    ends: bool = True
    # The share of tasks that are held out to judge the model by.
    held_out: float = 0.1
    # Rows of a batch, slots of a row, and borders of a row. None for slots of the longest context.
    rows: int = 8
    slots: int | None = None
    borders: int = 64
    # Parts of a batch whose gradients are computed one after another, to save memory.
    micro_batches: int = 1
    # Seed of the order in which contexts are trained on.
    seed: int = 0
    # Updates between checkpoints, at each of which the model is judged.
    checkpoint_every: int = 100
    # Devices that learn.
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self):
        at_least(self, steps=1, first=0, rows=1, slots=2, borders=1, micro_batches=1)
        at_least(self, checkpoint_every=1)
        if not self.runs:
            raise ValueError("runs=() must name the workdir of at least one run")
        if self.rows % self.micro_batches:
            raise ValueError(
                f"rows={self.rows} must divide into micro_batches={self.micro_batches}"
            )
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out={self.held_out} must be at least 0 and below 1")


def read_labels(config: ProcessModelConfig) -> list[Labelled]:
    """The labelled trajectories of the runs, in the order of their record. Raises ConfigError where
    there are none, and StoreError for a record that cannot be read.
    """
    found: list[Labelled] = []
    for run in config.runs:
        _check_tokenizer(Path(run), config.backbone)
        store = GroupStore(Path(run) / STORE)
        steps = [
            step
            for step in store.consumed()
            if step >= config.first and (config.last is None or step < config.last)
        ]
        records = read_ahead(store.folder, store.places(steps))
        own = list(labelled((record.group for record in records), config.estimation, config.ends))
        if not any(len(one.text.places) > config.ends for one in own):
            raise ConfigError(
                f"config.runs: {run} has no continuations on record in its {len(steps)} steps from "
                f"{config.first} on; run it with rollout.forks"
            )
        found += own
    return found


def train(config: ProcessModelConfig, folder: Path) -> dict[str, Any]:
    """Trains a model in a folder, from wherever it left off, and returns how it was judged last.

    Raises ConfigError, StoreError, CheckpointError, FloatingPointError where the loss is not
    finite, and Stopped.
    """
    refuse_run(folder)
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh), StopRequest() as stop:
        if config.rows // config.micro_batches % row_shards(mesh):
            raise ConfigError(
                f"config.rows = {config.rows} in config.micro_batches = {config.micro_batches} "
                f"parts do not divide by the {row_shards(mesh)} devices over which rows are cut"
            )
        training, held_out = split(read_labels(config), config.held_out)
        if not training:
            raise ConfigError(f"config.held_out = {config.held_out} leaves no task to train on")
        model = _begin(config, folder, mesh)
        return _Training(config, folder, mesh, training, held_out).run(model, stop)


def shape_of(backbone: str) -> ModelConfig:
    """Shape of a run's policy, in float32 and without adapters. Raises ConfigError."""
    origin = origin_lib.find(backbone, _BACKBONE)
    if origin.workdir is None:
        raise ConfigError(
            f"config.backbone = {backbone!r} must be the workdir of a run: the model reads the "
            "tokens that its policy wrote"
        )
    shape = origin.shape()
    methods = kept_config.read(origin.workdir).model.known_methods()
    return dataclasses.replace(shape, attention=methods or shape.attention)


def _begin(config: ProcessModelConfig, folder: Path, mesh: Mesh) -> ScoredTransformer:
    """The model before its first update; what belongs to it goes into the folder."""
    origin = origin_lib.find(config.backbone, _BACKBONE)
    shape = shape_of(config.backbone)
    policy: Transformer = origin.load(shape, mesh)
    origin_lib.keep(
        folder,
        origin,
        cut_config(shape),
        origin.tokenizer(chat_template="family"),
        max_positions=origin.max_positions() or 0,
        stop_ids=origin.stop_ids(),
        chat_template=None,
        own_tokenizer=True,
    )
    return with_head(policy)


def _check_tokenizer(run: Path, backbone: str) -> None:
    """Raises ConfigError where a run has another tokenizer than the backbone."""
    there, here = (
        origin_lib.kept_by(folder) / "tokenizer.json"
        for folder in (run, origin_lib.find(backbone, _BACKBONE).workdir or Path(backbone))
    )
    if there.read_bytes() != here.read_bytes():
        raise ConfigError(
            f"config.runs: {run} has another tokenizer than config.backbone = {backbone!r}, so its "
            "tokens mean something else to it"
        )


class _Training:
    """The loop over updates."""

    def __init__(
        self,
        config: ProcessModelConfig,
        folder: Path,
        mesh: Mesh,
        training: Sequence[Labelled],
        held_out: Sequence[Labelled],
    ):
        self._config, self._folder = config, folder
        self._training, self._held_out = training, held_out
        self._rows = NamedSharding(mesh, partition_spec(("batch",)))
        longest = max(len(one.text.tokens) for one in (*training, *held_out))
        self._slots = config.slots or longest
        self._align = 1
        self._judged: dict[str, Any] = {}

    def run(self, model: ScoredTransformer, stop: StopRequest) -> dict[str, Any]:
        """As ``train``."""
        config = self._config
        self._align = model.config.alignment
        self._slots += -self._slots % self._align
        attention = names_of(model.config.attention, "config.backbone")
        update = make_scored_update(config.optimizer, "outcomes", config.micro_batches)
        state = init_state(model, config.optimizer)
        with Checkpoints(self._folder, config, keep=2, may_change=_MAY_CHANGE) as checkpoints:
            restored = checkpoints.restore(state)
            start, position = 0, 0
            if restored is not None:
                state, start = restored.state, restored.step
                position, self._judged = restored.position["at"], restored.position["judged"]
            with (
                MetricLog(self._folder, start, (JsonLines(),), to_dict(config)) as writer,
                Progress("process model", config.steps, start) as progress,
                stop.deferred(),
            ):
                for step in range(start, config.steps):
                    batch, position = self._batch(position)
                    state, metrics = update(state, jax.device_put(batch, self._rows))
                    metrics = jax.device_get(metrics)
                    if not metrics["train/finite"]:
                        raise FloatingPointError(f"the loss is not finite at update {step}")
                    writer.write(step, metrics)
                    progress.update(step + 1, loss=float(metrics["train/loss"]))
                    due = (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps
                    if due:
                        self._judged[str(step + 1)] = self._judge(state)
                    if due or stop.agreed:
                        at = {"at": position, "judged": self._judged}
                        checkpoints.save(step + 1, state, at)
                        checkpoints.wait()
                        made_of = to_dict(config)
                        description = Description(attention, made_of, self._judged)
                        process_model.write(self._folder, description)
                    if stop.agreed:
                        raise Stopped(f"stopped after update {step + 1} of {config.steps}")
        return self._judged[str(config.steps)] if self._judged else {}

    def _order(self, position: int) -> Iterator[Labelled]:
        """Contexts from a position on: all of them in an order of their own, again and again."""
        count = len(self._training)
        for epoch in itertools.count(position // count):
            order = np.random.default_rng([self._config.seed, epoch]).permutation(count)
            first = position % count if epoch == position // count else 0
            yield from (self._training[number] for number in order[first:])

    def _batch(self, position: int) -> tuple[ScoredBatch, int]:
        """The batch from a position on, and the position behind it."""
        batch, taken = self._packed(self._order(position))
        return batch, position + len(taken)

    def _packed(self, found: Iterable[Labelled]) -> tuple[ScoredBatch, list[list[tuple[int, int]]]]:
        c = self._config
        return pack_scored(
            ([one.text] for one in found),
            rows=c.rows,
            slots=self._slots,
            most=c.borders,
            align=self._align,
        )

    def _judge(self, state: TrainState) -> dict[str, Any]:
        """Measures on the borders of held-out tasks: of those with continuations, and of ends."""
        if not self._held_out:
            logging.warning("no task is held out to judge the process reward model by")
            return {}
        scores: list[float] = []
        at = 0
        while at < len(self._held_out):
            batch, taken = self._packed(self._held_out[at:])
            found = np.asarray(
                scores_in(state.model, jax.device_put(batch, self._rows)), np.float64
            )
            for [(row, first)], one in zip(taken, self._held_out[at:], strict=False):
                own = found[row, first : first + len(one.text.places)]
                scores += sigmoid(own).tolist()
            at += len(taken)
        labels = [label for one in self._held_out for label in one.text.labels]
        ends = [
            self._config.ends and number == len(one.text.places) - 1
            for one in self._held_out
            for number in range(len(one.text.places))
        ]
        kinds = {"borders": [not end for end in ends], "ends": ends}
        return {kind: measures(scores, labels, which) for kind, which in kinds.items()}


def measures(
    scores: Sequence[float], labels: Sequence[float], which: Sequence[bool]
) -> dict[str, Any]:
    """Measures of some scores against labels: their number; the mean squared error, and that of the
    mean label, which a model must beat; AUC and calibration error for labels above a half.
    """
    chosen = np.flatnonzero(which)
    if not len(chosen):
        return {"count": 0}
    p, y = np.asarray(scores, np.float64)[chosen], np.asarray(labels, np.float64)[chosen]
    good = y > 0.5
    return {
        "count": len(chosen),
        "label": float(y.mean()),
        "error": float(np.mean(np.square(p - y))),
        "error_of_mean": float(np.var(y)),
        "auc": auc(p, good),
        "ece": ece(reliability(p, good)),
    }
