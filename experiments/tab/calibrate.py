"""Measures how good a match is among those that the warm-started model shows, and how lenient
people must be so that they accept of them the share that was accepted of the recorded suggestions.

    python -m experiments.tab.calibrate runs/tab/seed=0 --out=experiments/tab/reading.json

The argument is the workdir of a run of configs/tab.py whose warm start has finished.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from absl import flags as absl_flags
from scipy.optimize import brentq

from experiments.tab import held_out
from experiments.tab.asked import CALIBRATED, suggested
from launch import command
from rl_code import sft
from rl_code.people.fit import embedded
from rl_code.people.programmer import NAMED, Programmer, Reading, match
from rl_code.tasks import infill
from rl_code.types import Group, Task
from rl_code.workdir import CONFIG_FILE

# Of 799 recorded decisions, 270 are acceptances (docs/results.md).
RECORDED = 270 / 799
# Quantiles of matches that are kept.
_QUANTILES = 101
_OUT = absl_flags.DEFINE_string("out", str(CALIBRATED), "The file that is written.")


def reading(shown: Sequence[tuple[Task, str]]) -> Reading:
    """From (task, text) of what was shown."""
    matches = [match(text, task.meta["wanted"]) for task, text in shown]
    kept = tuple(float(m) for m in np.quantile(matches, np.linspace(0, 1, _QUANTILES)).round(4))
    leniency = brentq(lambda x: rate(shown, Reading(kept, x)) - RECORDED, -6, 6, xtol=1e-3)
    return Reading(kept, round(leniency, 3))


def rate(shown: Sequence[tuple[Task, str]], read: Reading) -> float:
    """The share that programmers as recorded accept."""
    chances = []
    for number, (task, text) in enumerate(shown):
        person = Programmer(embedded(), NAMED["recorded"], f"calibrate/{number}", reading=read)
        before, _ = infill.around(task)
        chances.append(person.chance(before, text, task.meta["wanted"]))
    return float(np.mean(chances))


def shown_by(groups: Sequence[Group]) -> list[tuple[Task, str]]:
    """What was shown, without the episodes that show nothing."""
    texts = [(group.task, suggested(one)) for group in groups for one in group.trajectories]
    return [(task, text) for task, text in texts if text.strip()]


def main(argv: list[str]) -> None:
    if len(argv) != 2 or not (Path(argv[1]) / CONFIG_FILE).is_file():
        command.refuse("name the workdir of a run of configs/tab.py that has its warm start")
    with held_out.opened(Path(argv[1])) as run, jax.set_mesh(run.mesh):
        groups = held_out.fill(run, sft.initial_model(run), held_out.holes(run, 256), 4)
    shown = shown_by(groups)
    found = reading(shown)
    fields = {"matches": list(found.matches), "leniency": found.leniency}
    Path(_OUT.value).write_text(json.dumps(fields, indent=1) + "\n")
    print(f"{len(shown)} suggestions: leniency {found.leniency:+.3f}, accepted {RECORDED:.1%}")


if __name__ == "__main__":
    command.run(main, arguments=True)
