"""The program of ``launch.realtime`` in a process of its own, which is killed and started again."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil

from cluster.kills import kill_all

# Seconds between two looks at the memory.
_LOOK_S = 1.0


class ProgramEnded(RuntimeError):
    """It ended by itself, or did not become ready."""


@dataclasses.dataclass
class Life:
    """One process of the program."""

    pid: int
    # Seconds since the run began: when it was started, ready, and killed or ended.
    began_s: float
    ready_s: float | None = None
    ended_s: float | None = None
    # (seconds since the run began, resident bytes), a look a second.
    memory: list[tuple[float, int]] = dataclasses.field(default_factory=list)


class Program:
    """Serves, records, trains and decides, on one port from life to life. A context manager, which
    kills it.

    folder: for its log.
    """

    def __init__(self, folder: Path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._command: list[str] = []
        self._log = folder / "program.log"
        self._process: psutil.Popen | None = None
        self._begin = time.monotonic()
        self.lives: list[Life] = []
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._watcher.join()
        if self._process is not None and self._process.poll() is None:
            self.kill()

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._begin

    @property
    def ready(self) -> bool:
        """True if this life has taken requests."""
        return bool(self.lives) and self.lives[-1].ready_s is not None

    @property
    def cpu_s(self) -> float:
        """Seconds of processor time that this life has taken."""
        assert self._process is not None
        times = self._process.cpu_times()
        return times.user + times.system

    def start(self, command: Sequence[str] | None = None) -> None:
        """Begins a life. It is not ready yet.

        command: the flags of ``launch.realtime`` but --port; None for those of the last life.
        """
        if command is not None:
            program = [sys.executable, "-m", "launch.realtime"]
            self._command = [*program, *command, f"--port={self._port}"]
        with open(self._log, "ab") as log:
            # a session of its own, which hears nothing of signals to the group of this process
            self._process = psutil.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.lives.append(Life(self._process.pid, self.seconds))

    def check(self) -> None:
        """Raises ProgramEnded if the program has ended by itself."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise ProgramEnded(f"the program ended with code {code}; see {self._log}")

    def wait_ready(self, timeout_s: float) -> None:
        """Raises ProgramEnded if it takes longer."""
        end = time.monotonic() + timeout_s
        while not self.ready:
            self.check()
            if time.monotonic() > end:
                raise ProgramEnded(f"not ready after {timeout_s:g} s; see {self._log}")
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL for the program and all that it has started."""
        assert self._process is not None
        kill_all(self._process.pid)
        self._process.wait()
        self.lives[-1].ended_s = self.seconds

    def end(self) -> int:
        """Tells it to end, as an operator does, and waits; its exit code."""
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait()
        self.lives[-1].ended_s = self.seconds
        return code

    def _watch(self) -> None:
        """Notes when a life becomes ready, and its memory."""
        while not self._closed.wait(_LOOK_S if self.ready else 0.3):
            life = self.lives[-1] if self.lives else None
            if life is None or life.ended_s is not None:
                continue
            if life.ready_s is None and answers(f"{self.url}/readyz"):
                life.ready_s = self.seconds
            with contextlib.suppress(psutil.Error):  # it has just been killed
                if size := psutil.Process(life.pid).memory_info().rss:  # none of one that has ended
                    life.memory.append((self.seconds, size))


def answers(url: str) -> bool:
    """True if a URL is answered with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False
