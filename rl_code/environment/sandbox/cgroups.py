"""Limits of a sandbox as a whole by cgroup, version 1 or 2, where this process may create one.

A resource limit (setrlimit) holds for each process alone. A cgroup holds for all processes of a
sandbox together. It also gives each sandbox an equal share of the processors, however many
processes it runs. Where no cgroup can be made, the session watches memory and CPU time itself
(inside/meter.py).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

_PREFIX = "rl_code-"
_SETTLE_S = 2.0
_numbers = itertools.count()
# Microseconds over which the kernel counts the use of processors.
PERIOD_US = 100_000

# By controller and version: per file what to write; {} takes the limit. Only cgroups with that
# controller have these files.
_FILES = {
    ("memory", 1): {"memory.limit_in_bytes": "{}"},
    ("memory", 2): {"memory.max": "{}"},
    ("pids", 1): {"pids.max": "{}"},
    ("pids", 2): {"pids.max": "{}"},
    ("cpu", 1): {"cpu.cfs_period_us": f"{PERIOD_US}", "cpu.cfs_quota_us": "{}"},
    ("cpu", 2): {"cpu.max": f"{{}} {PERIOD_US}"},
    # Counts only; in version 2 the controller of processors does that.
    ("cpuacct", 1): {"cpuacct.usage": "0"},
}


def parents() -> dict[str, tuple[Path, int]]:
    """By controller, a folder in which this process can make limited cgroups, and the version."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    own = dict(
        line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()
    )
    found: dict[str, tuple[Path, int]] = {}
    for fields in mounts:
        kind = fields[fields.index("-") + 1]
        options = fields[-1].split(",")
        if kind not in ("cgroup", "cgroup2"):
            continue
        version = 1 if kind == "cgroup" else 2
        for controller in ("memory", "pids", "cpu", "cpuacct"):
            known = controller not in found and (controller, version) in _FILES
            if not known or (version == 1 and controller not in options):
                continue
            path = next(
                (path for names, path in own.items() if controller in names.split(",")),
                own.get("", "/"),
            )
            for parent in (Path(fields[4] + path), Path(fields[4])):
                if _usable(parent, controller, version):
                    found[controller] = (parent, version)
                    break
    return found


def _usable(parent: Path, controller: str, version: int) -> bool:
    """True if a new folder in ``parent`` limits ``controller``; sweeps folders of processes that
    are gone.
    """
    if not os.access(parent, os.W_OK):
        return False
    for stale in parent.glob(f"{_PREFIX}*"):
        owner = stale.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            _remove(stale)
    probe = parent / f"{_PREFIX}{os.getpid()}-probe{next(_numbers)}"
    try:
        probe.mkdir()
        return all(os.access(probe / name, os.W_OK) for name in _FILES[controller, version])
    except OSError:
        return False
    finally:
        _remove(probe)


def _remove(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        try:
            folder.rmdir()
        except OSError:
            return False
    return True


class Cgroups:
    """The cgroups of one pool.

    limits: by controller, bytes of memory, number of processes, microseconds of processor time per
    PERIOD_US.
    """

    def __init__(self, limits: dict[str, int]):
        self._limits = limits
        self._parents = parents()

    @property
    def controllers(self) -> tuple[str, ...]:
        """Controllers that limit or count here: some of "cpu", "cpuacct", "memory", "pids"."""
        return tuple(sorted(self._parents))

    def enclose(self, pid: int) -> list[Path]:
        """Puts a process into new cgroups and returns their folders. Raises OSError."""
        name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        folders: list[Path] = []
        try:
            for controller, (parent, version) in self._parents.items():
                folder = parent / name
                folder.mkdir(exist_ok=True)
                if folder not in folders:
                    folders.append(folder)
                for file, text in _FILES[controller, version].items():
                    (folder / file).write_text(text.format(self._limits.get(controller)))
            for folder in folders:
                (folder / "cgroup.procs").write_text(str(pid))
        except OSError:
            self.release(folders)
            raise
        return folders

    def meter(self, folders: list[Path]) -> Path | None:
        """The file in which a cgroup counts the CPU time of its processes, if one does."""
        for folder in folders:
            for name in ("cpuacct.usage", "cpu.stat"):
                file = folder / name
                # Version 1 has a cpu.stat, too, without the time used.
                if file.exists() and (name == "cpuacct.usage" or "usage_usec" in file.read_text()):
                    return file
        return None

    def release(self, folders: list[Path]) -> None:
        """Removes cgroups whose processes have been killed; one that does not empty is left to the
        next start.
        """
        deadline = time.monotonic() + _SETTLE_S
        while folders := [folder for folder in folders if not _remove(folder)]:
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
