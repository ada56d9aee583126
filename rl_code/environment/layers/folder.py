"""A layer from a folder of files."""

from __future__ import annotations

import shutil
from pathlib import Path

from rl_code.environment.layers.store import LayerStore, digest_of


def build(store: LayerStore, folder: Path) -> str:
    """Digest of the layer that holds a copy of ``folder``; links are copied as links.

    Raises NotADirectoryError.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is no folder, so it cannot become a layer")
    content, _, _ = digest_of(folder)

    def fill(tree: Path) -> None:
        shutil.copytree(folder, tree, symlinks=True, dirs_exist_ok=True)

    return store.build({"kind": "folder", "content": content}, fill)
