"""Audit, tables and figure of a long run: what was lost, how the score went, and what grew."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.table

from experiments.endurance import plan as plan_lib
from experiments.endurance.plan import FULL_DISK, KILL, Plan
from experiments.endurance.play import HUNG, LIVES_FILE, MEMORY_FILE
from experiments.report import AFTER, BEFORE, Estimate, band, figure, table
from rl_code.evaluation import suite as suite_lib
from rl_code.metrics.values import read_metrics
from rl_code.run.config import RunConfig
from rl_code.run.workdir import STORE
from rl_code.store import audit
from rl_code.store import steps as steps_lib

# Parts of the run in which means are taken.
_PARTS = 10
# Updates of a process before which its memory still grows by what it loads and compiles, and the
# fewest after these that a slope is fitted to.
_WARM = 100
_SPAN = 300
# Updates to which a slope of the memory belongs.
_PER = 1000
MISMATCH = ("policy/mismatch_k3", "policy/mismatch_mean", "policy/mismatch_max")


def measure(
    folder: Path, config: RunConfig, plan: Plan, sandboxes: tuple[int, int]
) -> dict[str, Any]:
    """All numbers of a run so far. sandboxes: those that were opened, and those of them killed."""
    run = folder / "run"
    rows = read_metrics(run)
    checked = audit.Report()
    if steps_lib.exists(run / STORE):
        checked = audit.check(run / STORE, config.asynchrony.max_staleness or 0)
    lives = _lines(folder / LIVES_FILE)
    return {
        "steps": config.train.steps,
        "groups_per_step": config.train.tasks_per_step,
        "audit": dataclasses.asdict(checked),
        "metrics": steps_of(rows),
        "scores": scores(run),
        "mismatch": [parts(rows, name) for name in MISMATCH],
        "memory": slopes(_lines(folder / MEMORY_FILE), plan.quiet),
        "young_memory": young(_lines(folder / MEMORY_FILE)),
        "faults": dict(collections.Counter(f.what for f in plan.faults if f.done is not None)),
        "full_disks": [f.done for f in plan.faults if f.what == FULL_DISK and f.done],
        "lives": len(lives),
        "ends": dict(collections.Counter(life["how"] for life in lives)),
        "hours": round(sum(life["seconds"] for life in lives) / 3600, 3),
        "step_s": _median(rows, "time/step_s"),
        "sandboxes": {"opened": sandboxes[0], "killed": sandboxes[1]},
        "rebuilt": sum(row.get("episode/rebuilt", 0.0) for row in rows),
        "fault_episodes": sum(row.get("episode/faults", 0.0) for row in rows),
        "not_finite": [row["step"] for row in rows if not row.get("train/finite", 1.0)],
    }


def problems(found: Mapping[str, Any], plan: Plan, memory_mb: float) -> list[str]:
    """Checks that failed, in words."""
    told = list(found["audit"]["problems"])
    consumed, groups = found["audit"]["consumed"], found["audit"]["groups"]
    if consumed != found["steps"]:
        told.append(f"{consumed} steps were consumed, not {found['steps']}")
    if groups != consumed * found["groups_per_step"]:
        told.append(f"{groups} groups in {consumed} steps of {found['groups_per_step']}")
    if found["metrics"] != {"rows": found["steps"], "missing": 0, "repeated": 0}:
        told.append(f"metrics of the steps: {found['metrics']}")
    if found["not_finite"]:
        told.append(f"the loss was not finite in steps {found['not_finite'][:5]}")
    if found["ends"].get(HUNG):
        told.append(f"{found['ends'][HUNG]} processes hung")
    for what in (KILL, FULL_DISK):
        wanted, had = plan_lib.count(plan, what), plan_lib.count(plan, what, done=True)
        if wanted != had:
            told.append(f"{had} of {wanted} faults {what!r} have come")
    for disk in found["full_disks"]:
        if disk["code"] != 1 or not disk["told"]:
            told.append(f"the full disk did not end the trainer as it must: {disk}")
    if plan.quiet and not found["memory"]:
        told.append("no stretch without kills was long enough to measure the memory")
    for slope in found["memory"]:
        if not slope["mb"] < memory_mb:
            told.append(
                f"updates {slope['first']} to {slope['last']}: the memory grew by "
                f"{slope['mb']:.2f} MB in 1,000 updates"
            )
    return told


def steps_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Counts of the rows of metrics, of the steps without one, and of those with several."""
    steps = collections.Counter(int(row["step"]) for row in rows)
    missing = max(steps, default=-1) + 1 - len(steps)
    return {"rows": len(rows), "missing": missing, "repeated": len(rows) - len(steps)}


def scores(run: Path) -> dict[str, list[list[float]]]:
    """[step, pass@1, low, high] of every evaluation, by suite."""
    found: dict[str, list[list[float]]] = {}
    for result in suite_lib.load_all(run):
        one = result.interval(1)
        found.setdefault(result.suite, []).append([result.step, one.mean, one.low, one.high])
    return found


def parts(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Means of a metric over equal parts of the run, the maximum for a name that ends in _max."""
    values = np.array([row[name] for row in rows if name in row], np.float64)
    reduce = np.max if name.endswith("_max") else np.mean
    return [float(reduce(part)) for part in np.array_split(values, _PARTS) if len(part)]


def slopes(
    memory: Sequence[Mapping[str, Any]], quiet: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """Growth of the memory of each process in the stretches without kills, by least squares.

    mb: MB in 1,000 updates; first and last: the updates that were looked at.
    """
    found = []
    for first, last in quiet:
        by_life: dict[int, list[tuple[int, float]]] = {}
        for row in memory:
            by_life.setdefault(row["life"], []).append((row["step"], row["mb"]))
        for life, points in by_life.items():
            begin = max(first, min(step for step, _ in points) + _WARM)
            inside = np.array([p for p in points if begin <= p[0] < last], np.float64)
            if len(inside) < 3 or np.ptp(inside[:, 0]) < _SPAN:
                continue
            slope = float(np.polyfit(inside[:, 0], inside[:, 1], 1)[0])
            found.append(
                {
                    "life": life,
                    "first": int(inside[0, 0]),
                    "last": int(inside[-1, 0]),
                    "mb": slope * _PER,
                    "points": inside.tolist(),
                }
            )
    return found


def young(memory: Sequence[Mapping[str, Any]]) -> float | None:
    """MB in 1,000 updates by which the memory of young processes grows from one to the next.

    It is that of the first look at which a process has made at least 5 updates. None with fewer
    than three such processes.
    """
    first: dict[int, int] = {}
    looks: dict[int, tuple[int, float]] = {}
    for row in memory:
        begin = first.setdefault(row["life"], row["step"])
        if row["step"] >= begin + 5:
            looks.setdefault(row["life"], (row["step"], row["mb"]))
    if len(looks) < 3:
        return None
    steps, sizes = np.array([*looks.values()], np.float64).T
    return float(np.polyfit(steps, sizes, 1)[0]) * _PER


def tables(found: Mapping[str, Any]) -> list[rich.table.Table]:
    """Tables of the facts, the mismatch and the scores."""
    sandboxes = found["sandboxes"]
    share = sandboxes["killed"] / max(sandboxes["opened"], 1)
    staleness = found["audit"]["staleness_max"]
    facts = [
        ("updates", f"{found['audit']['consumed']} of {found['steps']}"),
        ("groups, each used once", str(found["audit"]["groups"])),
        ("oldest token, versions", "-" if staleness is None else str(staleness)),
        ("processes", ", ".join(f"{n} {how}" for how, n in found["ends"].items()) or "-"),
        ("faults", ", ".join(f"{n} {what}" for what, n in found["faults"].items()) or "-"),
        ("sandboxes killed", f"{sandboxes['killed']} of {sandboxes['opened']} ({share:.1%})"),
        ("sandboxes built again", f"{found['rebuilt']:.0f}"),
        ("episodes lost to the sandbox", f"{found['fault_episodes']:.0f}"),
        ("hours", f"{found['hours']:.2f}"),
        ("median seconds of an update", f"{found['step_s']:.2f}"),
        *(
            (f"MB in 1,000 updates, {one['first']} to {one['last']}", f"{one['mb']:+.2f}")
            for one in found["memory"]
        ),
    ]
    if found["young_memory"] is not None:
        facts.append(("MB in 1,000 updates, of young processes", f"{found['young_memory']:+.2f}"))
    views = [table(("", ""), facts)]
    rows = [
        [f"{at + 1}/{_PARTS}", *(f"{metric[at]:.2e}" for metric in found["mismatch"])]
        for at in range(min(map(len, found["mismatch"]), default=0))
    ]
    views.append(table(("part of the run", *MISMATCH), rows))
    for name, points in found["scores"].items():
        rows = [
            [f"{step:.0f}", f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"]
            for step, mean, low, high in points
        ]
        views.append(table(("update", f"{name} pass@1, %"), rows))
    return views


def draw(found: Mapping[str, Any], plan: Plan, path: Path) -> None:
    """The held-out score over the checkpoints with the faults below it, the mismatch of sampler and
    trainer, and the memory in the stretches without kills.
    """
    with figure(path, 15.0, 4.0, 2.0, 1.0, 1.0) as (score, mismatch, memory):
        for number, (name, points) in enumerate(found["scores"].items()):
            steps, *values = np.array(points, np.float64).T
            estimate = Estimate(*(100 * value for value in values))
            band(score, steps, estimate, label=name, color=(AFTER, BEFORE)[number % 2])
        for what, mark, height in ((KILL, "|", 0.03), (FULL_DISK, "v", 0.07)):
            at = [fault.done["step"] for fault in plan.faults if fault.what == what and fault.done]
            axis = score.get_xaxis_transform()
            score.plot(at, [height] * len(at), mark, color="#c0392b", transform=axis, label=what)
        score.set(xlabel="update", ylabel="held-out pass@1, %", title="Score over checkpoints")
        for name, values in zip(MISMATCH, found["mismatch"], strict=True):
            at = (np.arange(len(values)) + 0.5) * found["metrics"]["rows"] / max(len(values), 1)
            mismatch.plot(at, values, "o-", label=name.removeprefix("policy/"))
        if any(map(any, found["mismatch"])):
            mismatch.set_yscale("log")
        mismatch.set(xlabel="update", title="Sampler against trainer")
        for one in found["memory"]:
            steps, sizes = np.array(one["points"]).T
            memory.plot(steps, sizes, ".", label=f"{one['mb']:+.2f} MB in 1,000")
        memory.set(xlabel="update", ylabel="MB", title="Memory without kills")


def _lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines, without those that were cut short."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _median(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    values = [row[name] for row in rows if name in row]
    return float(np.median(values)) if values else math.nan
