"""Ownership of a workdir: the config of its run, and what may differ when a run continues."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.host.files import write_atomically
from rl_code.text.shell import command_line

if TYPE_CHECKING:  # for most of what uses a workdir need not load what a run is made of
    from rl_code.run.config import RunConfig

CONFIG_FILE = "config.json"
STORE = "store"  # the folder of the groups
DOCUMENTS = "documents"  # the folder of the keys of documents, of a server
# The one key of the config file of a run of another trainer, whose dump was imported.
IMPORTED = "imported_from"
ACTORS = "actors"  # the folder of what actors in other processes measure
# Names that no other actor may have: that of the learner, that of the actor within the learner's
# process, and that of the process that prefills.
RESERVED = LEARNER, ACTOR, PREFILL = "learner", "actor", "prefill"

# Keys of a config that may differ between the start of a run and its continuation.
MAY_CHANGE = (
    "checkpoint",
    "suites",
    "evaluate",
    "metrics",
    "record",
    # A finished run goes on when its number of steps is raised. Step s then has the learning rate
    # that it would have in a run of the new length. Nothing is remembered of the shorter schedule:
    # a cosine that had reached its end jumps to where the longer one is at that step.
    "train.steps",
    "train.optimizer.total_steps",
    "train.value.optimizer.total_steps",
    "rollout.workers",
    "rollout.worker_deadline_s",
    # where prompts are prefilled, and where their pages wait, changes no sample
    "rollout.prefill",
    # another server of the same version
    "rollout.vllm",
    "rollout.engine.host_pages_mb",
    # The layers of a task are named by their content, wherever the store is.
    "sandbox.layers",
    "asynchrony.work",
    "asynchrony.weights",
)


# Beginnings of keys that say on which devices a run is.
_OF_DEVICES = ("mesh.", "rollout.mesh.", "rollout.apart.", "rollout.prefill_mesh.")


def refuse_run(folder: Path) -> None:
    """Raises ConfigError for the workdir of a run, where a model made of runs has no place."""
    if (folder / STORE).exists():
        raise ConfigError(
            f"{folder} is the workdir of a run; give the reward model a --workdir of its own"
        )


def imported(workdir: Path) -> dict[str, Any] | None:
    """Words of an import on the run in a workdir; None for a run of ours, or none."""
    try:
        found = json.loads((workdir / CONFIG_FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found.get(IMPORTED) if isinstance(found, dict) else None


def refuse_imported(workdir: Path) -> None:
    """Raises ConfigError for the workdir of an imported run, which no config of ours made."""
    if (found := imported(workdir)) is not None:
        raise ConfigError(
            f"{workdir} holds a run of another trainer, imported from {found.get('format')}: "
            "launch.report, launch.bisect and launch.mismatch read it, and nothing else can go on "
            "from it or repeat it"
        )


def own(workdir: Path, config: RunConfig) -> None:
    """Makes a workdir this config's; processes of one run call it in any order.

    Raises:
      ConfigError: the workdir is another config's.
    """
    check(workdir, config)
    write_atomically(workdir / CONFIG_FILE, read_config.to_json(config).encode())


def check(workdir: Path, config: RunConfig) -> None:
    """Raises ConfigError, which names the keys, if a workdir is another config's."""
    refuse_imported(workdir)
    with contextlib.suppress(FileNotFoundError):
        there = json.loads((workdir / CONFIG_FILE).read_text())
        try:
            read_config.check_same(there, config, workdir, MAY_CHANGE)
        except ConfigError as error:
            raise ConfigError(f"{error}{_for_devices(workdir, there, config)}") from None


def _for_devices(workdir: Path, there: Any, config: RunConfig) -> str:
    """Advice on how to continue a run on other devices, if its config asks for that; else empty."""
    changed = read_config.diff(there, config, without=MAY_CHANGE)
    of_devices = [key for key in changed if f"{key}.".startswith(_OF_DEVICES)]
    if not of_devices:
        return ""
    values = ((key, read_config.lookup(config, key)) for key in of_devices)
    command = fork_command(workdir, *(f"--config.{key}={value}" for key, value in values))
    return (
        " On other devices sums round differently, so a run goes on there in a fork, which keeps "
        f"the record and says where bits change, by\n    {command}"
    )


def fork_command(workdir: Path, *flags: str, ending: str = "fork") -> str:
    """Command by which a run goes on with other bits, in a folder whose name has this ending."""
    words = [str(workdir), "--other_bits", *flags, f"--workdir={workdir}-{ending}"]
    return f"python -m launch.fork {command_line(words)}"
