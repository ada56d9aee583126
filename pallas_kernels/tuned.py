"""Sizes of kernels: those that ``launch.tune`` measured are used in place of a heuristic's.

The environment variable RL_CODE_TUNING names a JSON file. Each entry stands for a kernel, a device
and a shape, and holds the sizes that differ from those of the heuristic.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

FILE = "RL_CODE_TUNING"


def key(kernel: str, device: str, **shape: int) -> str:
    """The name of an entry, as "flash hopper groups=4 head_dim=128"."""
    return " ".join([kernel, device, *(f"{name}={value}" for name, value in shape.items())])


def tuned[T](config: T, kernel: str, device: str, **shape: int) -> T:
    """``config`` with the sizes that the file has for this kernel, device and shape, if any.

    config: a frozen dataclass of sizes. Raises ValueError for a file that cannot be read, and for
    an entry with a size that the config does not have.
    """
    path = os.environ.get(FILE)
    if not path:
        return config
    name = key(kernel, device, **shape)
    try:
        return replace(config, _read(path).get(name, {}))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{FILE}={path}: {name}: {error}") from error


def replace[T](config: T, sizes: dict[str, Any]) -> T:
    """The config with other sizes; a nested config takes a dict."""
    nested = {
        name: replace(getattr(config, name), x) for name, x in sizes.items() if isinstance(x, dict)
    }
    return dataclasses.replace(config, **sizes | nested)


def check_positive(config: Any) -> None:
    """Raises ValueError for a size of a config that is less than 1."""
    # annotations are text in modules that postpone their evaluation, as all of these do
    for field in dataclasses.fields(config):
        if field.type == "int" and (value := getattr(config, field.name)) < 1:
            raise ValueError(f"{field.name}={value} must be positive")


@functools.cache
def _read(path: str) -> dict[str, dict[str, Any]]:
    return {name: entry["sizes"] for name, entry in json.loads(Path(path).read_text()).items()}
