"""Rewards on fresh holes of runs on data of older policies, by the updates made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import rich.table

from experiments.report import band, figure, spread, table
from rl_code.metrics.values import read_metrics
from sweeps.done import finished

_REWARD = "reward/total"


@dataclasses.dataclass(frozen=True)
class Curve:
    """The runs of one variant."""

    # Updates made of the policies that filled holes, [updates].
    updates: np.ndarray
    # What these earned, [seeds, updates].
    rewards: np.ndarray


def curves(folder: Path) -> dict[str, Curve]:
    """By variant, the newest data first, of the runs that have finished."""
    found: dict[str, list[np.ndarray]] = {}
    ages: dict[str, int] = {}
    for path, config in finished(folder):
        variant = path.name.removeprefix("variant=").rpartition(",seed=")[0].replace("_", " ")
        ages[variant] = age = config["asynchrony"]["max_staleness"] or 0
        rewards = np.array([row[_REWARD] for row in read_metrics(path)])
        # the first steps, and the one after them, are all filled by the policy of no update
        found.setdefault(variant, []).append(rewards[age:])
    return {
        name: Curve(np.arange(len(found[name][0])), np.array(found[name]))
        for name in sorted(found, key=lambda name: (ages[name], name))
    }


def rewards(found: Mapping[str, Curve]) -> rich.table.Table:
    """Rewards of each variant at first, in the second half of its updates and after the last."""
    rows = []
    for name, one in found.items():
        half = one.rewards[:, 2 * one.updates > one.updates[-1]].mean(axis=1)
        each = (one.rewards[:, 0], half, one.rewards[:, -1])
        told = (spread(x).told() for x in each)
        rows.append((name, str(one.updates[-1]), str(len(one.rewards)), *told))
    columns = ["data", "updates", "seeds", "first", "second half", "last"]
    return table(columns, rows, "means over seeds; in brackets their range")


def draw(found: Mapping[str, Curve], path: Path) -> None:
    """Rewards on fresh holes against the updates made, with the range over seeds."""
    with figure(path, 6.4, 3.8, 1) as (axis,):
        for name, one in found.items():
            band(axis, one.updates, spread(one.rewards), marker="o", label=name)
        axis.set(xlabel="updates", ylabel="reward on fresh holes")
