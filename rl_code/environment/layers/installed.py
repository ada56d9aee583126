"""A layer of Python packages that the interpreter of this process has installed, as they are.

For checks and tests of this project itself, offline. Tasks that are to mean the same elsewhere use
a lock (packages.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rl_code.environment.layers.packages import PackagesError, compile_tree, python
from rl_code.environment.layers.store import LayerStore

# pytest and what it imports.
PYTEST = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
_LEFT_OUT = {"__pycache__", ".."}


def build(store: LayerStore, names: Sequence[str] = PYTEST) -> str:
    """Digest of the layer of these packages, without what they depend on. Raises PackagesError."""
    try:
        found = [metadata.distribution(name) for name in names]
    except metadata.PackageNotFoundError as error:
        raise PackagesError(
            f"{error.name} is not installed; pip install -r requirements/test.txt"
        ) from error

    def fill(tree: Path) -> None:
        for package in found:
            for path in package.files or ():
                if _LEFT_OUT & set(path.parts):
                    continue
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path.locate(), tree / path)
        compile_tree(tree)

    versions = {package.name: package.version for package in found}
    recipe = {"kind": "installed", "packages": versions, "python": python()}
    return store.build(recipe, fill)
