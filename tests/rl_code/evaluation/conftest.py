"""Sandboxes over a layer store, as the tests of tasks have them."""

from tests.rl_code.tasks.conftest import layered_pool, packages, store

__all__ = ["layered_pool", "packages", "store"]
