"""One HTML page about a run: curves, evaluations, where the time went, and a reader for
trajectories.

Reads what ``rl_code/metrics.py`` and ``rl_code/evaluation/suite.py`` left in the working directory.
The page holds its own style, scripts and data, asks nothing of a network and opens from a file.
Everything a model wrote enters it as JSON and reaches the document as text only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import numpy as np

from rl_code.evaluation import suite
from rl_code.evaluation.compare import Comparison, compare, whole_against_first_edit
from rl_code.evaluation.passk import Interval
from rl_code.evaluation.suite import SuiteResult
from rl_code.files import write_atomically
from rl_code.metrics import read_metrics, read_trajectories, trajectory_steps

PAGE = Path(__file__).parent / "report_page"

# Title, whether values are fractions, and which metrics a chart shows. A metric belongs to the
# first that matches; those that match none are shown under "Everything else".
CHARTS = (
    ("Pass rate", True, r"(reward/(solved|first_edit|mixed_groups)|episode/submitted)$"),
    ("Reward", False, r"reward/"),
    ("Tokens per episode", False, r"episode/.*tokens$"),
    ("Turns and malformed calls per episode", False, r"episode/(turns|malformed_calls)$"),
    ("Entropy, nats per token", False, r"policy/entropy"),
    ("KL divergence", False, r"policy/(step_)?kl"),
    ("Sampler against trainer, KL divergence", False, r"policy/mismatch_k"),
    ("Sampler against trainer, |Δ log p|", False, r"policy/mismatch"),
    ("Clipped and truncated share", True, r"policy/(clip_fraction|truncated_fraction)"),
    ("Effective sample size", True, r"policy/ess"),
    ("Staleness, versions", False, r"rollout/staleness"),
    ("Share of tokens that were sampled so many versions ago", True, r"staleness/"),
    ("Loss", False, r"(train|sft)/(.*_)?loss"),
    ("Gradient norm", False, r"train/grad_norm"),
    ("Tokens per second", False, r"(.*tokens_per_s|engine/.*_per_s)$"),
    ("Tokens per step", False, r"(rollout|engine)/.*_tokens$"),
    ("Slots in use", True, r"(engine/occupancy|pack/(target_)?fill)$"),
    ("Context found in the cache", True, r"engine/(prefix_hit_rate|hits_)"),
    ("Idle, waiting for tools", True, r"time/(learner_idle|actor_idle|actor_waits)$"),
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


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """What goes into the page.

    ks: the k of pass@k to show. trajectories_per_step: at most this many of one step.
    trajectory_steps: at most this many steps, spread over the run. megabytes: size that the page
    stays below.
    """

    ks: tuple[int, ...]
    trajectories_per_step: int
    trajectory_steps: int
    megabytes: float

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 1:
            raise ValueError(f"{self.ks=} must hold at least one k, each at least 1")


def write_report(
    workdir: str | os.PathLike[str], path: str | os.PathLike[str], config: ReportConfig, title: str
) -> Path:
    """Writes the page and returns its path.

    Raises ValueError for damaged files of the run, or when curves alone exceed the size; OSError
    when the disk is full.
    """
    rows = _with_actors(Path(workdir), read_metrics(workdir))
    results = suite.load_all(workdir)
    limit = int(config.megabytes * 1e6)
    tables = {
        "tiles": _tiles(rows, results),
        "suites": _suites(results, config.ks),
        "ks": config.ks,
    }
    data = {"curves": _curves(rows), "trajectories": {}}
    room = limit - len(_render(title, tables, data))
    data["trajectories"] = _trajectories(workdir, config, room)
    page = _render(title, tables, data)
    if len(page) > limit:
        raise ValueError(
            f"the report without trajectories is {len(page)} bytes, above {config.megabytes=}"
        )
    write_atomically(Path(path), page)
    return Path(path)


def _render(title: str, tables: Mapping[str, Any], data: Mapping[str, Any]) -> bytes:
    """The page: ``tables`` are written into its text, ``data`` is what its scripts draw."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("page.html.jinja").render(
        title=title,
        **tables,
        style=markupsafe.Markup((PAGE / "page.css").read_text()),
        scripts=[
            markupsafe.Markup((PAGE / name).read_text()) for name in ("charts.js", "reader.js")
        ],
        payload=markupsafe.Markup(_embedded(data)),
    )
    return text.encode()


def _embedded(data: Any) -> str:
    """JSON for a script element, which only "<" could end; plain ASCII, so that lone surrogates can
    be written.
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _size(data: Any) -> int:
    return len(_embedded(data)) + 16  # some bytes for what joins it to its neighbours


def _tiles(
    rows: Sequence[Mapping[str, Any]], results: Sequence[SuiteResult]
) -> list[tuple[str, str, str]]:
    """(what, number, remark) of the few numbers that say how the run went."""
    tiles = []
    for found in _by_suite(results):
        comparison = _paired(found[0], found[-1], 1) if len(found) > 1 else None
        if comparison:
            change = _signed(comparison.difference)
            numbers = f"{comparison.before.mean:.1%} → {comparison.after.mean:.1%}"
            tiles.append((f"{found[0].suite} pass@1", numbers, change))
    if rows:
        tiles.append(("steps", f"{len(rows):,}", f"{rows[0]['step']} to {rows[-1]['step']}"))
    seconds = [row["time/step_s"] for row in rows if "time/step_s" in row]
    if seconds:
        hours, minutes = divmod(round(sum(seconds) / 60), 60)
        total = f"{hours} h {minutes} min" if hours else f"{sum(seconds) / 60:.1f} min"
        tiles.append(("time in steps", total, f"{np.median(seconds):.2f} s per step, median"))
    return tiles


def _by_suite(results: Sequence[SuiteResult]) -> list[list[SuiteResult]]:
    names = dict.fromkeys(result.suite for result in results)
    return [[result for result in results if result.suite == name] for name in names]


def _paired(before: SuiteResult, after: SuiteResult, k: int) -> Comparison | None:
    """The comparison, or None where the results have other tasks or too few samples."""
    if set(before.ids) != set(after.ids) or k > min(before.largest_k, after.largest_k):
        return None
    return compare(before, after, k)


def _suites(results: Sequence[SuiteResult], ks: Sequence[int]) -> list[dict[str, Any]]:
    """Per suite, the rows of its table and the sentences under it."""
    suites = []
    for found in _by_suite(results):
        rows = [
            {
                "label": result.label,
                "step": result.step,
                "cells": [_cell(result.interval(k)) if k <= result.largest_k else None for k in ks],
                "first_edit": _cell(result.interval(1, first_edit=True))
                if result.largest_k
                else None,
                "gain": _signed(whole_against_first_edit(result)) if result.largest_k else "",
                "malformed": f"{result.per_episode('malformed'):.2f}",
                "tokens": f"{result.per_episode('tokens'):.0f}",
            }
            for result in found
        ]
        pairs = [
            {
                "label": f"{after.label} − {found[0].label}",
                "k": k,
                "difference": _signed(comparison.difference),
                "gained": comparison.gained,
                "lost": comparison.lost,
                "p_value": None if comparison.p_value is None else f"{comparison.p_value:.2g}",
            }
            for after in found[1:]
            for k in ks
            if (comparison := _paired(found[0], after, k))
        ]
        count = found[0].largest_k
        samples = f"{len(found[0].tasks)} tasks, {count} sample{'s' if count != 1 else ''} each"
        drawn = ", ".join(f"{name} {value}" for name, value in found[0].sampling.items())
        suites.append(
            {"name": found[0].suite, "about": f"{samples}; {drawn}", "rows": rows, "pairs": pairs}
        )
    return suites


def _cell(interval: Interval) -> dict[str, str]:
    """Texts and positions, in percent, of an interval in a table."""
    mean, low, high = (100 * value for value in (interval.mean, interval.low, interval.high))
    return {
        "mean": f"{mean:.1f}",
        "range": f"{low:.1f} – {high:.1f}",
        "left": f"{low:.2f}",
        "width": f"{high - low:.2f}",
        "at": f"{mean:.2f}",
    }


def _signed(interval: Interval) -> str:
    mean, low, high = (
        f"{100 * value:+.1f}".replace("-", "−") for value in dataclasses.astuple(interval)
    )
    return f"{mean} points [{low}, {high}]"


def _curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Charts and their series; long runs as means over equal numbers of steps. Values are null
    where missing.
    """
    names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
    every = -(-len(rows) // _MOST_POINTS) or 1
    buckets = [rows[i : i + every] for i in range(0, len(rows), every)]
    series = {
        name: [_mean([row.get(name) for row in bucket]) for bucket in buckets] for name in names
    }
    charts = []
    left = list(names)
    for title, fraction, pattern in CHARTS:
        shown = [name for name in left if re.match(pattern, name)]
        left = [name for name in left if name not in shown]
        if shown:
            charts.append({"title": title, "fraction": fraction, "names": shown})
    stacks = []
    for title, whole, pattern in TIMES:
        times = {name: series[name] for name in left if re.match(pattern, name)}
        left = [name for name in left if name not in times]
        if times:
            stacks.append({"title": title, "layers": _layers(times, whole)})
    rest = [{"title": name, "fraction": False, "names": [name]} for name in left]
    return {
        "steps": [bucket[-1]["step"] for bucket in buckets],
        "every": every,
        "series": series,
        "charts": charts,
        "rest": rest,
        "times": stacks,
    }


def _layers(times: Mapping[str, Sequence[float | None]], whole: str) -> list[dict[str, Any]]:
    """The parts of a time as they are, and what they leave of the whole, never below 0."""
    parts = {name: values for name, values in times.items() if name != whole}
    layers = [
        {"name": name, "label": _time_label(name), "values": list(values)}
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


def _time_label(name: str) -> str:
    return name.partition("/")[2].removesuffix("_s").replace("_", " ")


def _with_actors(workdir: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
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


def _trajectories(
    workdir: str | os.PathLike[str], config: ReportConfig, room: int
) -> dict[str, Any]:
    """Groups that fit in ``room`` bytes, steps spread over the run; tokens refer to a shared
    table.
    """
    available = trajectory_steps(workdir)
    table = _TokenTable()
    steps: dict[int, list[dict[str, Any]]] = {}
    read = 0
    for step in spread(available, config.trajectory_steps):
        groups = read_trajectories(workdir, step)
        read += sum(len(group["trajectories"]) for group in groups)
        for group in choose(groups, config.trajectories_per_step):
            known = len(table.entries)
            compact = _compact(group, table)
            size = _size(compact) + _size(table.entries[known:])
            if size <= room:
                room -= size
                steps.setdefault(step, []).append(compact)
            else:
                table.forget(known)
    found = [
        {"step": step, "groups": sorted(steps[step], key=lambda g: g["group"])}
        for step in sorted(steps)
    ]
    embedded = sum(len(group["samples"]) for groups in steps.values() for group in groups)
    return {
        "tokens": table.entries,
        "steps": found,
        "logged_steps": len(available),
        "embedded": embedded,
        "read": read,
    }


def spread(steps: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of the steps: last, first, middles, so that any beginning of the list
    covers the run.
    """
    if len(steps) > count:
        steps = [steps[round(i * (len(steps) - 1) / max(count - 1, 1))] for i in range(count)]
    order = [*steps[-1:], *steps[:-1][:1]]
    spans = [(0, len(steps) - 1)]
    while spans:
        low, high = spans.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(steps[middle])
            spans += [(low, middle), (middle, high)]
    return order


def choose(groups: Sequence[Mapping[str, Any]], count: int) -> Iterator[Mapping[str, Any]]:
    """Whole groups of together at most ``count`` trajectories (the last may be cut), flagged and
    mixed ones first.
    """

    def interest(group: Mapping[str, Any]) -> int:
        samples = group["trajectories"]
        flagged = any(sample["reward"]["flags"] for sample in samples)
        return -2 * flagged - (len({passed(sample) for sample in samples}) > 1)

    for group in sorted(groups, key=interest):
        if count > 0:
            yield {**group, "trajectories": group["trajectories"][:count]}
        count -= len(group["trajectories"])


def passed(sample: Mapping[str, Any]) -> bool:
    """Whether a logged sample solved its task."""
    return sample["solved"]


class _TokenTable:
    """Distinct (id, text) pairs, numbered in order of appearance."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, str]] = []
        self._index: dict[tuple[int, str], int] = {}

    def index(self, id: int, text: str) -> int:
        if (id, text) not in self._index:
            self._index[id, text] = len(self.entries)
            self.entries.append((id, text))
        return self._index[id, text]

    def forget(self, length: int) -> None:
        """Shortens the table to what it was when it had ``length`` entries."""
        for entry in self.entries[length:]:
            del self._index[entry]
        del self.entries[length:]


def _compact(group: Mapping[str, Any], table: _TokenTable) -> dict[str, Any]:
    """A logged group with tokens as numbers of the table and log-probabilities in hundredths of a
    nat.
    """
    samples = []
    for sample in group["trajectories"]:
        kept = {
            name: sample[name]
            for name in (
                "index",
                "status",
                "reward",
                "malformed_calls",
                "first_edit_passed",
                "seconds",
                "turns",
            )
        }
        samples.append(
            {
                **kept,
                "passed": passed(sample),
                "tokens": [
                    table.index(*pair) for pair in zip(sample["ids"], sample["pieces"], strict=True)
                ],
                "logprobs": [_hundredths(value) for value in sample["logprobs"]],
                "versions": _runs(sample["versions"]),
            }
        )
    return {
        "task_id": group["task_id"],
        "group": group["group"],
        "task": group["task"],
        "prompt": group["prompt"]["text"],
        "prompt_tokens": len(group["prompt"]["ids"]),
        "samples": samples,
    }


def _hundredths(logprob: float | str | None) -> int | str | None:
    return round(100 * logprob) if isinstance(logprob, int | float) else logprob


def _runs(values: Sequence[int]) -> list[list[int]]:
    """Run lengths: [value, count] pairs."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return runs
