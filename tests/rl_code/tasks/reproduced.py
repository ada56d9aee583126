"""Whether tasks come out the same in another process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable

from rl_code.types import Task


def fingerprint(tasks: list[Task]) -> str:
    """Equal for equal tasks."""
    return hashlib.sha256(repr(tasks).encode()).hexdigest()


def made_elsewhere(make: Callable[[], list[Task]]) -> str:
    """The fingerprint of tasks made in another process, in which texts have other hashes.

    make: a function of a module, which the other process imports.
    """
    script = (
        f"from {make.__module__} import {make.__name__}\n"
        f"from {__name__} import fingerprint\n"
        f"print(fingerprint({make.__name__}()))"
    )
    path = os.pathsep.join(filter(None, sys.path))
    out = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return out.stdout.strip()
