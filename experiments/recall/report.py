"""Results of the study of recall: a table and a figure of accuracy and of bytes read, by method."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import rich.table
from flax import nnx

from experiments.recall.study import RecallExperiment, RecallResult, model_config, rows
from experiments.report import figure, table
from models.model_config import ModelConfig
from models.transformer import Transformer
from planner.flops import attention_trips, matmul_flops
from rl_code.learner.update import supervised_loss


def accuracies(experiment: RecallExperiment, results: Sequence[RecallResult]) -> rich.table.Table:
    """One line per method; accuracy with twice its standard error."""
    task = experiment.task
    short = task.tokens(task.documents)
    long = task.tokens(task.many)
    rows = []
    for result in results:
        config = model_config(experiment, experiment.methods[result.method])
        rows.append(
            (
                result.method,
                _percent(result.short, result.short_questions),
                _percent(result.long, result.long_questions),
                f"{training_flops(experiment, result.method) / 1e9:,.0f}",
                f"{read_per_token(config, short):,}",
                f"{read_per_token(config, long):,}",
                f"{result.train_seconds / 60:.1f}",
            )
        )
    right = [f"right at {short} tokens, %", f"at {long}, %"]
    read = [f"decode bytes a token at {short}", f"at {long}"]
    columns = ["method", *right, "training GFLOP", *read, "minutes"]
    return table(columns, rows, f"chance: {100 / task.values:.1f} %")


def training_flops(experiment: RecallExperiment, name: str) -> float:
    """FLOPs of the matrix products of all updates, counted in the compiled gradient of one row of
    each stage.
    """
    method = experiment.methods[name]
    config = model_config(experiment, method)
    model = jax.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))

    @functools.cache  # stages may have rows of the same shape
    def of_one_row(documents: int) -> float:
        row = rows(experiment, method, 0, 1, documents)
        compiled = (
            jax.jit(jax.grad(lambda model, row: supervised_loss(model, row)[0]))
            .lower(model, row)
            .compile()
        )
        trips = attention_trips(config.attention, row.where)
        return matmul_flops(compiled.as_text(), trips)

    return sum(
        stage.steps * stage.rows * of_one_row(stage.documents) for stage in experiment.stages
    )


def read_per_token(config: ModelConfig, tokens: int) -> int:
    """Bytes of keys and values that all layers read to decode one token after ``tokens``, in the
    config's dtype.
    """
    per_period = sum(
        method.decode_bytes(tokens, config.layer_shape, config.dtype) for method in config.attention
    )
    return per_period * config.periods


def draw(experiment: RecallExperiment, results: Sequence[RecallResult], path: Path) -> None:
    """Accuracy by method at both lengths, and at the long one against what a decoded token
    reads.
    """
    task = experiment.task
    short = task.tokens(task.documents)
    long = task.tokens(task.many)
    with figure(path, 11, 4, 1, 1) as (bars, points):
        at = np.arange(len(results))
        in_training = f"{short} tokens, the length of training"
        bars.bar(at - 0.2, [100 * one.short for one in results], 0.38, label=in_training)
        bars.bar(at + 0.2, [100 * one.long for one in results], 0.38, label=f"{long} tokens")
        chance = 100 / task.values
        bars.axhline(chance, color="grey", linewidth=1, linestyle=":", label="chance")
        bars.set_xticks(at, [one.method for one in results])
        bars.set(ylabel="right answers, %", ylim=(0, 125))  # room for the legend
        same: dict[float, list[RecallResult]] = {}
        for one in results:
            config = model_config(experiment, experiment.methods[one.method])
            same.setdefault(read_per_token(config, long) / 1024, []).append(one)
        for read, group in same.items():
            right = [100 * one.long for one in group]
            points.plot([read] * len(group), right, "o")
            below = max(right) > 50
            where = dict(ha="center", va="top") if below else dict(ha="left", va="bottom")
            points.annotate(
                ", ".join(one.method for one in group),
                (read, min(right) if below else max(right)),
                xytext=(0, -8 if below else 8),
                textcoords="offset points",
                **where,
            )
        points.set(xlabel=f"KiB read to decode a token at {long} tokens", ylim=(0, 105))
        points.set(ylabel="right answers, %", xlim=(0, 1.15 * points.get_xlim()[1]))


def _percent(share: float, questions: int) -> str:
    return f"{100 * share:.1f} ± {200 * (share * (1 - share) / questions) ** 0.5:.1f}"
