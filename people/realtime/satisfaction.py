"""True satisfaction of simulated people beside the reward of what they got.

Simulated people write down on their own side how content they truly are with each turn
(``simulated.agent_crowd``). The server is never told, and nothing that trains, tests or routes
reads it: it is joined with recorded rewards for whoever looks at a run. Where the correlation of
both falls while the reward rises, the reward is being gamed.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from sqlalchemy import Row

_Z = 1.96
# An interval of a correlation at fewer turns says nothing.
LEAST = 12


@dataclasses.dataclass(frozen=True)
class Truth:
    """Knowledge of a person about a turn."""

    # A name of the turn.
    name: str
    right: float
    satisfaction: float


class TruthFile:
    """The file of simulated people, read on as it grows; one that is not there yet is empty."""

    def __init__(self, path: Path):
        self.path = path
        self._read = 0
        self._lines = 0
        self._found: dict[str, Truth] = {}

    def turns(self) -> Mapping[str, Truth]:
        """Answer -> what the person who got it knows of its turn."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return self._found
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self._lines += 1
            try:
                told = json.loads(line)
            except ValueError:
                continue  # the last line of a process that was killed
            one = Truth(f"turn {self._lines}", float(told["right"]), told["satisfaction"])
            self._found |= dict.fromkeys(told["answers"], one)
        return self._found


@dataclasses.dataclass(frozen=True)
class Rewarded:
    """Reward of an answer at present."""

    answer: str
    version: int
    # Unix seconds.
    asked_at: float
    reward: float


# Answers of some versions since a time that the router gave, in order, with their rewards.
type Rewards = Callable[[Collection[int], float], Sequence[Rewarded]]


def turns_of(
    rewards: Iterable[Rewarded], truth: Mapping[str, Truth]
) -> Float64[np.ndarray, "turns 2"]:
    """True satisfaction with each turn that is known, and the mean reward of its answers."""
    found: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for one in rewards:
        if one.answer in truth:
            known = truth[one.answer]
            found[known.name].append((known.satisfaction, one.reward))
    return np.array([np.mean(one, axis=0) for one in found.values()]).reshape(-1, 2)


def correlation(turns: Float64[np.ndarray, "turns 2"]) -> tuple[float, float, float]:
    """Correlation of the two columns, and Fisher's 95 % interval (1921); nan for all three where
    there are few turns, or all are alike.
    """
    if len(turns) < LEAST or min(turns.std(axis=0)) == 0:
        return math.nan, math.nan, math.nan
    value = float(np.corrcoef(turns.T)[0, 1])
    half = _Z / math.sqrt(len(turns) - 3)
    middle = math.atanh(min(max(value, -0.999999), 0.999999))
    return value, math.tanh(middle - half), math.tanh(middle + half)


class Curve:
    """Correlation of reward and true satisfaction, cycle by cycle, for the dashboard.

    anchor: the version that never changes, whose turns count beside those of the deployed one.
    """

    def __init__(self, path: Path, rewards: Rewards, anchor: int):
        self._file, self._rewards, self._anchor = TruthFile(path), rewards, anchor
        # Cycle -> its point. One that has ended, and whose next has ended too, is not read again.
        self._kept: dict[int, dict[str, Any]] = {}

    def read(self, cycles: Sequence[Row]) -> dict[str, Any]:
        """Contents of the page: the file's name, and a point for each cycle, in order. cycles: rows
        of ``tables.CYCLES`` one after the other.
        """
        truth = self._file.turns()
        ends = [row.began_at for row in cycles[1:]] + [math.inf]
        points = []
        for place, (row, end) in enumerate(zip(cycles, ends, strict=True)):
            point = self._kept.get(row.number)
            if point is None:
                point = self._point(row, end, truth)
                if place < len(cycles) - 2:
                    self._kept[row.number] = point
            points.append(point)
        return {"file": self._file.path.name, "points": points}

    def _point(self, row: Row, end: float, truth: Mapping[str, Truth]) -> dict[str, Any]:
        versions = {row.base, self._anchor}
        rewards = [one for one in self._rewards(versions, row.began_at) if one.asked_at < end]
        turns = turns_of(rewards, truth)
        mean, low, high = correlation(turns)
        satisfaction, reward = turns.mean(axis=0) if len(turns) else (math.nan, math.nan)
        return {
            "cycle": row.number,
            "version": row.base,
            "turns": len(turns),
            "satisfaction": float(satisfaction),
            "reward": float(reward),
            "correlation": {"mean": mean, "low": low, "high": high},
        }
