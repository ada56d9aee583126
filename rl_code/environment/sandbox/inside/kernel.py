"""The system calls that Python's ``os`` does not offer: namespaces, mounts, capabilities, prctl.

Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection

from . import seccomp

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND = 2, 4, 8, 4096
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_CAPBSET_DROP, PR_CAP_AMBIENT = (
    1,
    4,
    8,
    24,
    47,
)
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAP_SYS_CHROOT, CAP_SYS_ADMIN, LAST_CAPABILITY = 18, 21, 63
CAPABILITY_VERSION_3 = 0x20080522

# PyDLL keeps the interpreter's lock around calls: the thread that clones must be the one that goes
# on in the child.
libc = ctypes.PyDLL(None, use_errno=True)

# Arguments of capset that every command needs, made once for all.
_HEADER = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
_NOTHING = (ctypes.c_uint32 * 6)()


def clone(flags: int) -> int:
    """fork() into new namespaces: the child's pid, or 0 in the child. Raises OSError."""
    number = seccomp.number("clone", os.uname().machine)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = libc.syscall(number, flags | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    code = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(code, f"clone into new namespaces: {os.strerror(code)}")
    return pid


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2). Raises OSError."""
    texts = (source.encode(), target.encode(), kind.encode())
    if libc.mount(*texts, ctypes.c_ulong(flags), options.encode()):
        raise _error(f"mount {target}")


def mount_proc() -> None:
    """Mounts the /proc of this process's pid namespace. Raises OSError."""
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument. Raises OSError."""
    if libc.prctl(option, value, 0, 0, 0):
        raise _error(f"prctl({option})")


def keep_capabilities(kept: Collection[int]) -> None:
    """Gives up all capabilities but ``kept``, which must be held, for good. Raises OSError."""
    for capability in set(range(LAST_CAPABILITY + 1)) - set(kept):
        # Refused where there is nothing to drop.
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    _set_capabilities(kept)


def give_up_capabilities() -> None:
    """Gives up all capabilities that this process holds. Raises OSError."""
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    if libc.capset(_HEADER, _NOTHING):
        raise _error("capset")


def _set_capabilities(held: Collection[int]) -> None:
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    bits = sum(1 << capability for capability in held)
    low = bits & 0xFFFFFFFF
    high = bits >> 32
    # Effective, permitted, inheritable: first for the lower, then for the upper 32 capabilities.
    if libc.capset(_HEADER, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)):
        raise _error("capset")


def write(path: str, text: str) -> None:
    """Writes to a file of /proc, in one call as the kernel wants it. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _error(what: str) -> OSError:
    """The error of the call that has just failed."""
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")
