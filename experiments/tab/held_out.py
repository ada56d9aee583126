"""Holes that nobody trained on, filled with the weights of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import ml_collections

from models.transformer import Transformer
from rl_code import read_config
from rl_code.named import Named
from rl_code.recording import kept_config
from rl_code.run import Run
from rl_code.run_config import RunConfig
from rl_code.tasks.api import find_source
from rl_code.types import Group, Task
from rl_code.workdir import CONFIG_FILE

# The seed of the source that neither demonstrations nor training draw from (configs/tab.py).
SEED = 1


def config_of(workdir: Path) -> RunConfig:
    """The config of the run in a workdir. Raises FileNotFoundError where there is none."""
    kept = kept_config.as_written(workdir / CONFIG_FILE)
    return read_config.build(
        RunConfig, read_config.complete(RunConfig, ml_collections.ConfigDict(kept))
    )


def opened(workdir: Path) -> Run:
    """The run in a workdir."""
    return Run(config_of(workdir), workdir)


def holes(run: Run, count: int) -> list[Task]:
    """Held-out tasks of the kind that the run is trained on, as many as ``count``."""
    trained = run.config.tasks
    source = find_source(Named(trained.name, {**trained.settings, "seed": SEED}), "config.tasks")
    stream = source.load(None, None)
    return [stream[i] for i in range(count)]


def fill(run: Run, model: Transformer, tasks: Sequence[Task], samples: int) -> list[Group]:
    """Plays the tasks as in training, ``samples`` episodes of each."""
    groups, _ = run.scheduler(run.config.rollout.sampling).rollout(
        run.sampler(model),
        tasks,
        run.episode,
        group_size=samples,
        version=0,
        key=jax.random.key(SEED),
    )
    return groups
