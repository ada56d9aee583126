"""A world with pytest in it, made of the packages that these tests themselves run with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rl_code.environment.layers import folder
from rl_code.environment.layers.store import LayerStore
from rl_code.types import Layer, World

_PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")


def pytest_world(store: LayerStore, folder_of_packages: Path) -> World:
    """A world whose only layer holds pytest and what it needs."""
    site = Path(pytest.__file__).parents[1]
    for name in _PACKAGES:
        shutil.copytree(
            site / name,
            folder_of_packages / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(site / "py.py", folder_of_packages)
    return World((Layer(folder.build(store, folder_of_packages), "/opt/packages"),))
