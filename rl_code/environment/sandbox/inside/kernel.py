"""The system calls that Python's ``os`` does not offer: namespaces, mounts, capabilities, prctl.

Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Collection

from . import seccomp

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
CLONE_NEWNET = 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC = 1, 2, 4, 8, 4096, 16384
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_CAPBSET_DROP, PR_CAP_AMBIENT = (
    1,
    4,
    8,
    24,
    47,
)
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_SYS_CHROOT, CAP_SYS_ADMIN, LAST_CAPABILITY = 1, 3, 18, 21, 63
# Capabilities that a session needs to start a command: making namespaces, mounting /proc there,
# entering them.
SUPERVISING = (CAP_SYS_ADMIN, CAP_SYS_CHROOT)
# Capabilities that it needs before, to mount layers: an overlay works in a folder without rights,
# with the rights of who mounted it.
MOUNTING = (*SUPERVISING, CAP_DAC_OVERRIDE, CAP_FOWNER)
CAPABILITY_VERSION_3 = 0x20080522
# System calls for mounts by descriptor; these numbers are the same on x86_64 and aarch64.
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _MOUNT_ATTR_IDMAP = 1, 4, 0x00100000
# Of network interfaces: the request that sets flags, and the flag of one that is up.
_SET_FLAGS, _UP = 0x8914, 1
_HERE, _AT_EMPTY_PATH = -100, 0x1000

# PyDLL keeps the interpreter's lock around calls: the thread that clones must be the one that goes
# on in the child.
libc = ctypes.PyDLL(None, use_errno=True)

# Arguments of capset that every command needs, made once for all.
_HEADER = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
_NOTHING = (ctypes.c_uint32 * 6)()


def start_loopback() -> None:
    """Starts the loopback of this process's network. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))


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


def keep_capabilities(kept: Collection[int], bound: Collection[int] | None = None) -> None:
    """Gives up all capabilities but ``kept``, which must be held, for good. Raises OSError.

    bound: those that this process and its children may ever get again; None for ``kept``.
    """
    for capability in set(range(LAST_CAPABILITY + 1)) - set(kept if bound is None else bound):
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


def map_owner(folder: str, user: int, group: int) -> None:
    """Shows everything in ``folder`` that belongs to the folder's owner and group as that of
    ``user`` and ``group``, read-only; root only. Raises OSError.
    """
    owner = os.stat(folder)
    go, ready = os.pipe()
    child = clone(CLONE_NEWUSER)
    if child == 0:
        os.close(ready)
        os.read(go, 1)  # until the namespace is held by a descriptor
        os._exit(0)
    os.close(go)
    try:
        write(f"/proc/{child}/uid_map", f"{owner.st_uid} {user} 1")
        write(f"/proc/{child}/gid_map", f"{owner.st_gid} {group} 1")
        users = os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
    finally:
        os.close(ready)
        os.waitpid(child, 0)
    tree = libc.syscall(_OPEN_TREE, _HERE, folder.encode(), _OPEN_TREE_CLONE | os.O_CLOEXEC)
    if tree < 0:
        raise _error(f"open_tree {folder}")
    # attr_set, attr_clr, propagation, userns_fd
    flags = _MOUNT_ATTR_IDMAP | MS_RDONLY | MS_NOSUID | MS_NODEV
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, users)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    if libc.syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attributes, size):
        raise _error(f"map the owner of {folder}, which its file system may not support")
    if libc.syscall(_MOVE_MOUNT, tree, b"", _HERE, folder.encode(), _MOVE_MOUNT_F_EMPTY_PATH):
        raise _error(f"move_mount {folder}")
    os.close(tree)
    os.close(users)


def _error(what: str) -> OSError:
    """The error of the call that has just failed."""
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")
