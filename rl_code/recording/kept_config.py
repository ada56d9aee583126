"""The config that a run keeps in its workdir: as it was, and as a file could have said it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.run import derive, trust
from rl_code.run.config import RunConfig
from rl_code.run.workdir import CONFIG_FILE, refuse_imported


def read(workdir: Path) -> RunConfig:
    """The config of the run in a workdir. Raises ConfigError when there is none, or
    one that would run code of others (``trust``).
    """
    return read_config.build(RunConfig, _load(workdir / CONFIG_FILE))


def as_written(path: Path) -> dict[str, Any]:
    """The content of a run's ``config.json`` as a config file could have said it.

    The file of a run has a value for every key. A value that follows from other keys is left out
    here, so that it follows from those that are changed. Raises ConfigError.
    """
    whole = _load(path)
    config = read_config.build(RunConfig, whole)
    stored = read_config.to_dict(config)
    followers = [key for key in derive.WHY if _follows(stored, key)]
    for key in followers:
        _set(stored, key, None)
    return read_config.short(stored)


def _load(path: Path) -> dict[str, Any]:
    refuse_imported(path.parent)
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; name the workdir of a run that has begun"
        ) from error
    trust.check(found, path)
    return found


def _follows(stored: dict[str, Any], key: str) -> bool:
    """True if the value of a key is the one that follows from the others."""
    if read_config.lookup(stored, key) is None:  # also of suites, which are several
        return False
    trial = copy.deepcopy(stored)
    _set(trial, key, None)
    try:
        made = read_config.build(RunConfig, trial)
    except ValueError:
        return False
    return read_config.lookup(made, key) == read_config.lookup(stored, key)


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        config = config[section]
    config[name] = value
