"""Tables of what a run of configs/tab_jumps.py came to on moments that nobody trained on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import rich.table

from experiments.report import resampled, table
from experiments.tab_jumps.asked import AskedToJump
from experiments.tab_jumps.metrics import counts, shares
from people.simulated.jumper import JUMP_HABITS
from rl_code.environment.protocols.infill import Infill
from rl_code.run.run import Run
from rl_code.tasks import jumps
from rl_code.types import Group, Task

# Names of metrics and of their columns.
_COLUMNS = {
    "shown": "shown",
    "taken_of_shown": "taken of shown",
    "right_of_shown": "right of shown",
    "other_file_of_shown": "right, other file, of shown",
    "found": "found where there is one",
    "needless": "shown where there is none",
}
# Seed of moments that neither demonstrations nor training draw from (configs/tab_jumps.py).
SEED = 1
_PROTOCOL = Infill()

# Groups by (policy, split).
type Played = Mapping[tuple[str, str], Sequence[Group]]


def moments(run: Run, split: str, count: int) -> list[Task]:
    """Moments of a split that are compared, without the few whose page is too long for the run."""
    longest = run.config.rollout.engine.prompt_length or run.config.limits.tokens
    stream = (jumps.generate(split, SEED, i) for i in itertools.count())
    fitting = (
        task for task in stream if len(run.tokenizer.encode(_PROTOCOL.prompt(task, {}))) <= longest
    )
    return list(itertools.islice(fitting, count))


def rates(played: Played, habits: str) -> rich.table.Table:
    """Rates of each policy and split in %, with bootstrap intervals over moments.

    habits: of the people who take jumps.
    """
    asked = AskedToJump(habits)
    rows = []
    for (policy, split), groups in played.items():
        each = np.stack([counts([group], asked) for group in groups])
        cells = []
        for name in _COLUMNS:
            found = resampled(
                lambda chosen, name=name, each=each: _rate(each, chosen, name), len(each)
            )
            cells.append(found.told(".1f", " %"))
        kinds = "held out" if split == "test" else "trained on"
        rows.append((policy, kinds, str(len(groups)), *cells))
    columns = ["policy", "kinds of change", "moments", *_COLUMNS.values()]
    return table(columns, rows, f"people: {habits}", texts=2)


def _rate(each: np.ndarray, chosen: np.ndarray, name: str) -> float:
    """A metric of some groups in %. each: [groups, episodes of a group, columns of ``counts``]."""
    rows = each[chosen].reshape(-1, each.shape[-1])
    return 100 * shares(rows).get(name, np.nan)


def by_kind(played: Played) -> rich.table.Table:
    """The share of episodes that do the right thing, by kind of change: a place that still has to
    be edited, or nothing where there is none.
    """
    asked = AskedToJump()
    policies = list(dict.fromkeys(policy for policy, _ in played))
    kinds: dict[str, dict[str, list[Group]]] = {}
    for (policy, _), groups in played.items():
        for group in groups:
            kinds.setdefault(group.task.meta["kind"], {}).setdefault(policy, []).append(group)
    rows = []
    for kind, found in kinds.items():
        right = [shares(counts(found[policy], asked))["right"] for policy in policies]
        held_out = "yes" if kind in jumps.kinds_of("test") else "no"
        count = str(len(found[policies[0]]))
        rows.append((kind, held_out, count, *(f"{100 * share:.1f} %" for share in right)))
    return table(["kind of change", "held out", "moments", *policies], rows, texts=2)


def rewards(played: Played) -> rich.table.Table:
    """Reward of an episode, by who judges: only the first kind of people trained it."""
    rows = []
    for (policy, split), groups in played.items():
        cells = []
        for habits in JUMP_HABITS:
            asked = AskedToJump(habits)
            means = np.array(
                [np.mean([asked.paid(g.task, one) for one in g.trajectories]) for g in groups]
            )
            found = resampled(lambda chosen, means=means: means[chosen].mean(), len(means))
            cells.append(found.told(".3f"))
        rows.append((policy, "held out" if split == "test" else "trained on", *cells))
    return table(["policy", "kinds of change", *JUMP_HABITS], rows, texts=2)
