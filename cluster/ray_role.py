"""One process of a role on a node of a Ray cluster: started there, watched and stopped.

``RoleProcess`` becomes an actor of Ray in ``launch.on_ray``. The role itself is the same command as
without Ray, in a process of its own, so it has JAX, its signals and its exit code for itself. It
ends with the process of Ray that started it, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_code.store.errors import StoreError
from rl_code.store.heartbeat import Observer
from rl_code.store.processes import ProcessId, incarnations
from rl_code.store.sealed import unseal

ROOT = Path(__file__).resolve().parents[1]
# The beginning of a role's process: the kernel kills it when the process that started it ends, and
# the signals that Ray blocks reach it. It is a program, since Python code between fork and exec may
# wait for ever for a lock that another thread had at the fork.
_BEGINNING = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.execv(sys.argv[2], sys.argv[2:])
"""
_LAST_BYTES = 2000  # of a log that tell why a role ended
_LOOK_S = 1.0  # between two looks at a heartbeat


@dataclasses.dataclass(frozen=True)
class End:
    """End of a process of a role."""

    # Exit code; -n if signal n ended it.
    code: int
    seconds: float
    # Last lines that it wrote.
    last: str
    # Seconds without a heartbeat after which it was killed; 0 if it was not.
    hung_s: float = 0.0
    # Whether Ray lost it or its node.
    lost: bool = False


@dataclasses.dataclass(frozen=True)
class Place:
    """Place of a process of a role; pid: 0 between two starts."""

    address: str
    node: str
    worker: int
    pid: int


class RoleProcess:
    """Runs one process of a role at a time.

    Args:
      name: the role's name in the store; "" for a process that has no heartbeat there.
      store: folder of the run's store.
      log: file to which standard output and standard error are appended.
      hang_s: seconds without a sign of life after which the process is killed.
    """

    def __init__(self, name: str, store: str, log: str, hang_s: float):
        self._name, self._store, self._log = name, Path(store), Path(log)
        self._hang_s = hang_s
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, arguments: Sequence[str], host: str | None = "") -> End:
        """Runs ``python <arguments>`` to its end.

        host: address for other roles; that of the node if it is "". None for a program without the
          flag --host.
        """
        if self._process is not None:
            raise RuntimeError(f"{self._name} runs already, as process {self._process.pid}")
        begin = time.monotonic()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-I", "-S", "-c", _BEGINNING, str(os.getpid())]
        command += [sys.executable, *arguments]
        if host is not None:
            command.append(f"--host={host or node_address()}")
        with open(self._log, "ab") as log:
            start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *command,
                cwd=ROOT,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        watch = asyncio.create_task(self._kill_when_hung(self._process.pid))
        try:
            code = await self._process.wait()
            hung_s = watch.result() if watch.done() else 0.0
        finally:
            watch.cancel()
            self._process = None
        return End(code, time.monotonic() - begin, self._last(start), hung_s)

    async def stop(self, number: int = signal.SIGTERM) -> None:
        """Sends a signal to the role: SIGTERM lets its step end and writes a checkpoint."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def place(self) -> Place:
        """Present place of the process."""
        pid = self._process.pid if self._process else 0
        return Place(node_address(), node_id(), os.getpid(), pid)

    async def coordinator(self) -> str:
        """host:port at which this process can be the first of its role."""
        address = node_address()
        with socket.socket() as free:
            free.bind((address, 0))
            return f"{address}:{free.getsockname()[1]}"

    async def _kill_when_hung(self, pid: int) -> float:
        """Kills the process when it has been silent for too long; returns how long.

        Silent is one whose heartbeat stands still, and while it has none, one that does not run.
        """
        # One look counts half of the bound at most, so a node that was suspended itself does not
        # kill its role when it wakes up.
        observer = Observer(self._store, longest_gap_s=self._hang_s / 2)
        ran_ns, idle_s = -1, 0.0
        while True:
            await asyncio.sleep(_LOOK_S)
            before_ns, ran_ns = ran_ns, cpu_ns(pid)
            idle_s = idle_s + _LOOK_S if ran_ns == before_ns != -1 else 0.0
            # Storage that hangs must not keep this process from being stopped.
            silent_s = await asyncio.to_thread(silence, observer, self._store, self._name, pid)
            if silent_s is None:
                silent_s = idle_s
            if silent_s > self._hang_s:
                os.killpg(pid, signal.SIGKILL)
                return silent_s

    def _last(self, start: int) -> str:
        """The last lines that were written behind the first ``start`` bytes of the log."""
        with open(self._log, "rb") as log:
            log.seek(max(start, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            return log.read().decode(errors="replace").strip()


def options(needs: Mapping[str, float]) -> dict[str, Any]:
    """Resources as Ray's options of an actor or of a node name them. needs: resource -> amount."""
    others = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")}
    return dict(num_cpus=needs.get("CPU", 0), num_gpus=needs.get("GPU", 0), resources=others)


def silence(observer: Observer, store: Path, name: str, pid: int) -> float | None:
    """For how many seconds the heartbeat of a process is seen not to change; None while it has
    none.

    pid: of the process, so that another start of its name is not taken for it.
    """
    folder = store / "processes" / name
    try:
        newest = ProcessId(name, max(incarnations(folder), default=-1))
        path = folder / f"{newest.incarnation}.json"
        if unseal(path.read_bytes(), path)["pid"] != pid:
            return None
        seen = observer.look(newest)
    except (OSError, StoreError):
        return None
    return None if seen.gone else seen.silent_s


def cpu_ns(pid: int) -> int:
    """For how long the threads of a process have run, in ns; -1 where nobody can say.

    A process that waits and looks again now and then has run a little; one that is stopped has not.
    """
    try:
        paths = Path(f"/proc/{pid}/task").glob("*/schedstat")
        return sum(int(path.read_text().split()[0]) for path in paths)
    except (OSError, ValueError):  # a thread has just ended
        return -1


def node_address() -> str:
    """The address of this node, as Ray knows it."""
    import ray.util

    return ray.util.get_node_ip_address()


def node_id() -> str:
    """Ray's name of this node."""
    import ray

    return ray.get_runtime_context().get_node_id()
