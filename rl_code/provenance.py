"""Where a run's numbers come from: commit, command, hardware and versions, at every start."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

STARTS_FILE = "starts.jsonl"
ROOT = Path(__file__).resolve().parents[1]


def describe() -> dict[str, Any]:
    """What a reader of results asks for first, as plain values.

    Uses the devices, so it must come after everything that sets them up.
    """
    kinds = [device.device_kind for device in jax.devices()]
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "devices": ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)),
        "host": f"{os.cpu_count()} cores, {_memory_gib()}{_processor()}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": importlib.metadata.version("flax"),
    }


def record(workdir: Path) -> None:
    """Appends a description of this start to the workdir."""
    with open(workdir / STARTS_FILE, "a") as file:
        file.write(json.dumps(describe()) + "\n")


def read(workdir: Path) -> list[dict[str, Any]]:
    """The descriptions of all starts, oldest first; a line that a crash cut short is left out."""
    path = workdir / STARTS_FILE
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def commit() -> str:
    """The commit of the source tree, and whether it was changed; "unknown" outside of git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return f"{head}, with changes" if git("status", "--porcelain", "-uno") else head
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _memory_gib() -> str:
    try:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not known on every system
        return ""
    return f"{pages / 2**30:.0f} GiB"


def _processor() -> str:
    """The processor's name where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f", {names[0]}" if names else ""
