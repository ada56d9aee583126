"""Quality of matches among those that the warm-started model shows, and how lenient people are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy  # reads scipy.optimize when it is first used

from experiments.tab.asked import suggested
from people.simulated.fit import embedded
from people.simulated.programmer import NAMED, Programmer, Reading, match
from rl_code.environment.tools.suggest import around
from rl_code.types import Group, Task

# Of 799 recorded decisions, 270 are acceptances (docs/results/people.md).
RECORDED = 270 / 799
# Quantiles of matches that are kept.
_QUANTILES = 101


def reading(shown: Sequence[tuple[Task, str]]) -> Reading:
    """From (task, text) of what was shown."""
    matches = [match(text, task.meta["wanted"]) for task, text in shown]
    kept = tuple(float(m) for m in np.quantile(matches, np.linspace(0, 1, _QUANTILES)).round(4))
    leniency = scipy.optimize.brentq(
        lambda x: rate(shown, Reading(kept, x)) - RECORDED, -6, 6, xtol=1e-3
    )
    return Reading(kept, round(leniency, 3))


def rate(shown: Sequence[tuple[Task, str]], read: Reading) -> float:
    """The share that programmers as recorded accept."""
    chances = []
    for number, (task, text) in enumerate(shown):
        person = Programmer(embedded(), NAMED["recorded"], f"calibrate/{number}", reading=read)
        before, _ = around(task)
        chances.append(person.chance(before, text, task.meta["wanted"]))
    return float(np.mean(chances))


def shown_by(groups: Sequence[Group]) -> list[tuple[Task, str]]:
    """Suggestions that were shown, without the episodes that show nothing."""
    texts = [(group.task, suggested(one)) for group in groups for one in group.trajectories]
    return [(task, text) for task, text in texts if text.strip()]
