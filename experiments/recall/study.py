"""Does an attention method remember? Small models trained from scratch on ``rows``, one per
method.

Training goes from few documents to many. The association is learned while rows are short and cheap,
and kept when they are long. Every method sees the same rows.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from attention.methods.api import METHODS
from attention.methods.method import Method
from experiments.recall.rows import RecallConfig, recall_rows
from models.model_config import ModelConfig
from models.sharding import MeshConfig, make_mesh, parameter_shardings, partition_spec
from models.transformer import Transformer
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.config.named import Named, make
from rl_code.config.read_config import ConfigError
from rl_code.host.files import write_atomically
from rl_code.host.stop import Stopped, StopRequest
from rl_code.learner.supervised_batching import SupervisedBatch
from rl_code.learner.update import OptimizerConfig, TrainState, init_state, make_sft_update
from rl_code.metrics.progress import Progress
from rl_code.metrics.writers import MetricLog

RESULT = "recall.json"
# What the rows of an evaluation are drawn by, apart from those of training.
_EVALUATION = 10**9


@dataclasses.dataclass(frozen=True)
class RecallMethod:
    """A method of attention and how documents are shown to it."""

    # The methods of the layers, as names of METHODS with their settings; see ``model_config``.
    attention: tuple[Named, ...]
    # As for ``recall_rows``.
    apart: bool = False
    positions: Literal["sequential", "shared"] = "sequential"

    def methods(self) -> tuple[Method, ...]:
        """The methods with their settings. Raises ConfigError."""
        path = "config.methods.attention"
        methods = tuple(make(METHODS, named, path) for named in self.attention)
        if not self.apart and any(method.needs_documents for method in methods):
            raise ConfigError(f"{path}: a method over documents needs apart=True")
        return methods


@dataclasses.dataclass(frozen=True)
class Stage:
    """Updates on rows of a number of documents, spread over ``span`` positions (see
    ``recall_rows``).
    """

    documents: int
    rows: int
    steps: int
    span: int


@dataclasses.dataclass(frozen=True)
class RecallModel:
    """Shape of the model, as in ``ModelConfig``."""

    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    embed_std: float


@dataclasses.dataclass(frozen=True)
class RecallExperiment:
    """The config of an experiment. questions: least number that each evaluation asks.
    evaluation_rows: at a time.
    """

    seed: int
    mesh: MeshConfig
    task: RecallConfig
    model: RecallModel
    methods: Mapping[str, RecallMethod]
    stages: tuple[Stage, ...]
    optimizer: OptimizerConfig
    checkpoint_every: int
    questions: int
    evaluation_rows: int

    def __post_init__(self):
        for method in self.methods.values():
            method.methods()
        if not self.methods or not self.stages:
            raise ValueError("recall: at least one method and one stage are needed")
        if self.stages[-1].documents != self.task.documents:
            raise ValueError(
                f"recall: the last stage has documents={self.stages[-1].documents}, "
                f"task.documents={self.task.documents}"
            )

    @property
    def steps(self) -> int:
        """Updates of all stages."""
        return sum(stage.steps for stage in self.stages)

    def stage(self, step: int) -> Stage:
        """The stage of an update."""
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return self.stages[-1]


@dataclasses.dataclass(frozen=True)
class RecallResult:
    """Share of right answers at the length of training and at the long one, of as many
    questions.
    """

    method: str
    short: float
    short_questions: int
    long: float
    long_questions: int
    train_seconds: float


def model_config(experiment: RecallExperiment, method: RecallMethod) -> ModelConfig:
    """The model of a method."""
    return ModelConfig(
        vocab_size=experiment.task.vocabulary,
        **dataclasses.asdict(experiment.model),
        norm_eps=1e-5,
        tied_embeddings=False,
        attention=method.methods(),
    )


def rows(
    experiment: RecallExperiment,
    method: RecallMethod,
    seed: int,
    count: int,
    documents: int,
    span: int = 0,
) -> SupervisedBatch:
    """Rows by their seed, the same for every method but for who sees whom and positions."""
    rng = np.random.default_rng([experiment.seed, seed])
    how = dict(apart=method.apart, positions=method.positions, span=span)
    # documents that see only themselves are sequences of their own, else a row is one
    align = experiment.task.document_tokens if method.apart else 0
    return SupervisedBatch(*recall_rows(experiment.task, rng, count, documents, **how), align)


@jax.jit
def right_answers(model: Transformer, batch: SupervisedBatch) -> jax.Array:
    """Number of asked values that have the highest logit."""
    hidden = model.hidden(batch.tokens, batch.positions, batch.where, align=batch.align)
    found = jnp.argmax(model.logits(hidden[:, :-1]), axis=-1) == batch.tokens[:, 1:]
    return jnp.sum(found * batch.mask[:, 1:])


def run_method(
    experiment: RecallExperiment, name: str, folder: Path, stop: StopRequest
) -> RecallResult:
    """Trains and evaluates one method in its folder; continues from its checkpoint, and returns at
    once when done.
    """
    if (folder / RESULT).exists():
        return RecallResult(**json.loads((folder / RESULT).read_text()))
    mesh = make_mesh(experiment.mesh)
    with jax.set_mesh(mesh):
        state, seconds = _train(experiment, name, folder, mesh, stop)
        accuracy = functools.partial(
            _accuracy, experiment, experiment.methods[name], state.model, mesh
        )
        short = accuracy(experiment.task.documents)
        long = accuracy(experiment.task.many)
    result = RecallResult(name, *short, *long, seconds)
    write_atomically(folder / RESULT, json.dumps(dataclasses.asdict(result)).encode())
    return result


def _train(
    experiment: RecallExperiment, name: str, folder: Path, mesh, stop: StopRequest
) -> tuple[TrainState, float]:
    """The trained state and the seconds that its updates took. Raises FloatingPointError,
    Stopped.
    """
    method = experiment.methods[name]
    update = make_sft_update(experiment.optimizer, 1)
    model = Transformer(model_config(experiment, method), nnx.Rngs(experiment.seed))
    state = init_state(
        jax.device_put(model, parameter_shardings(model, mesh)), experiment.optimizer
    )
    settings = dataclasses.replace(experiment, methods={name: method})
    by_rows = NamedSharding(mesh, partition_spec(("batch",)))
    with Checkpoints(
        folder, settings, keep=2, may_change=("mesh", "checkpoint_every")
    ) as checkpoints:
        restored = checkpoints.restore(state)
        start, seconds = 0, 0.0
        if restored is not None:
            start = restored.step
            state = restored.state
            seconds = restored.position["seconds"]
        with (
            MetricLog(folder, start) as writer,
            Progress(name, experiment.steps, start) as bar,
            stop.deferred(),
        ):
            for step in range(start, experiment.steps):
                begin = time.perf_counter()
                stage = experiment.stage(step)
                batch = rows(experiment, method, step, stage.rows, stage.documents, stage.span)
                state, metrics = update(state, jax.device_put(batch, by_rows))
                metrics = jax.device_get(metrics)
                if not metrics["train/finite"]:
                    raise FloatingPointError(f"{name}: the loss is not finite at step {step}")
                took = time.perf_counter() - begin
                seconds += took
                writer.write(
                    step, {**metrics, "time/step_s": took, "recall/documents": stage.documents}
                )
                bar.update(step + 1, loss=float(metrics["train/loss"]))
                last = step + 1 == experiment.steps
                if (step + 1) % experiment.checkpoint_every == 0 or last or stop.requested:
                    checkpoints.save(step + 1, state, {"seconds": seconds})
                if stop.requested and not last:
                    raise Stopped(f"stopped after step {step + 1} of {experiment.steps} of {name}")
    return state, seconds


def _accuracy(
    experiment: RecallExperiment, method: RecallMethod, model: Transformer, mesh, documents: int
) -> tuple[float, int]:
    """(share of right answers, questions) on rows of a number of documents that training has not
    seen.
    """
    count = experiment.evaluation_rows
    by_rows = NamedSharding(mesh, partition_spec(("batch",)))
    batches = -(-experiment.questions // (count * experiment.task.asked))
    right = 0
    for index in range(batches):
        batch = rows(experiment, method, _EVALUATION + documents * 10**6 + index, count, documents)
        right += int(right_answers(model, jax.device_put(batch, by_rows)))
    questions = batches * count * experiment.task.asked
    return right / questions, questions
