"""Provenance of a run's numbers: commit, command, hardware and versions, at every start."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from rl_code.host.files import write_atomically
from rl_code.text.lines import split_lines
from rl_code.text.shell import command_line

STARTS_FILE = "starts.jsonl"
# Folder of a workdir with the digests of the source files of its starts, a file for each code.
CODE = "code"
ROOT = Path(__file__).resolve().parents[2]
# Libraries whose version may change a bit of the weights.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")
_PACKAGES = ("rl_code", "models", "attention", "pallas_kernels")
# What a start says that is not an input of its numbers.
_NO_INPUT = ("time", "command")


def describe() -> dict[str, Any]:
    """Describe this start as plain values: the facts that a reader of results asks for first.

    Uses the devices, so it must come after everything that sets them up.
    """
    kinds = [device.device_kind for device in jax.devices()]
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "devices": ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)),
        "host": f"{os.cpu_count()} cores, {_memory_gib()}{_processor()}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _LIBRARIES},
        "code": _code_digest(),
    }


def record(workdir: Path) -> None:
    """Appends a description of this start to the workdir, and keeps the digests of its code."""
    start = describe()
    path = workdir / CODE / f"{start['code']}.json"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, json.dumps(source_digests(), indent=0).encode())
    starts = workdir / STARTS_FILE
    # a line that a crash cut short must not become one with this one
    torn = starts.exists() and starts.read_bytes()[-1:] not in (b"", b"\n")
    with open(starts, "a") as file:
        file.write("\n" * torn + json.dumps(start) + "\n")


def read(workdir: Path) -> list[dict[str, Any]]:
    """The descriptions of all starts, oldest first; a line that a crash cut short is left out."""
    path = workdir / STARTS_FILE
    if not path.exists():
        return []
    return [json.loads(line) for line in split_lines(path.read_text()) if line.endswith("}")]


def last(workdir: Path, when: float | None = None) -> dict[str, Any]:
    """The description of the newest start; empty where there is none.

    when: seconds since 1970, for the newest start until then.
    """
    starts = read(workdir)
    if when is not None:
        starts = [s for s in starts if _seconds(s["time"]) <= when + 1] or starts[:1]
    return starts[-1] if starts else {}


def differing(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Differences between the inputs of two starts, in words."""
    names = [name for name in {**there, **here} if name not in _NO_INPUT]
    return [
        f"{name}: {there.get(name, 'not recorded')} -> {here.get(name, 'not recorded')}"
        for name in names
        if there.get(name) != here.get(name)
    ]


def code_of(workdir: Path, digest: str) -> dict[str, str]:
    """Path -> digest of the source files of a start; empty where that was not kept."""
    path = workdir / CODE / f"{digest}.json"
    return json.loads(path.read_text()) if path.exists() else {}


@functools.cache
def source_digests() -> dict[str, str]:
    """Path -> digest (16 hex digits) of every source file that a run imports or may import."""
    files = sorted(path for name in _PACKAGES for path in (ROOT / name).rglob("*.py"))
    return {
        str(path.relative_to(ROOT)): hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
        for path in files
    }


def _code_digest() -> str:
    """One digest of all source files."""
    return hashlib.blake2b(json.dumps(source_digests()).encode(), digest_size=8).hexdigest()


def _seconds(time: str) -> float:
    return datetime.datetime.fromisoformat(time).timestamp()


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
