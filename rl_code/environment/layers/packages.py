"""A layer of Python packages, from a lock: a list in which each is pinned with its hashes.

    pytest==8.4.2 --hash=sha256:86c0d0b9...

pip installs exactly these packages, without looking for others, as wheels, so that no code of
theirs runs here. The network is used only to build; afterwards the layer is found by its lock.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from rl_code.environment.layers.store import LayerStore, digest_of
from rl_code.environment.sandbox.inside.world import PACKAGES

# The scripts of packages, which pip lets start with its own interpreter.
_PROGRAMS = "bin"
_ANY_PYTHON = b"#!/usr/bin/env python3"


class PackagesError(ValueError):
    """A lock that does not say exactly what to install, or packages that cannot be installed."""


def build(store: LayerStore, lock: str) -> str:
    """Digest of the layer of the packages in ``lock``, for the interpreter of this process, which
    is that of sandboxes, too. Raises PackagesError.
    """
    lines = requirements(lock)

    def fill(tree: Path) -> None:
        listed = tree.parent / "lock.txt"
        listed.write_text("\n".join(lines) + "\n")
        options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--no-compile"]
        quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
        _run("-m", "pip", "install", *options, *quiet, f"--target={tree}", "-r", str(listed))
        listed.unlink()
        _without_paths(tree)
        compile_tree(tree)

    return store.build({"kind": "packages", "lock": lines, "python": python()}, fill)


def build_installed(store: LayerStore, folder: Path) -> str:
    """Digest of the layer of the packages that are installed in ``folder``. Raises
    NotADirectoryError.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is no folder, so it cannot become a layer")
    content, _, _ = digest_of(folder)

    def fill(tree: Path) -> None:
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(folder, tree, symlinks=True, dirs_exist_ok=True, ignore=left_out)
        compile_tree(tree)

    return store.build({"kind": "installed", "content": content, "python": python()}, fill)


def python() -> str:
    """The name of this interpreter's kind, which compiled modules are for."""
    return sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag


def compile_tree(tree: Path) -> None:
    """Compiles the modules of a layer of packages, which every program in a sandbox would else
    compile anew, since nothing can be written beside them there.
    """
    # Checked never: sources of a layer do not change, and their times are all the same.
    compiled = ["compileall", "-q", "--invalidation-mode=unchecked-hash"]
    _run("-m", *compiled, "-s", str(tree), "-p", PACKAGES, str(tree), may_fail=True)


def requirements(lock: str) -> list[str]:
    """The lines of a lock, sorted, without comments. Raises PackagesError for one that is not
    pinned, or has no hash.
    """
    joined = lock.replace("\\\n", " ")
    lines = [" ".join(line.split("#")[0].split()) for line in joined.splitlines()]
    lines = sorted(filter(None, lines))
    for line in lines:
        name, *options = line.split(" --hash=")
        if "==" not in name or line.startswith("-") or not options:
            raise PackagesError(
                f"the line {line[:80]!r} of a lock must be name==version --hash=sha256:…"
            )
    if not lines:
        raise PackagesError("a lock without packages gives no layer")
    return lines


def _run(*arguments: str, may_fail: bool = False) -> None:
    """Runs this interpreter. may_fail: some files of packages are no Python of this version."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        said = (done.stderr or done.stdout).strip().splitlines()[-5:]
        raise PackagesError("packages could not be installed: " + " ".join(said))


def _without_paths(tree: Path) -> None:
    """Takes out what names this machine's interpreter, so that the content depends on the lock
    alone: first lines of programs, and their hashes in the packages' records.
    """
    for program in (tree / _PROGRAMS).glob("*"):
        data = program.read_bytes()
        first, _, rest = data.partition(b"\n")
        if first.startswith(b"#!") and b"python" in first:
            program.write_bytes(_ANY_PYTHON + b"\n" + rest)
    for record in tree.glob("*.dist-info/RECORD"):
        lines = record.read_text().splitlines(keepends=True)
        record.write_text("".join(line for line in lines if f"{_PROGRAMS}/" not in line))
    for folder in tree.rglob("__pycache__"):
        shutil.rmtree(folder)
