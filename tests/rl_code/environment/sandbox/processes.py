"""The processes behind sandboxes, as the host sees them."""

from __future__ import annotations

from pathlib import Path

import psutil

from rl_code.environment.sandbox.pool import Sandbox, SandboxPool


def descendants(pid: int) -> list[int]:
    """Pids of a process's children, their children and so on."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def session_pid(sandbox: Sandbox) -> int:
    """The pid of a sandbox's session."""
    info = Path(f"/proc/self/fdinfo/{sandbox._connection.slot.handle}").read_text()
    keeper = next(int(line.split()[1]) for line in info.splitlines() if line.startswith("Pid:"))
    return psutil.Process(keeper).children()[0].pid


def kill_zygote(pool: SandboxPool) -> None:
    """Kills what bubblewrap has started, and with it every session, and waits for its end."""
    (worker,) = pool._sandboxes._workers
    for child in psutil.Process(worker.process.pid).children():
        child.kill()
    worker.process.wait(30)
