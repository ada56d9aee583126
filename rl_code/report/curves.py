"""The metrics of runs as charts: which metrics share one, and the values at every step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_code.metrics.values import read_metrics

# Title, whether values are fractions, and which metrics a chart shows. A metric belongs to the
# first that matches; those that match none are shown under "Everything else".
CHARTS = (
    ("Held-out pass rate, with its 95 % interval", True, r"eval/"),
    ("Pass rate", True, r"(reward/(solved|first_edit|mixed_groups)|episode/submitted)$"),
    ("Groups whose rewards differ", True, r"reward/signal_groups$"),
    ("Reward", False, r"reward/"),
    ("Tests that graded work passes", True, r"passed/"),
    ("Pass rate by kind of task", True, r"tasks/pass_rate_"),
    ("Share of tasks by kind", True, r"tasks/share_"),
    ("Tokens per episode", False, r"episode/.*tokens$"),
    ("Turns and malformed calls per episode", False, r"episode/(turns|malformed_calls)$"),
    ("Entropy, nats per token", False, r"policy/entropy"),
    ("KL divergence", False, r"policy/(step_)?kl"),
    ("Sampler against trainer, KL divergence", False, r"policy/mismatch_k"),
    ("Sampler against trainer, |Δ log p|", False, r"policy/mismatch"),
    ("Sampler's picks that the trainer would take", True, r"policy/(picks|experts)"),
    ("Load of the busiest expert over the mean", False, r"experts/busiest"),
    ("Entropy of routing, nats per token", False, r"experts/entropy"),
    ("Loss of balance", False, r"experts/balance_loss"),
    ("Clipped and truncated share", True, r"policy/(clip_fraction|truncated_fraction)"),
    ("Effective sample size", True, r"policy/ess"),
    ("Explained variance of values, by turn", False, r"value/explained_variance(_turn_.*)?$"),
    ("Explained variance of values, by tokens to the end", False, r"value/explained_variance_"),
    ("Values and returns", False, r"value/(mean|return_mean|error)$"),
    ("Staleness, versions", False, r"rollout/staleness"),
    ("Share of tokens that were sampled so many versions ago", True, r"staleness/"),
    ("Loss", False, r"(train|sft)/(.*_)?loss"),
    ("Gradient norm", False, r"train/grad_norm"),
    ("Tokens per second", False, r"(.*tokens_per_s|engine/.*_per_s)$"),
    ("Tokens per step", False, r"(rollout|engine)/.*_tokens$"),
    ("Slots in use", True, r"(engine/occupancy|pack/(target_)?fill)$"),
    ("Context found in the cache", True, r"engine/(prefix_hit_rate|hits_|document_hits$)"),
    ("Drafted tokens that were right", True, r"engine/draft_acceptance$"),
    ("Tokens that a row gains per decoding step", False, r"engine/tokens_per_row_step$"),
    ("Idle, waiting for tools", True, r"time/(learner_idle|actor_idle|actor_waits)$"),
    ("Record, MB per million tokens", False, r"record/mb_per_mtokens$"),
    ("Bytes of weights per version", False, r"weights/.*_bytes$"),
    ("Seconds for weights per version", False, r"weights/.*_s$"),
    (
        "Sandbox seconds per step, summed over episodes that run at once",
        False,
        r"time/(tools|grade)_s$",
    ),
)

# Wall-clock times that add up to one of them: of a step, and of the actor of the same process
# between two steps, which in asynchronous runs works beside the learner. What is missing is shown
# as "other".
TIMES = (
    ("Seconds per step", "time/step_s", r"time/.*(?<!_per)_s$"),
    ("Seconds of the actor meanwhile", "actor/total_s", r"actor/.*_s$"),
)
_MOST_POINTS = 1000
# Means over the tokens of an update.
_OF_UPDATE = re.compile(r"policy/|experts/|train/(.*_)?loss$|train/grad_norm$")


def curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Charts and their series. Long runs are shown as means over equal numbers of steps.

    runs: the name of each run -> its rows of metrics. There are charts for all metrics. ``series``
    has the values of the first run, and ``others`` those of the other runs at the same steps. A
    missing value is null.
    """
    rows = [row for of_run in runs.values() for row in of_run]
    names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
    steps = sorted({row["step"] for row in rows})
    every = -(-len(steps) // _MOST_POINTS) or 1
    buckets = [steps[i : i + every] for i in range(0, len(steps), every)]
    series = {run: _series(of_run, names, buckets) for run, of_run in runs.items()}
    first, *others = runs
    charts = []
    left = list(names)
    for title, fraction, pattern in CHARTS:
        shown = [name for name in left if re.match(pattern, name)]
        left = [name for name in left if name not in shown]
        if shown:
            charts.append({"title": title, "fraction": fraction, "names": shown})
    stacks = []
    for title, whole, pattern in TIMES:
        members = [name for name in left if re.match(pattern, name)]
        left = [name for name in left if name not in members]
        for run in runs:
            times = {name: series[run][name] for name in members if any(series[run][name])}
            if times:
                label = f"{run}: {title[0].lower()}{title[1:]}" if others else title
                stacks.append({"title": label, "layers": _layers(times, whole)})
    rest = [{"title": name, "fraction": False, "names": [name]} for name in left]
    return {
        "steps": [bucket[-1] for bucket in buckets],
        "every": every,
        "run": first if others else "",
        "series": series[first],
        "others": [{"run": run, "series": series[run]} for run in others],
        "charts": charts,
        "rest": rest,
        "times": stacks,
    }


def measured(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row without the numbers of an update that had no token to learn from: they are 0 because
    nothing was measured.
    """
    if row.get("train/tokens") != 0:
        return row
    return {name: value for name, value in row.items() if not _OF_UPDATE.match(name)}


def _series(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], buckets: Sequence[Sequence[int]]
) -> dict[str, list[float | None]]:
    """Metric -> its mean in every bucket of steps."""
    by_step = {row["step"]: measured(row) for row in rows}
    found = [[by_step[step] for step in bucket if step in by_step] for bucket in buckets]
    return {name: [_mean([row.get(name) for row in bucket]) for bucket in found] for name in names}


def _layers(times: Mapping[str, Sequence[float | None]], whole: str) -> list[dict[str, Any]]:
    """The parts of a time as they are, and what they leave of the whole, never below 0."""
    parts = {name: values for name, values in times.items() if name != whole}
    layers = [
        {
            "name": name,
            "label": name.partition("/")[2].removesuffix("_s").replace("_", " "),
            "values": list(values),
        }
        for name, values in parts.items()
    ]
    if whole in times:
        left = [
            None
            if value is None
            else max(0.0, value - sum(values[i] or 0.0 for values in parts.values()))
            for i, value in enumerate(times[whole])
        ]
        layers.append({"name": whole, "label": "other", "values": left})
    return layers


def with_actors(workdir: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a learner with what actors of other processes did for each step.

    Rates and counts of tokens are of all actors together, the rest are means.
    """
    found: dict[int, list[dict[str, Any]]] = {}
    for folder in sorted((workdir / "actors").glob("*")):
        for row in read_metrics(folder):
            found.setdefault(row["step"], []).append(row)

    def joined(name: str, values: list[float]) -> float:
        return sum(values) / (1 if name.endswith(("_tokens", "_per_s")) else len(values))

    def of_actors(step: int) -> dict[str, Any]:
        actors = found.get(step, [])
        names = dict.fromkeys(name for row in actors for name in row if name != "step")
        return {name: joined(name, [row[name] for row in actors if name in row]) for name in names}

    return [of_actors(row["step"]) | row for row in rows]


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None and np.isfinite(value)]
    return float(f"{sum(finite) / len(finite):.6g}") if finite else None
