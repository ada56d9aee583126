"""Holes that nobody trained on, filled with the weights of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax

from models.transformer import Transformer
from rl_code.config.named import Named
from rl_code.recording import kept_config
from rl_code.run.run import Run
from rl_code.tasks.api import find_source
from rl_code.types import Group, Task

# The seed of the source that neither demonstrations nor training draw from (configs/tab.py).
SEED = 1


def opened(workdir: Path) -> Run:
    """The run in a workdir. Raises ConfigError where there is none."""
    return Run(kept_config.read(workdir), workdir)


def holes(run: Run, count: int) -> list[Task]:
    """Held-out tasks of the kind that the run is trained on, as many as ``count``."""
    trained = run.config.tasks
    source = find_source(Named(trained.name, {**trained.settings, "seed": SEED}), "config.tasks")
    stream = source.load(None, None)
    return [stream[i] for i in range(count)]


def fill(
    run: Run,
    sampler: Transformer,
    tasks: Sequence[Task],
    samples: int,
    adapters: Sequence[int] | None = None,
) -> list[Group]:
    """Plays the tasks as in training, ``samples`` episodes of each.

    sampler: a model as ``Run.sampler`` makes it, or one that samples with several adapters.
    adapters: number of each task's adapter, of a model that has several.
    """
    groups, _ = run.scheduler(run.config.rollout.sampling).rollout(
        sampler,
        tasks,
        run.episode,
        group_size=samples,
        version=0,
        key=jax.random.key(SEED),
        adapters=adapters,
    )
    return groups
