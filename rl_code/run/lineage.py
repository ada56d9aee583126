"""Origin of a run: the runs that it was forked from, and the config of each of its steps.

A fork shares the record of its parent up to a step and goes on from there, perhaps with another
config. Its workdir says so in ``fork.json``, with the config of the steps before: a replay of a
step needs the config that the step had.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.host.files import write_atomically
from rl_code.run import trust
from rl_code.run.config import RunConfig

FILE = "fork.json"


@dataclasses.dataclass(frozen=True)
class Fork:
    """One fork on the way to a run."""

    # the workdir of the run that was forked
    parent: str
    # the first step that is the fork's own
    step: int
    # when, as ISO 8601
    time: str
    # config of the steps before, as nested dicts
    config: dict[str, Any]
    # [key, value before, value from the step on] of each key that changed
    changes: list[list[Any]]
    # True if updates from the step on need not repeat those of the parent bit for bit.
    other_bits: bool
    # Differences between the parent's last start and the program that forked it, in words.
    differing: list[str]
    # True if the fork was told to take over nothing that was sampled from the step on.
    resample: bool = False

    def check(self) -> None:
        """Raises TypeError for values of another kind, as a file may hold."""
        if type(self.step) is not int or self.step < 0:
            raise TypeError(f"step={self.step!r} must be a whole number from 0 on")
        for name, kind in {"config": dict, "changes": list, "differing": list}.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name}={getattr(self, name)!r} must be a {kind.__name__}")
        if not all(isinstance(change, list) and len(change) == 3 for change in self.changes):
            raise TypeError("changes must be lists of key, value before and value after")
        if not all(isinstance(words, str) for words in (self.parent, self.time, *self.differing)):
            raise TypeError("parent, time and differing must be texts")

    def facts(self) -> list[tuple[str, str]]:
        """(what, value), for people."""
        changes = "; ".join(
            f"{key}: {before!r} -> {after!r}" for key, before, after in self.changes
        )
        found = [
            ("forked from", f"{self.parent} at step {self.step}"),
            ("changed there", changes or "nothing"),
        ]
        if self.resample:
            found.append(("sampled anew", f"from step {self.step} on"))
        if self.other_bits:
            why = "; ".join(self.differing) or "nothing that is recorded differs"
            found.append(("bits change", f"at step {self.step}: {why}"))
        return found


def read(workdir: Path) -> list[Fork]:
    """The forks that led to a run, oldest first; none for a run that began by itself. Raises
    ConfigError.
    """
    path = workdir / FILE
    if not path.exists():
        return []
    try:
        listed = json.loads(path.read_text())
        if not isinstance(listed, list):
            raise TypeError("it holds no list of forks")
        found = [Fork(**entry) for entry in listed]
        for fork in found:
            fork.check()
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for fork in found:
        trust.check(fork.config, path)
    return found


def write(workdir: Path, forks: Sequence[Fork]) -> None:
    """Writes the forks that led to the run of a workdir."""
    text = json.dumps([dataclasses.asdict(fork) for fork in forks], indent=1)
    write_atomically(workdir / FILE, text.encode())


def config_at(workdir: Path, own: RunConfig, step: int) -> RunConfig:
    """The config that a step of the run in a workdir had; ``own`` is that of the run itself."""
    for fork in read(workdir):
        if step < fork.step:
            return read_config.build(RunConfig, fork.config)
    return own


def configs(workdir: Path, own: RunConfig) -> list[RunConfig]:
    """The configs that steps of the run in a workdir had, the first steps' first."""
    before = [read_config.build(RunConfig, fork.config) for fork in read(workdir)]
    return [*before, own]


def by_config(
    workdir: Path, own: RunConfig, steps: Sequence[int]
) -> Iterator[tuple[RunConfig, list[int]]]:
    """The steps in their order, those of one config together."""
    begins = [fork.step for fork in read(workdir)]

    def part(step: int) -> int:
        return sum(begin <= step for begin in begins)

    for _, found in itertools.groupby(steps, part):
        steps_of_part = list(found)
        yield config_at(workdir, own, steps_of_part[0]), steps_of_part


def max_staleness(workdir: Path, own: RunConfig) -> int:
    """The greatest bound on staleness that a step of the run had."""
    bounds = [read_config.lookup(f.config, "asynchrony.max_staleness") for f in read(workdir)]
    return max([*bounds, own.asynchrony.max_staleness])


def first_group(workdir: Path, own: RunConfig, step: int) -> int:
    """The number of the first group that a step trains on.

    Groups are numbered over the whole run. A fork with other ``train.tasks_per_step`` goes on
    behind the numbers of the steps before it, so that it never uses the random numbers of one of
    their groups for another task.

    own: the config of the steps from the last fork before ``step`` on.
    """
    number = begin = 0
    for fork in read(workdir):
        if fork.step > step:
            break
        number += (fork.step - begin) * read_config.lookup(fork.config, "train.tasks_per_step")
        begin = fork.step
    return number + (step - begin) * own.train.tasks_per_step
