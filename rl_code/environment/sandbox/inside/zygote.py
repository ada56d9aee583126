"""The first process inside bubblewrap: a warm interpreter that forks keepers, which fork sessions.

    zygote   one per worker; on its control socket arrive the sockets of new keepers
    keeper   a fork of the zygote that the host can put into a cgroup; starts one session after
    another session  pid 1 of fresh user, pid and mount namespaces with an empty workspace; lives
    for one episode command  a fork of the session (session.py, candidate.py)

None of the first three ever runs code of a candidate. Where the kernel allows no nested namespaces
the zygote turns into a session itself. Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import socket
import sys
from typing import Any

from . import seccomp, session, wire

CLONE = seccomp.CLONE
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND = 2, 4, 8, 4096
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = (
    1,
    4,
    24,
    47,
    4,
)
CAPABILITY_VERSION_3 = 0x20080522
LAST_CAPABILITY = 63

# The user and group that candidates see themselves as.
AGENT = 1000

# What small programs import, so that they need not read it again: forks share its memory.
WARM = (
    "bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "operator", "random", "re", "string",
    "typing",
)  # fmt: skip

# No released interpreter lock around calls: the process that clones must be the one that goes on.
libc = ctypes.PyDLL(None, use_errno=True)


def main() -> None:
    """Serves until the host closes the control socket. ``sys.argv[1]`` is what ``sandbox`` wrote as
    JSON.
    """
    limits = json.loads(sys.argv[1])
    control = socket.socket(fileno=limits["control"])
    # As the first process of a pid namespace this one is safe from all signals that it has no
    # handler for.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _become_unprivileged(limits)
    for name in WARM:
        __import__(name)
    # not to be asked for in a new user namespace
    limits["user"] = os.getuid()
    limits["group"] = os.getgid()
    limits["filter"] = seccomp.program(os.uname().machine)
    sys.path[:] = [entry for entry in sys.path if entry != limits["sources"]]
    gc.disable()
    gc.freeze()
    os.dup2(0, 2)  # nobody reads standard error from here on; 0 and 1 are /dev/null
    if not limits["nested"]:
        control.recv(1)
        control.send(b"k")
        _start_session(control, limits)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            _keep(socket.socket(fileno=descriptors[0]), limits)
        os.close(descriptors[0])


def _become_unprivileged(limits: dict[str, Any]) -> None:
    """Gives up root, if this is root, after mounting the /proc that nested namespaces need to see
    whole.
    """
    if os.getuid() == 0 and limits["uid"]:
        if limits["nested"]:
            _mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, b"")
        os.setgroups([])
        os.setresgid(limits["uid"], limits["uid"], limits["uid"])
        os.setresuid(limits["uid"], limits["uid"], limits["uid"])
    # Changing the user made /proc/self root's; the map of a new user namespace is written there. It
    # also undid --die-with-parent, which a bubblewrap of another user could not carry out; the
    # control socket's end remains.
    _prctl(PR_SET_DUMPABLE, 1)


def _keep(channel: socket.socket, limits: dict[str, Any]) -> None:
    """Starts a session whenever the host speaks and says when it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    channel.send(b"k")
    while channel.recv(1, socket.MSG_PEEK):
        pid = _clone(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID)
        if pid == 0:
            _start_session(channel, limits)
        _, status = os.waitpid(pid, 0)
        wire.write_frame(channel, json.dumps({"closed": status}))
    os._exit(0)


def _clone(flags: int) -> int:
    """fork() into new namespaces: the child's pid, or 0 in the child. Raises OSError."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = libc.syscall(CLONE[os.uname().machine], flags | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    code = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(code, f"clone into new namespaces: {os.strerror(code)}")
    return pid


def _start_session(channel: socket.socket, limits: dict[str, Any]) -> None:
    """Closes this process in and serves the host; never returns."""
    try:
        if limits["nested"]:
            _isolate(limits)
        _lock(limits)
    except OSError as error:
        wire.read_frame(channel, session.FRAME_BYTES)
        wire.write_frame(channel, json.dumps({"fault": str(error)}))
        os._exit(1)
    session.serve(channel, limits)
    os._exit(0)


def _isolate(limits: dict[str, Any]) -> None:
    """Maps the one user and mounts what is this session's own: /workspace, /tmp, /dev/shm,
    /proc.
    """
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{AGENT} {limits['user']} 1")
    _write("/proc/self/gid_map", f"{AGENT} {limits['group']} 1")
    options = f"size={limits['workspace_mb']}m,nr_inodes={session.INODES},mode=755".encode()
    _mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, b"")
    _mount(b"tmpfs", session.WORKSPACE.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options)
    _mount(b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV, options)
    _mount(b"/tmp", b"/dev/shm", b"", MS_BIND, b"")


def _lock(limits: dict[str, Any]) -> None:
    """Takes away what neither the session nor its commands need: capabilities, resources, system
    calls.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # refused where there is nothing to drop
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    if libc.capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_FSIZE, limits["workspace_mb"] << 20),
        (resource.RLIMIT_NOFILE, session.OPEN_FILES),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    _prctl(PR_SET_DUMPABLE, 0)
    seccomp.apply(libc, limits["filter"])


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    os.write(descriptor, text.encode())
    os.close(descriptor)


def _mount(source: bytes, target: bytes, kind: bytes, flags: int, options: bytes) -> None:
    if libc.mount(source, target, kind, ctypes.c_ulong(flags), options):
        raise OSError(
            ctypes.get_errno(), f"mount {target.decode()}: {os.strerror(ctypes.get_errno())}"
        )


def _prctl(option: int, value: int) -> None:
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")
