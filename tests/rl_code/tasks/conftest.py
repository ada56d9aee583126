"""Sandboxes over one layer store, and packages with pytest."""

from __future__ import annotations

import pytest

from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from tests.rl_code.tasks import projects


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    return LayerStore(tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="session")
def layered_pool(store):
    """Sandboxes in which pytest has room and time."""
    config = SandboxConfig(workers=1, layers=str(store.folder), cpu_s=120, processes=64)
    with SandboxPool(config) as pool:
        yield pool


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """A folder of installed packages with pytest."""
    return str(projects.install_pytest(tmp_path_factory.mktemp("packages")))
