"""A layer of a git repository at one commit, with a history that ends there.

The files are those of the commit. The history holds the commit's ancestors and nothing else: the
objects that can be reached from it are packed anew, under one branch. Later commits, other
branches, tags, notes, stashes, reflogs and remotes do not come along, not even as objects that no
name leads to: an agent could read the solution there.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from rl_code.environment.layers.store import LayerStore

BRANCH = "main"
# Settings of the layer's own repository. The agent may commit; nothing is packed in the background.
_SETTINGS = {"user.name": "agent", "user.email": "agent@localhost", "gc.auto": "0"}
# Settings of this machine and replaced objects must not change what is built.
_ENVIRONMENT = {
    "PATH": os.environ.get("PATH", os.defpath),
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_TERMINAL_PROMPT": "0",
    # A repository's own settings can name a program that fetches what it lacks.
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "",
    "LC_ALL": "C",
    "HOME": os.devnull,
}


class RepositoryError(ValueError):
    """A repository or a commit that cannot become a layer."""


def build(store: LayerStore, repository: Path, commit: str) -> str:
    """Digest of the layer of ``repository`` at ``commit``, which may be any name of one. Raises
    RepositoryError.
    """
    name = git(repository, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    full = name.decode().strip()
    return store.build(recipe(full), lambda tree: fill(tree, repository, full))


def recipe(commit: str) -> dict[str, str]:
    """Recipe of a layer: the full name of its commit, which stands for all files and ancestors."""
    return {"kind": "repository", "commit": commit}


def fill(tree: Path, repository: Path, commit: str) -> None:
    """Puts the files and the history of a commit into an empty folder. commit: its full name.
    Raises RepositoryError.
    """
    git(tree, "init", "--quiet", "--template=", f"--initial-branch={BRANCH}")
    # One thread, and no work of earlier packing: the same commit gives the same bytes.
    options = ["--revs", "--stdout", "--quiet", "--threads=1"]
    options += ["--no-reuse-delta", "--no-reuse-object"]
    pack = git(
        repository,
        *("-c", "pack.useBitmaps=false", "pack-objects", *options),
        given=f"{commit}\n".encode(),
    )
    git(tree, "index-pack", "--stdin", "--strict", given=pack)
    git(tree, "-c", "core.logAllRefUpdates=false", "update-ref", f"refs/heads/{BRANCH}", commit)
    for key, value in _SETTINGS.items():
        git(tree, "config", key, value)
    # The index knows no times: git reads each file once when it first looks.
    git(tree, "read-tree", commit)
    git(tree, "checkout-index", "--all", "--force", "--quiet")


def git(folder: Path, *arguments: str, given: bytes = b"", **variables: str) -> bytes:
    """Output of git, run without settings of the machine or the user. variables: further variables
    of its environment. Raises RepositoryError.
    """
    # A folder that is named here is trusted, whoever owns it.
    line = ["git", "-c", "safe.directory=*", "-C", str(folder), *arguments]
    environment = _ENVIRONMENT | variables
    done = subprocess.run(line, input=given, capture_output=True, env=environment, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or "no such commit"
        raise RepositoryError(f"git {' '.join(arguments[:3])} in {folder} failed: {said}")
    return done.stdout
