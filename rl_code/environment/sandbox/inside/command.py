"""Starts the candidate's commands apart from the session that supervises them.

Commands live in a cell: a pid namespace below the session's, with a mount namespace that shows
nothing but its own processes under /proc. From there the session cannot be seen or named, so no
call (prlimit, kill, setpriority, sched_setaffinity, ptrace) and no file of /proc reaches it. The
cell's first process, the guard, holds nothing of worth; it only keeps the cell alive and takes
leave of orphans. When it is killed, the kernel kills whatever else the cell holds.

  session (pid namespace of its own)
     ├── guard     first process of the cell
     └── command   forked by the session into the cell

A cell is used for one command after another as long as each leaves nothing behind.

Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from . import kernel, seccomp
from .world import World

OPEN_FILES = 256
# Queued signals and POSIX timers of a sandbox.
PENDING_SIGNALS = 256
# The exit code of a command that could not be set up.
NOT_STARTED = 125
# The most willing victim when memory runs out.
VICTIM = "1000"


class Cell:
    """Cell of namespaces in which the commands of one session run, one at a time."""

    def __init__(self, limits: dict[str, Any], world: World):
        self._limits = limits
        # The folders in which commands work.
        self.world = world
        # Pid of the guard; 0 when there is no cell.
        self._guard = 0
        # The cell's mount namespace.
        self._mounts = -1
        self._own_processes = os.open("/proc/self/ns/pid", os.O_RDONLY)

    def prepare(self) -> None:
        """Makes the cell, if there is none. Raises OSError."""
        if self._guard:
            return
        self.world.close()
        here, there = socket.socketpair()
        with here:
            with there:
                pid = kernel.clone(kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
                if pid == 0:
                    _guard(there, self.world)
            message, passed, _, _ = socket.recv_fds(here, 1000, 2)
        if len(passed) != 2:
            os.waitpid(pid, 0)
            raise OSError(f"no cell for commands: {message.decode()}")
        mounts, processes = passed
        # From now on the children of this process are born in the cell.
        os.setns(processes, kernel.CLONE_NEWPID)
        os.close(processes)
        self._guard = pid
        self._mounts = mounts

    def start(self, command: Callable[[], NoReturn]) -> int:
        """The pid of a process in the cell that runs ``command``. Raises OSError."""
        self.prepare()
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setns(self._mounts, kernel.CLONE_NEWNS)
            self.world.enter()
            os.setsid()
            _lock(self._limits)
            command()
        finally:  # whatever happens, this process never goes on as a session
            os._exit(NOT_STARTED)

    def end(self, command: int) -> int:
        """Kills a command and all it has started; its exit code, that of its own end if it has
        ended by itself.
        """
        os.kill(command, signal.SIGKILL)
        _, status = os.waitpid(command, 0)
        if not self._empty():
            self._destroy()
        # Without rights to these folders no further command could be started to give them back.
        for folder in self.world.writable:
            os.chmod(folder, 0o755)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _empty(self) -> bool:
        """True if only the guard is left.

        Every process of the cell descends from the guard or from a child of the session, and
        orphans become the guard's children in the same moment. So when the guard is the session's
        only child and has none itself, there are no other processes.
        """
        if os.waitid(os.P_PID, self._guard, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return False
        try:
            return _children(os.getpid()) == [self._guard] and not _children(self._guard)
        except OSError:  # this kernel does not tell
            return False

    def _destroy(self) -> None:
        """Kills the cell with everything in it; waiting for the guard means waiting for all."""
        os.setns(self._own_processes, kernel.CLONE_NEWPID)
        os.kill(self._guard, signal.SIGKILL)
        # The session has no other children: commands and what they made died with the guard.
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        os.close(self._mounts)
        self._guard = 0


def _children(pid: int) -> list[int]:
    """The children of a process with one thread. Raises OSError."""
    with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
        return [int(child) for child in file.read().split()]


def _guard(channel: socket.socket, world: World) -> NoReturn:
    """Makes the cell around this process, sends its mount and pid namespaces, and waits."""
    try:
        try:
            world.enter()
            kernel.mount_proc()
            # Files under /proc/self belong to root while a process is not dumpable.
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
            namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in ("mnt", "pid")]
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            kernel.write("/proc/self/oom_score_adj", VICTIM)
            kernel.give_up_capabilities()
            kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
            socket.send_fds(channel, [b"cell"], namespaces)
        except (OSError, ValueError) as error:
            channel.send(str(error).encode()[:1000])
            os._exit(NOT_STARTED)
        os.closerange(0, OPEN_FILES)
        while True:
            signal.sigwaitinfo([signal.SIGCHLD])
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    finally:  # whatever happens, this process never goes on as a session
        os._exit(NOT_STARTED)


def _lock(limits: dict[str, Any]) -> None:
    """Takes away what commands do not need: capabilities, resources, system calls."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    # The kernel takes the processes of a command before the session, which holds the workspace.
    kernel.write("/proc/self/oom_score_adj", VICTIM)
    memory = limits["address_mb"] << 20
    # These hold for each process; the limits of a sandbox as a whole are the supervisor's.
    for kind, soft, hard in (
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_CPU, limits["cpu_s"], limits["cpu_s"] + 1),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NPROC, limits["processes"], limits["processes"]),
        (resource.RLIMIT_FSIZE, limits["workspace_mb"] << 20, limits["workspace_mb"] << 20),
        (resource.RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_SIGPENDING, PENDING_SIGNALS, PENDING_SIGNALS),
    ):
        resource.setrlimit(kind, (soft, hard))
    kernel.give_up_capabilities()
    seccomp.apply(kernel.libc, limits["filter"])
