"""A PostgreSQL server of one's own, which can be crashed: on loopback, in a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from cluster.kills import kill_all

# Seconds that a server may take to start.
_START_S = 240.0
BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


def why_not() -> str:
    """Reason why no server can be started here; "" if one can."""
    if not BINARIES and not shutil.which("initdb"):
        return "PostgreSQL's server is not installed (Debian: apt install postgresql)"
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed (requirements/postgres.txt)"
    if os.geteuid() == 0 and not (_other_user() and shutil.which("setpriv")):
        return "PostgreSQL does not run as root: there is no user postgres or nobody, or no setpriv"
    return ""


def _other_user() -> str | None:
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in names), None)


class Server:
    """A server in a folder, which can be crashed and started again."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._data = folder / "data"
        self._binaries = BINARIES[-1].parent if BINARIES else Path(shutil.which("initdb")).parent
        self._as_user: list[str] = []
        if os.geteuid() == 0:
            user = _other_user()
            shutil.chown(folder, user)
            # by a program, since subprocess would fork for it: the memory of a process that has run
            # many tests may not be there twice
            group = pwd.getpwnam(user).pw_gid
            self._as_user = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"]
        self._run(
            *("initdb", "-D", str(self._data), "-U", "test", "-A", "trust"),
            *("-E", "UTF8", "--locale=C", "--no-sync"),
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"postgresql+psycopg://test@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Returns when connections are taken."""
        with open(self._folder / "log", "ab") as log:
            # its first process is a child of this one, so that nothing is left of it once it ends:
            # a process id that is still taken would keep the next one from starting
            self._first = subprocess.Popen(
                [
                    *self._as_user,
                    *(str(self._binaries / "postgres"), "-D", str(self._data)),
                    *("-p", str(self._port), "-h", "127.0.0.1", "-k", str(self._folder)),
                    *("-c", "shared_buffers=16MB"),
                ],
                stdout=log,
                stderr=log,
                cwd=self._folder,
            )
        ready = ["-h", "127.0.0.1", "-p", str(self._port), "-t", "200"]
        end = time.monotonic() + _START_S
        while self._program("pg_isready", *ready).returncode:
            if self._first.poll() is not None or time.monotonic() > end:
                raise RuntimeError((self._folder / "log").read_text()[-2_000:])
            time.sleep(0.1)

    def crash(self) -> None:
        """Ends all its processes at once; the next start recovers from its log."""
        self._run("pg_ctl", "-D", str(self._data), "-m", "immediate", "-w", "-t", "200", "stop")
        self._first.wait()

    def kill(self) -> None:
        """Ends all its processes by SIGKILL, which leaves them no time for anything."""
        kill_all(self._first.pid)
        self._first.wait()

    def _run(self, program: str, *arguments: str) -> None:
        """Raises RuntimeError if the program fails."""
        done = self._program(program, *arguments)
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stdout}{done.stderr}")

    def _program(self, program: str, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*self._as_user, str(self._binaries / program), *arguments],
            capture_output=True,
            text=True,
            timeout=_START_S,
            cwd=self._folder,
        )


@contextmanager
def server() -> Generator[Server]:
    """A server without anything in it, which is ended afterwards."""
    # a socket's path may have 107 characters, so not in pytest's folder
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    try:
        server = Server(folder)
        server.start()
        try:
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
