"""Results of the study of recall: a table and a figure of accuracy and of bytes read, by method."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import rich.table
from flax import nnx

from benchmarks.flops import attention_trips, matmul_flops
from experiments.recall.study import RecallExperiment, RecallResult, model_config, rows
from models.model_config import ModelConfig
from models.transformer import Transformer
from rl_code.learner.update import supervised_loss


def table(experiment: RecallExperiment, results: Sequence[RecallResult]) -> rich.table.Table:
    """One line per method; accuracy in % with twice its standard error."""
    task = experiment.task
    short = task.tokens(task.documents)
    long = task.tokens(task.many)
    view = rich.table.Table(caption=f"chance: {100 / task.values:.1f} %", caption_justify="left")
    view.add_column("method")
    for name in (
        f"right at {short} tokens, %",
        f"at {long}, %",
        "training GFLOP",
        f"decode bytes a token at {short}",
        f"at {long}",
        "minutes",
    ):
        view.add_column(name, justify="right")
    for result in results:
        config = model_config(experiment, experiment.methods[result.method])
        view.add_row(
            result.method,
            _percent(result.short, result.short_questions),
            _percent(result.long, result.long_questions),
            f"{training_flops(experiment, result.method) / 1e9:,.0f}",
            f"{read_per_token(config, short):,}",
            f"{read_per_token(config, long):,}",
            f"{result.train_seconds / 60:.1f}",
        )
    return view


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
    import matplotlib  # slow to import, and only the end of a run draws

    matplotlib.use("Agg")
    from matplotlib import pyplot

    task = experiment.task
    short = task.tokens(task.documents)
    long = task.tokens(task.many)
    figure, (bars, points) = pyplot.subplots(1, 2, figsize=(11, 4))
    at = np.arange(len(results))
    bars.bar(
        at - 0.2,
        [100 * r.short for r in results],
        0.38,
        label=f"{short} tokens, the length of training",
    )
    bars.bar(at + 0.2, [100 * r.long for r in results], 0.38, label=f"{long} tokens")
    bars.axhline(100 / task.values, color="grey", linewidth=1, linestyle=":", label="chance")
    bars.set_xticks(at, [r.method for r in results])
    bars.set(ylabel="right answers, %", ylim=(0, 105))
    same: dict[float, list[RecallResult]] = {}
    for result in results:
        config = model_config(experiment, experiment.methods[result.method])
        same.setdefault(read_per_token(config, long) / 1024, []).append(result)
    for read, group in same.items():
        points.plot([read] * len(group), [100 * r.long for r in group], "o")
        below = max(r.long for r in group) > 0.5
        at = (read, 100 * (min if below else max)(r.long for r in group))
        names = ", ".join(r.method for r in group)
        points.annotate(
            names,
            at,
            xytext=(0, -8 if below else 8),
            textcoords="offset points",
            ha="center" if below else "left",
            va="top" if below else "bottom",
        )
    points.set(
        xlabel=f"KiB read to decode a token at {long} tokens",
        ylabel="right answers, %",
        ylim=(0, 105),
    )
    points.set_xlim(left=0, right=points.get_xlim()[1] * 1.15)
    for axis in (bars, points):
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *bars.get_legend_handles_labels(),
        loc="upper left",
        ncols=3,
        frameon=False,
        fontsize="small",
    )
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _percent(share: float, questions: int) -> str:
    return f"{100 * share:.1f} ± {200 * (share * (1 - share) / questions) ** 0.5:.1f}"
