"""Starts a command of the candidate's, apart from the session that supervises it.

Every command has a pid namespace of its own, below the session's: its processes can neither see
nor name the session, so no call (prlimit, kill, setpriority, sched_setaffinity, ptrace) and no file
of /proc reaches it. The namespace's first process, the guard, holds nothing of worth: it waits for
the command and passes its exit code on. When the guard ends, or is killed by the session, the
kernel kills whatever else the namespace holds.

Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from . import kernel, seccomp

OPEN_FILES = 256
# Queued signals and POSIX timers of a sandbox.
PENDING_SIGNALS = 256
# The exit code of a command that could not be set up.
NOT_STARTED = 125
# What a guard waits for: the end of a process, and the session's word to stop.
AWAITED = (signal.SIGCHLD, signal.SIGTERM)
# The most willing victim when memory runs out.
VICTIM = "1000"


def start(limits: dict[str, Any], command: Callable[[], NoReturn]) -> int:
    """The pid of the guard of a process that runs ``command``. Raises OSError."""
    problem, problem_end = os.pipe()
    try:
        pid = kernel.clone(kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
        if pid == 0:
            _guard(limits, command, problem_end)
    finally:
        os.close(problem_end)
    with os.fdopen(problem) as file:
        if message := file.read():
            os.waitpid(pid, 0)
            raise OSError(f"no command can be started: {message}")
    return pid


def exit_code(status: int) -> int:
    """A process's exit code as a shell gives it: 128 + number of the signal that killed it."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _guard(limits: dict[str, Any], command: Callable[[], NoReturn], problem_end: int) -> NoReturn:
    """Locks itself in, starts the command and ends with its exit code."""
    try:
        try:
            _lock(limits)
            signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
            pid = _fork(command, problem_end)
        except (OSError, ValueError) as error:
            os.write(problem_end, str(error).encode())
            os._exit(NOT_STARTED)
        # The end of a pipe that stayed open here would hide that the command closed it.
        os.closerange(0, OPEN_FILES)
        while True:
            _reap(pid)
            signalled = signal.sigwaitinfo(AWAITED)
            # The session says stop. A sender of this namespace would have a number here.
            if signalled.si_signo == signal.SIGTERM and signalled.si_pid == 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
    finally:  # whatever happens, this process never goes on as a session
        os._exit(NOT_STARTED)


def _reap(command: int) -> None:
    """Takes leave of processes that have ended; ends with the command's exit code when it is one
    of them, even if it ended by itself just before it was told to.
    """
    while True:
        reaped, status = os.waitpid(-1, os.WNOHANG)
        if reaped == command:
            os._exit(exit_code(status))
        if not reaped:
            return


def _lock(limits: dict[str, Any]) -> None:
    """Takes away what commands do not need: capabilities, resources, system calls."""
    kernel.mount_proc()
    # Files under /proc/self belong to root while a process is not dumpable.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    # The kernel takes the processes of a command before the session, which holds the workspace.
    kernel.write("/proc/self/oom_score_adj", VICTIM)
    _limit(limits)
    kernel.keep_capabilities(())
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    seccomp.apply(kernel.libc, limits["filter"])


def _fork(command: Callable[[], NoReturn], problem_end: int) -> int:
    """The pid of the process that runs ``command``. Raises OSError."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
        os.close(problem_end)
        os.setsid()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        command()
    finally:
        os._exit(NOT_STARTED)


def _limit(limits: dict[str, Any]) -> None:
    """Limits that hold for each process; those of a sandbox as a whole are the supervisor's."""
    memory = limits["memory_mb"] << 20
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
