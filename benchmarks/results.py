"""Shared parts of all benchmarks: a temporary folder, the name of the hardware, and the file for
the numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
from collections.abc import Generator
from pathlib import Path

import jax
from absl import flags
from jax.errors import JaxRuntimeError


def define_counts(name: str, default: list[str], meaning: str, *, least: int = 1) -> None:
    """Defines a flag that is a list of whole numbers, each at least ``least``."""
    flags.DEFINE_list(name, default, meaning)
    flags.register_validator(
        name,
        lambda texts: bool(texts) and all(t.strip().isdecimal() and int(t) >= least for t in texts),
        message=f"expected one or more whole numbers of at least {least}, as {','.join(default)}",
    )


JSON = flags.DEFINE_string("json", None, "File for the numbers, besides the table.")


@contextlib.contextmanager
def scratch(prefix: str) -> Generator[Path]:
    """A new folder in --workdir, or in the system's temporary folder. It is removed at the end."""
    parent = flags.FLAGS.workdir  # defined by launch.workdir, as for every entry point
    if parent:
        Path(parent).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as folder:
        yield Path(folder)


def hardware() -> str:
    """The devices, the cores and the processor, as text."""
    kind = jax.devices()[0].device_kind
    processor = platform.processor() or platform.machine()
    return f"{len(jax.devices())} x {kind}, {os.cpu_count()} cores, {processor}"


def is_too_large(error: Exception) -> bool:
    """True if a program could not run because a device has too little memory for it."""
    return isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def save(report: dict) -> None:
    """Writes a benchmark's numbers to the file --json, if that is given."""
    if JSON.value:
        path = Path(JSON.value)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
