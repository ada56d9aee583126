"""Shows of finished runs that no datum of one organisation reached the adapter of another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from experiments.organisations.holes import of
from experiments.runs import trained
from experiments.tab import held_out
from models.adapted import without_adapters


class Mixed(AssertionError):
    """Data of one organisation in what belongs to another; the message names both."""


def check(runs: Mapping[str, Path]) -> None:
    """runs: the workdir of each adapter by its name; "shared" may have trained on all.

    1. Every episode that an organisation's adapter was trained on is of a task of its own, and no
       task is in the training sets of two of them.
    2. The base model, with which adapters are served, is the same bits in all runs: training
       changed the adapters alone.

    Raises Mixed.
    """
    seen = {name: training_set(run) for name, run in runs.items()}
    for name, tasks in seen.items():
        if name == "shared":
            continue
        strangers = {whose for whose in tasks.values() if whose != name}
        if strangers:
            raise Mixed(f"the adapter of {name} was trained on tasks of {', '.join(strangers)}")
        for other, others in seen.items():
            common = tasks.keys() & others.keys()
            if other not in (name, "shared") and common:
                raise Mixed(f"{name} and {other} were both trained on {min(common)}")
    first, *rest = (base_of(run) for run in runs.values())
    for name, other in zip(list(runs)[1:], rest, strict=True):
        changed = [key for key in first if not np.array_equal(first[key], other[key])]
        if changed or first.keys() != other.keys():
            raise Mixed(f"the base model of {name} differs in {', '.join(changed) or 'its parts'}")


def training_set(run: Path) -> dict[str, str]:
    """Organisation of each task that a run was trained on, by the task's id."""
    return {group.task.id: of(group.task) for _, group in trained(run)}


def base_of(workdir: Path) -> dict[str, np.ndarray]:
    """The parameters that are not the adapter's, of the newest checkpoint."""
    with held_out.opened(workdir) as run, jax.set_mesh(run.mesh):
        model, _ = run.saved_model(workdir)
        leaves = jax.tree_util.tree_leaves_with_path(without_adapters(model))
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
