"""Keeps disposable processes of this project's own code: started when they are needed, kept for the
next use, and replaced when one ends or is ended.

Judges (judge_pool.py) and bounded calls (disposable.py) are such processes. Each runs
``python -I -S`` and calls ``main(control)`` of one module of this project, which imports the
standard library alone. It talks over that socket, and its memory is limited.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from rl_code.environment.sandbox.errors import SandboxFault

MEMORY_BYTES = 1 << 30
"""Address space of one process."""
_KEPT = 4
_START_S = 30.0
# The first byte that a process writes.
_READY = b"k"
_START = f"""
import resource, socket, sys
sys.path.insert(0, sys.argv.pop(1))
from {{package}} import {{name}}
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
control = socket.socket(fileno=int(sys.argv[1]))
control.sendall({_READY})
{{name}}.main(control)
"""
_ROOT = str(Path(__file__).resolve().parents[3])


class Kept:
    """One process. ``control`` is the host's end of its socket."""

    def __init__(self, module: str):
        self.control, remote = socket.socketpair()
        package, _, name = module.rpartition(".")
        program = _START.format(package=package, name=name)
        with remote:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-B", "-c", program, _ROOT, str(remote.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=[remote.fileno()],
                    env={},
                    start_new_session=True,  # an interrupt at the terminal is the run's to handle
                )
            except OSError as error:
                self.control.close()
                raise SandboxFault(f"no process to read results: {error}") from error
        self.control.settimeout(_START_S)
        try:
            ready = self.control.recv(1)
        except OSError:
            ready = b""
        if ready != _READY:
            # Otherwise a process that cannot start would be blamed on what it had to read.
            self._process.kill()
            _, said = self._process.communicate()
            self.control.close()
            raise SandboxFault(f"no process to read results: {said.decode(errors='replace')}")

    def alive(self) -> bool:
        """True if the process has not ended since it was last used."""
        return self._process.poll() is None

    def close(self) -> int:
        """Ends the process and all that it started; its exit code, as ``Popen.returncode``."""
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        return code


class KeptProcesses:
    """Processes of one module for any number of threads; each uses one at a time."""

    def __init__(self, module: str):
        self._module = module
        self._lock = threading.Lock()
        self._idle: list[Kept] = []
        self._closed = False

    def take(self) -> Kept:
        """An idle process, or a new one. Raises SandboxFault when none can be started."""
        while True:
            with self._lock:
                found = self._idle.pop() if self._idle else None
            if found is None:
                return Kept(self._module)
            if found.alive():
                return found
            found.close()

    def give_back(self, process: Kept) -> None:
        """Takes a process back that can be used again."""
        with self._lock:
            keep = not self._closed and len(self._idle) < _KEPT
            if keep:
                self._idle.append(process)
        if not keep:
            process.close()

    def close(self) -> None:
        """Ends all processes that are idle; one in use ends when it is given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()
