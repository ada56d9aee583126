"""Rewards on fresh holes of runs on windows of old data, by the updates made."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import rich.table
from matplotlib.figure import Figure

from rl_code.metrics import read_metrics

# What ``launch.sweep_plan`` leaves in the folder of a run that has finished.
DONE = "sweep_done.json"
_REWARD = "reward/total"


@dataclasses.dataclass(frozen=True)
class Curve:
    """The runs of one variant."""

    # Updates made before each step's holes were filled, [steps].
    updates: np.ndarray
    # What was earned at them, [seeds, steps].
    rewards: np.ndarray


def curves(folder: Path) -> dict[str, Curve]:
    """By variant, the shortest windows first, of the runs that have finished."""
    found: dict[str, list[np.ndarray]] = {}
    epochs: dict[str, int] = {}
    for path in sorted(folder.glob("variant=*")):
        if not (path / DONE).exists():
            continue
        variant = path.name.removeprefix("variant=").rpartition(",seed=")[0].replace("_", " ")
        epochs[variant] = json.loads((path / DONE).read_text())["config"]["train"]["epochs"]
        rewards = np.array([row[_REWARD] for row in read_metrics(path)])
        found.setdefault(variant, []).append(rewards)
    return {
        name: Curve(epochs[name] * np.arange(len(found[name][0])), np.array(found[name]))
        for name in sorted(found, key=lambda name: (epochs[name], name))
    }


def table(found: Mapping[str, Curve]) -> rich.table.Table:
    """Rewards of each variant at first, in the second half of its updates and after the last."""
    view = rich.table.Table(caption="means over seeds; in brackets their range")
    for name in ("window", "updates", "seeds", "first", "second half", "last"):
        view.add_column(name, justify="left" if name == "window" else "right")
    for name, one in found.items():
        first, last = one.rewards[:, 0], one.rewards[:, -1]
        half = one.rewards[:, 2 * one.updates > one.updates[-1]].mean(axis=1)
        each = (first, half, last)
        cells = [f"{x.mean():+.3f} [{x.min():+.3f}, {x.max():+.3f}]" for x in each]
        view.add_row(name, str(one.updates[-1]), str(len(one.rewards)), *cells)
    return view


def draw(found: Mapping[str, Curve], path: Path) -> None:
    """Rewards on fresh holes against the updates made, with the range over seeds."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axis = figure.subplots()
    for name, one in found.items():
        (line,) = axis.plot(one.updates, one.rewards.mean(axis=0), marker="o", label=name)
        low, high = one.rewards.min(axis=0), one.rewards.max(axis=0)
        axis.fill_between(one.updates, low, high, color=line.get_color(), alpha=0.15)
    axis.set(xlabel="updates", ylabel="reward on fresh holes")
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
