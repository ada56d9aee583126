"""The processes behind sandboxes, as the host sees them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from rl_code.environment.sandbox.pool import Sandbox, SandboxPool


def children(pid: int) -> list[int]:
    """Pids of a process's children."""
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def descendants(pid: int) -> list[int]:
    """Pids of a process's children, their children and so on."""
    return [found for child in children(pid) for found in (child, *descendants(child))]


def session_pid(sandbox: Sandbox) -> int:
    """The pid of a sandbox's session."""
    info = Path(f"/proc/self/fdinfo/{sandbox._connection.slot.handle}").read_text()
    keeper = next(int(line.split()[1]) for line in info.splitlines() if line.startswith("Pid:"))
    return children(keeper)[0]


def kill_zygote(pool: SandboxPool) -> None:
    """Kills what bubblewrap has started, and with it every session, and waits for its end."""
    (worker,) = pool._sandboxes._workers
    for child in children(worker.process.pid):
        os.kill(child, signal.SIGKILL)
    worker.process.wait(30)
