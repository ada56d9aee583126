"""Compares the sampler's log-probabilities with the trainer's, token by token, in an imported run.

    python -m launch.mismatch --workdir=runs/theirs [--step=40]
    python -m launch.mismatch --workdir=runs/theirs --step=40 --weights=weights/theirs-40

It tells the mismatch of each step, the tokens that add most to it, and the places where it is
greatest. The trainer's log-probabilities are those of the dump that ``launch.import_run`` has read:
prime-rl notes them beside its traces. With --weights they are computed here instead, of the tokens
of a step, with the weights that trained on it. Runs of ours compute them again at each update, and
their metrics policy/mismatch_* say what came of it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import rich.table
import rich.text
from absl import flags

from launch import command
from launch.step import STEP
from launch.workdir import WORKDIR
from models.tokenizer import Tokenizer
from rl_code.foreign import mismatch
from rl_code.foreign.mismatch import Mismatch
from rl_code.foreign.recompute import Recomputed
from rl_code.run import origin
from rl_code.run.workdir import STORE
from rl_code.store import steps as steps_lib
from rl_code.store.errors import StoreError
from rl_code.store.store import GroupStore
from rl_code.types import Group

TOP = flags.DEFINE_integer("top", 12, "Rows of each table.", lower_bound=1)
WEIGHTS = flags.DEFINE_string(
    "weights", None, "Weights that say what tokens had been likely: a folder, as model.weights."
)
TEMPERATURE = flags.DEFINE_float(
    "temperature", 1.0, "With --weights: the temperature at which the tokens were sampled."
)
_AROUND = 6


def main(_: list[str]) -> None:
    if not WORKDIR.value:
        command.refuse("--workdir=<folder of a run> is missing, for instance runs/theirs")
    workdir = Path(WORKDIR.value)
    if not steps_lib.exists(workdir / STORE):
        command.refuse(f"{workdir} holds no run: it has no {STORE}")
    if WEIGHTS.value is None and flags.FLAGS["temperature"].present:
        command.refuse(f"--temperature={TEMPERATURE.value} has no effect without --weights")
    try:
        tell(workdir, STEP.value)
    except StoreError as error:
        command.refuse(str(error))


def tell(workdir: Path, step: int | None) -> None:
    """Prints the tables. step: the only one; None for all."""
    store = GroupStore(workdir / STORE)
    steps = [one for one in store.consumed() if step in (None, one)]
    if not steps:
        command.refuse(f"--step={step}: {workdir} has the steps {store.consumed()[:10]}")
    tokenizer = origin.tokenizer_of(workdir)
    computed = None if WEIGHTS.value is None else Recomputed(WEIGHTS.value, TEMPERATURE.value)
    found: list[Mismatch] = []
    rows = []
    worst: list[tuple[float, list[str]]] = []
    for one in steps:
        groups = groups_of(store, one, computed)
        own = mismatch.of_groups(groups)
        found.append(own)
        if numbers := own.numbers():
            shown = [f"{value:.4g}" for value in numbers.values()]
            rows.append([str(one), str(len(own.tokens)), *shown])
        for group in groups:
            for sample in group.trajectories:
                name = f"{one}, {sample.group}/{sample.index}"
                worst += places(name, sample.tokens, mismatch.of_trajectory(sample), tokenizer)
        worst = sorted(worst, key=lambda row: -row[0])[: TOP.value]
    whole = mismatch.joined(found)
    if not len(whole.tokens):
        command.refuse(
            f"{workdir} has no token with log-probabilities of sampler and trainer: its dump holds "
            "none of the one or the other (--weights computes the trainer's), or it is a run of "
            "ours, whose metrics policy/mismatch_* tell"
        )
    show(["step", "tokens", "mean |Δ|", "max |Δ|", "k1", "k3"], rows)
    tokens = [
        [str(token), repr(tokenizer.decode([token])), str(count), f"{mean:.4g}", f"{most:.4g}"]
        for token, count, mean, most in mismatch.by_token(whole)[: TOP.value]
    ]
    show(["token", "text", "times", "mean |Δ|", "max |Δ|"], tokens)
    header = ["step, trajectory", "at token", "text up to it", "log p sampler", "log p trainer"]
    show(header, [row for _, row in worst])


def groups_of(store: GroupStore, step: int, computed: Recomputed | None) -> list[Group]:
    """The groups of a step, with log-probabilities that are computed here where that is asked."""
    groups = [record.group for record in store.read(step)]
    if computed is None:
        return groups
    return [
        dataclasses.replace(group, trajectories=tuple(map(computed, group.trajectories)))
        for group in groups
    ]


def places(
    name: str, tokens: np.ndarray, own: Mismatch, tokenizer: Tokenizer
) -> list[tuple[float, list[str]]]:
    """(difference, row) of the tokens of a trajectory at which it is greatest."""
    found = []
    for i in np.argsort(-np.abs(own.log_ratio), kind="stable")[: TOP.value]:
        at = int(own.places[i])
        text = tokenizer.decode(tokens[max(0, at - _AROUND) : at + 1].tolist())
        values = f"{own.sampler[i]:.4f}", f"{own.trainer[i]:.4f}"
        found.append((abs(float(own.log_ratio[i])), [name, str(at), repr(text), *values]))
    return found


def show(header: list[str], rows: list[list[str]]) -> None:
    """Prints a table."""
    table = rich.table.Table(*header)
    for row in rows:
        table.add_row(*map(rich.text.Text, row))
    command.console().print(table)


if __name__ == "__main__":
    command.run(main)
