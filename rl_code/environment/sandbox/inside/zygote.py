"""The first process inside bubblewrap: a warm interpreter that forks keepers, which fork sessions.

  zygote   One per worker. On its control socket arrive the sockets of new keepers.
  keeper   A fork of the zygote that the host can put into a cgroup. It starts one session after
           another.
  session  The supervisor of one episode (session.py): first process of its own user, pid and mount
           namespaces, with an empty workspace.
  cell     The pid namespace, below the session's, of the candidate's commands (command.py). From
           there the session cannot be named, so no call can reach it.

None of the first three ever runs code of a candidate. Where the kernel allows no user namespaces
inside bubblewrap's, sessions share that one. Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from typing import Any

from . import kernel, seccomp, session, wire
from .world import STORE, TEMPORARY, WORKSPACE

# Modules that small programs import. Forks share their memory and need not read them again.
WARM = (
    *("bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "operator"),
    *("random", "re", "string", "typing"),
)


def main() -> None:
    """Serves until the host closes the control socket. ``sys.argv[1]`` is what ``workers`` wrote
    as JSON.
    """
    limits = json.loads(sys.argv[1])
    control = socket.socket(fileno=limits["control"])
    # As the first process of a pid namespace this one is safe from all signals that it has no
    # handler for, and Python has one for SIGINT.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _become_unprivileged(limits)
    # The rights of new files must not depend on who started the run.
    os.umask(0o022)
    for name in WARM:
        __import__(name)
    # Read here, because a new user namespace has no names for them before its map is written.
    limits["user"] = os.getuid()
    limits["group"] = os.getgid()
    limits["filter"] = seccomp.program(os.uname().machine, limits["loopback"])
    sys.path[:] = [entry for entry in sys.path if entry != limits["sources"]]
    gc.disable()
    gc.freeze()
    os.dup2(0, 2)  # nobody reads standard error from here on; 0 and 1 are /dev/null
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
    if limits["uid"]:
        kernel.mount_proc()
        if limits["layers"]:
            kernel.map_owner(STORE, limits["uid"], limits["uid"])
        os.setgroups([])
        os.setresgid(limits["uid"], limits["uid"], limits["uid"])
        # Changing the user clears all capabilities, unless told otherwise.
        kernel.prctl(kernel.PR_SET_KEEPCAPS, int(not limits["own_users"]))
        os.setresuid(limits["uid"], limits["uid"], limits["uid"])
    # A session with a user namespace of its own is given what it needs there; without one it takes
    # over what the zygote holds.
    shared = kernel.MOUNTING if limits["layers"] else kernel.SUPERVISING
    kernel.keep_capabilities(() if limits["own_users"] else shared)
    # Changing the user made /proc/self root's; the map of a new user namespace is written there. It
    # also undid --die-with-parent, which a bubblewrap of another user could not carry out; the
    # control socket's end remains.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def _keep(channel: socket.socket, limits: dict[str, Any]) -> None:
    """Keeps a session ready for the host; tells it when one has ended, and starts another."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    channel.send(b"k")
    _, passed, _, _ = socket.recv_fds(channel, 1, 1)
    # The host puts this process into its cgroup meanwhile, and passes the file that measures it.
    limits["meter"] = passed[0] if passed else -1
    own = kernel.CLONE_NEWUSER if limits["own_users"] else 0
    if limits["loopback"]:
        own |= kernel.CLONE_NEWNET
    while True:
        pid = kernel.clone(own | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
        if pid == 0:
            _start_session(channel, limits)
        _, status = os.waitpid(pid, 0)
        try:
            wire.write_frame(channel, json.dumps({"closed": status}))
        except OSError:  # the host has gone
            os._exit(0)


def _start_session(channel: socket.socket, limits: dict[str, Any]) -> None:
    """Closes this process in and serves the host; never returns."""
    try:
        _isolate(limits)
    except OSError as error:
        wire.read_frame(channel, session.FRAME_BYTES)
        wire.write_frame(channel, json.dumps({"fault": str(error)}))
        os._exit(1)
    session.serve(channel, limits)
    os._exit(0)


def _isolate(limits: dict[str, Any]) -> None:
    """Maps the one user, mounts what is this session's own (/workspace, /tmp, /dev/shm, /proc) and
    gives up what a supervisor does not need. Raises OSError.
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if limits["own_users"]:
        kernel.write("/proc/self/setgroups", "deny")
        kernel.write("/proc/self/uid_map", f"{limits['agent']} {limits['user']} 1")
        kernel.write("/proc/self/gid_map", f"{limits['agent']} {limits['group']} 1")
    if limits["loopback"]:
        kernel.start_loopback()
    options = f"size={limits['workspace_mb']}m,nr_inodes={limits['inodes']},mode=755"
    kernel.mount_proc()
    for folder in (WORKSPACE, TEMPORARY):
        kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    kernel.mount("/tmp", "/dev/shm", "", kernel.MS_BIND)
    held = kernel.MOUNTING if limits["layers"] else kernel.SUPERVISING
    kernel.keep_capabilities(held, kernel.SUPERVISING)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
