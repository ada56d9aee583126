"""Resources that the processes of a command use together: CPU time, memory, their number.

A cgroup measures CPU time exactly; the host passes its file to the keeper. Without one the sum is
taken over /proc, which misses processes that ended and whose parent ignored it. Memory and number
are watched here only where no cgroup limits them. Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
# Seconds between two looks at memory and processes; a command may exceed its limits for so long.
LOOK_S = 0.025
# Fields of /proc/<pid>/stat, counted from the state, which follows the program's name.
USER_TIME, CHILDREN_SYSTEM_TIME = 11, 14


class Meter:
    """Measures one command, from its start on.

    limits: "meter" (descriptor of a cgroup's file with the CPU time used, -1 for none), "cpu_s",
    "watched_mb" and "watched_processes" (0 for what a cgroup limits). look_s: seconds between two
    looks.
    """

    def __init__(self, limits: dict[str, Any], look_s: float = LOOK_S):
        self._limits = limits
        self._look_s = look_s
        self._before = self._used()
        self._watches = bool(limits["watched_mb"] or limits["watched_processes"])

    def cpu_s(self) -> float:
        """CPU seconds of the command's processes until now."""
        return self._used() - self._before

    def exceeded(self) -> str:
        """The limit that the command has exceeded: "cpu", "memory", "processes", or "" for none."""
        if self.cpu_s() >= self._limits["cpu_s"]:
            return "cpu"
        if not self._watches:
            return ""
        pids = list(_below())
        # One of them is the guard.
        if 0 < self._limits["watched_processes"] < len(pids) - 1:
            return "processes"
        allowed = self._limits["watched_mb"] << 20
        # Resident memory counts shared pages several times. It is read first because it is cheap.
        if 0 < allowed < sum(map(resident, pids)) and allowed < sum(map(_proportional, pids)):
            return "memory"
        return ""

    def pause_s(self) -> float:
        """Seconds until it is worth asking ``exceeded`` again."""
        if self._watches:
            return self._look_s
        # All processors together use up what is left no earlier than this.
        left = self._limits["cpu_s"] - self.cpu_s()
        return max(self._look_s, left / (os.cpu_count() or 1))

    def _used(self) -> float:
        """CPU seconds of everything that was ever started below this process."""
        if self._limits["meter"] >= 0:
            text = os.pread(self._limits["meter"], 200, 0).split()
            # Version 1 holds nanoseconds; version 2 lines, the first of them in microseconds.
            return int(text[1]) / 1e6 if text[0] == b"usage_usec" else int(text[0]) / 1e9
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime + sum(map(_processor_s, _below()))


def _below() -> Iterator[int]:
    """The processes of this pid namespace and those below it, without its first."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1")


def _read(path: str) -> bytes:
    """A file's content; nothing when its process has ended or does not let itself be looked at."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def _processor_s(pid: int) -> float:
    """CPU seconds of a process and of the children that it has waited for."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return sum(map(int, fields[USER_TIME : CHILDREN_SYSTEM_TIME + 1])) / TICKS


def resident(pid: int) -> int:
    """Bytes that a process has in memory, shared ones included. The kernel's maximum (ru_maxrss)
    would count the process that started it, too.
    """
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * PAGE if fields else 0


def _proportional(pid: int) -> int:
    """Bytes of a process in memory, without files; each shared page is divided by its users. Where
    the kernel does not say, shared pages count in full.
    """
    for path, names in (
        ("smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:")),
        ("status", (b"RssAnon:", b"RssShmem:")),
    ):
        lines = [line.split() for line in _read(f"/proc/{pid}/{path}").splitlines()]
        sizes = [int(line[1]) << 10 for line in lines if line and line[0] in names]
        if sizes:
            return sum(sizes)
    return 0
