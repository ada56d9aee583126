"""Runs of sweeps that have finished, as others read them: without the modules that runs need."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rl_code.config.read_config import ConfigError
from sweeps import DONE


def finished(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """(workdir, config) of the runs of a sweep that have finished, in order of their names."""
    for path in sorted(folder.glob(f"*/{DONE}")):
        yield path.parent, json.loads(path.read_text())["config"]


def finished_in(workdirs: Iterable[str]) -> list[tuple[Path, dict[str, Any]]]:
    """(workdir, config) of all finished runs of other sweeps.

    Raises ConfigError if a folder has none.
    """
    found = []
    for workdir in workdirs:
        runs = list(finished(Path(workdir)))
        if not runs:
            raise ConfigError(
                f"--warm_starts={workdir} holds no finished run; name the workdir of a sweep"
            )
        found += runs
    return found
