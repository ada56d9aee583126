"""A system call filter for code that is not trusted, as a classic BPF program written out by hand.

It denies what namespaces leave open and programs in Python never need: mounts, namespaces, tracing,
keys, kernel modules, BPF, io_uring, every socket except a pair of AF_UNIX, shared memory that
outlives its process or escapes the memory limit, typing into a terminal. Numbers are the kernel's,
from asm/unistd_64.h (x86_64) and asm-generic/unistd.h (aarch64). Runs inside the sandbox: standard
library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

KILL_PROCESS = 0x80000000
ERRNO = 0x00050000
ALLOW = 0x7FFF0000

# Offsets in struct seccomp_data; arguments are 64 bits wide, little endian, and only their lower
# half is compared.
NUMBER, ARCHITECTURE, ARGUMENT_0, ARGUMENT_1 = 0, 4, 16, 24

LOAD, JUMP_EQUAL, JUMP_GREATER, JUMP_BITS, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06

# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
NEW_NAMESPACES = (
    0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
)
AF_UNIX, TIOCSTI, TIOCLINUX, CURRENT_PERSONALITY = 1, 0x5412, 0x541C, 0xFFFFFFFF

# Above this number stand system calls that this filter does not know.
LAST_KNOWN = 470
X32 = 0x40000000

# The same on every architecture.
DENIED_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440,
    "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "open_tree_attr": 467,
}  # fmt: skip

DENIED = {
    "x86_64": {
        "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "semop": 65, "semctl": 66, "shmdt": 67, "msgget": 68,
        "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "ptrace": 101, "syslog": 103, "uselib": 134, "vhangup": 153,
        "modify_ldt": 154, "pivot_root": 155, "_sysctl": 156, "adjtimex": 159, "chroot": 161, "acct": 163,
        "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
        "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "create_module": 174, "init_module": 175,
        "delete_module": 176, "quotactl": 179, "nfsservctl": 180, "lookup_dcookie": 212, "semtimedop": 220,
        "clock_settime": 227, "mq_open": 240, "mq_unlink": 241, "kexec_load": 246, "add_key": 248, "request_key": 249,
        "keyctl": 250, "migrate_pages": 256, "unshare": 272, "move_pages": 279, "perf_event_open": 298,
        "fanotify_init": 300, "fanotify_mark": 301, "name_to_handle_at": 303, "open_by_handle_at": 304,
        "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "socket": 41,
    },
    "aarch64": {
        "lookup_dcookie": 18, "umount2": 39, "mount": 40, "pivot_root": 41, "nfsservctl": 42, "chroot": 51,
        "vhangup": 58, "quotactl": 60, "acct": 89, "unshare": 97, "kexec_load": 104, "init_module": 105,
        "delete_module": 106, "clock_settime": 112, "syslog": 116, "ptrace": 117, "reboot": 142, "sethostname": 161,
        "setdomainname": 162, "settimeofday": 170, "adjtimex": 171, "mq_open": 180, "mq_unlink": 181, "msgget": 186,
        "msgctl": 187, "msgrcv": 188, "msgsnd": 189, "semget": 190, "semctl": 191, "semtimedop": 192, "semop": 193,
        "shmget": 194, "shmctl": 195, "shmat": 196, "shmdt": 197, "socket": 198, "add_key": 217, "request_key": 218,
        "keyctl": 219, "swapon": 224, "swapoff": 225, "migrate_pages": 238, "move_pages": 239, "perf_event_open": 241,
        "fanotify_init": 262, "fanotify_mark": 263, "name_to_handle_at": 264, "open_by_handle_at": 265,
        "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "finit_module": 273, "memfd_create": 279, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
    },
}  # fmt: skip

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
IOCTL = {"x86_64": 16, "aarch64": 29}
PERSONALITY = {"x86_64": 135, "aarch64": 92}
SOCKETPAIR = {"x86_64": 53, "aarch64": 199}


def program(machine: str) -> bytes:
    """The filter for ``machine`` (as ``os.uname`` names it): instructions of 8 bytes each.

    Raises:
      ValueError: no table for this machine.
    """
    if machine not in DENIED:
        raise ValueError(f"no system call table for {machine=}; known: {', '.join(DENIED)}")

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("<HBBI", code, if_true, if_false, value)

    deny = step(RETURN, ERRNO | errno.EPERM)
    missing = step(RETURN, ERRNO | errno.ENOSYS)
    kill = step(RETURN, KILL_PROCESS)
    allow = step(RETURN, ALLOW)
    lines = [
        step(LOAD, ARCHITECTURE),
        step(JUMP_EQUAL, AUDIT[machine], 1, 0),
        kill,
        step(LOAD, NUMBER),
    ]
    if machine == "x86_64":
        lines += [step(JUMP_BITS, X32, 0, 1), kill]
    lines += [
        step(JUMP_GREATER, LAST_KNOWN, 0, 1),
        missing,
        step(JUMP_EQUAL, CLONE3, 0, 1),
        missing,
    ]
    for number in sorted({*DENIED[machine].values(), *DENIED_EVERYWHERE.values()}):
        lines += [step(JUMP_EQUAL, number, 0, 1), deny]
    # Each block: not this call -> skip it; else decide by an argument.
    lines += [step(JUMP_EQUAL, CLONE[machine], 0, 4), step(LOAD, ARGUMENT_0)]
    lines += [step(JUMP_BITS, NEW_NAMESPACES, 0, 1), deny, allow]
    lines += [step(JUMP_EQUAL, SOCKETPAIR[machine], 0, 4), step(LOAD, ARGUMENT_0)]
    lines += [step(JUMP_EQUAL, AF_UNIX, 1, 0), deny, allow]
    lines += [step(JUMP_EQUAL, PERSONALITY[machine], 0, 4), step(LOAD, ARGUMENT_0)]
    lines += [step(JUMP_EQUAL, CURRENT_PERSONALITY, 1, 0), deny, allow]
    lines += [step(JUMP_EQUAL, IOCTL[machine], 0, 5), step(LOAD, ARGUMENT_1)]
    lines += [
        step(JUMP_EQUAL, TIOCSTI, 1, 0),
        step(JUMP_EQUAL, TIOCLINUX, 0, 1),
        deny,
        allow,
        allow,
    ]
    return b"".join(lines)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38


def apply(libc: ctypes.CDLL, instructions: bytes) -> None:
    """Bind this process and all it will start to the filter, for good.

    Raises:
      OSError: the kernel refused.
    """
    holder = _Program(len(instructions) // 8, instructions)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(
            ctypes.get_errno(), f"prctl(PR_SET_NO_NEW_PRIVS): {os.strerror(ctypes.get_errno())}"
        )
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(holder), 0, 0):
        raise OSError(
            ctypes.get_errno(), f"prctl(PR_SET_SECCOMP): {os.strerror(ctypes.get_errno())}"
        )
