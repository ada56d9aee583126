"""What every bench does with its numbers: say on what they were measured, and keep them."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import jax
from absl import flags

JSON = flags.DEFINE_string("json", None, "File for the numbers, besides the table.")


def hardware() -> str:
    """The devices and the processor."""
    kind = jax.devices()[0].device_kind
    return f"{len(jax.devices())} x {kind}, {os.cpu_count()} cores, {platform.processor() or platform.machine()}"


def save(report: dict) -> None:
    """Writes the numbers to --json, if it is given."""
    if JSON.value:
        path = Path(JSON.value)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
