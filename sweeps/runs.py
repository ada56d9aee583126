"""The runs of a sweep: which there are, what they are called, and whether they have finished."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import runpy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_collections

from rl_code.config import read_config
from rl_code.run.config import RunConfig
from sweeps import DONE

# Keys of an override that do not make another variant.
SEED = "seed"
VARIANT = "variant"


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    # Its variant's name, which runs with other seeds have too.
    variant: str
    overrides: Mapping[str, Any]
    # The config with the overrides.
    config: RunConfig
    workdir: Path

    def flags(self) -> list[str]:
        """Its overrides, as on a command line."""
        return [f"--config.{key}={value}" for key, value in self.overrides.items()]

    def finished(self) -> bool:
        """True if the run has finished. Raises ConfigError if it did so with another config."""
        path = self.workdir / DONE
        if not path.exists():
            return False
        keys = read_config.diff(json.loads(path.read_text())["config"], self.config)
        if keys:
            raise read_config.ConfigError(
                f"{self.workdir} was finished with another config; {', '.join(keys)} differ"
            )
        return True


def read(file: str, argument: str) -> tuple[list[Mapping[str, Any]], Any]:
    """The overrides of the runs and the panels of the figure that a config file has, () without.

    argument: what stands behind the file's name and a colon. Raises ConfigError where the file has
    no sweep.
    """
    arguments = [argument] if argument else []
    module = runpy.run_path(file)
    if "get_sweep" not in module:
        raise read_config.ConfigError(f"{file} defines no get_sweep(), which says what to run")
    figure = module["get_figure"](*arguments) if "get_figure" in module else ()
    return list(module["get_sweep"](*arguments)), figure


def plan(
    config: ml_collections.ConfigDict, sweep: Iterable[Mapping[str, Any]], workdir: Path
) -> list[SweepRun]:
    """The runs of a sweep, each with a folder of its own.

    The folder is named after the run's overrides. If the variant has a name, it is named after the
    variant and the seed.

    Raises ConfigError if there is no run, if an override is wrong, if a run is given twice, and if
    two variants have the same name.
    """
    config = read_config.complete(RunConfig, config)
    runs: dict[Path, SweepRun] = {}
    variants: dict[str, dict[str, Any]] = {}
    for given in sweep:
        overrides = {key: value for key, value in given.items() if key != VARIANT}
        without_seed = {key: value for key, value in overrides.items() if key != SEED}
        variant = given.get(VARIANT) or describe(without_seed) or "base"
        if variants.setdefault(variant, without_seed) != without_seed:
            raise read_config.ConfigError(
                f"get_sweep() calls {variant!r} both {describe(variants[variant])} and "
                f"{describe(without_seed)}"
            )
        name = describe(
            {key: given[key] for key in (VARIANT, SEED) if key in given}
            if VARIANT in given
            else given
        )
        folder = workdir / (re.sub(r"[^\w.=,+-]+", "_", name) or "base")
        if folder in runs:
            raise read_config.ConfigError(f"get_sweep() gives {name or 'no overrides'} twice")
        try:
            built = read_config.build(RunConfig, changed(config, overrides))
        except read_config.ConfigError as error:
            raise read_config.ConfigError(f"the run {folder.name}: {error}") from error
        runs[folder] = SweepRun(variant, overrides, built, folder)
    if not runs:
        raise read_config.ConfigError("get_sweep() gives no runs")
    return list(runs.values())


def changed(
    config: ml_collections.ConfigDict, overrides: Mapping[str, Any]
) -> ml_collections.ConfigDict:
    """A copy of a config with overrides.

    Raises ConfigError if an override has a key that the config does not have.
    """
    copy = config.copy_and_resolve_references()
    for key, value in overrides.items():
        section, _, name = key.rpartition(".")
        target = copy
        for part in filter(None, section.split(".")):
            target = target.get(part) if isinstance(target, ml_collections.ConfigDict) else None
        if not isinstance(target, ml_collections.ConfigDict) or name not in target:
            raise read_config.ConfigError(
                f"get_sweep() overrides config.{key}, which the config does not have"
            )
        # to ignore types goes through all that is below, so only where they differ
        same = target.get_type(name) is type(value)
        with contextlib.nullcontext() if same else target.ignore_type():
            target[name] = value
    return copy


def describe(overrides: Mapping[str, Any]) -> str:
    """Overrides as text, such as ``advantage=rloo,seed=1``.

    A key is shortened to its last part, unless several keys have the same last part.
    """
    last = [key.rpartition(".")[2] for key in overrides]
    names = [
        name if last.count(name) == 1 else key for key, name in zip(overrides, last, strict=True)
    ]
    return ",".join(
        f"{name}={value}" for name, value in zip(names, overrides.values(), strict=True)
    )
