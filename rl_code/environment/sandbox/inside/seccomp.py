"""A system call filter for code that is not trusted, as a classic BPF program written out by hand.

It allows the calls that programs, shells, Python, git and pytest need, and refuses all others with
"operation not permitted": whatever a future kernel adds is refused until somebody adds it here.
Left out on purpose are calls that open the kernel (mounts, namespaces, tracing, BPF, keys), that
use up limits of the whole machine (aio, inotify, System V and POSIX queues, ``sync``), that make
memory which outlives its process, and every socket but a pair of AF_UNIX, or those of SOCKETS where
a sandbox has a network of its own. Calls that take the
number of another process and change it are allowed on the caller itself only.

The numbers are the kernel's, from asm/unistd_64.h (x86_64) and asm-generic/unistd.h (aarch64).
Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Any

# By name: the number on x86_64 and on aarch64, None where the architecture has no such call.
# fmt: off
ALLOWED = {
    # Files by descriptor.
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66),
    "pread64": (17, 67), "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70),
    "preadv2": (327, 286), "pwritev2": (328, 287), "lseek": (8, 62), "close": (3, 57),
    "close_range": (436, 436), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "fcntl": (72, 25), "flock": (73, 32), "ioctl": (16, 29), "ftruncate": (77, 46),
    "fallocate": (285, 47), "fadvise64": (221, 223), "readahead": (187, 213), "fsync": (74, 82),
    "fdatasync": (75, 83), "sendfile": (40, 71), "splice": (275, 76), "tee": (276, 77),
    "vmsplice": (278, 75), "copy_file_range": (326, 285), "getdents": (78, None),
    "getdents64": (217, 61), "pipe": (22, None), "pipe2": (293, 59), "fchmod": (91, 52),
    "fchown": (93, 55), "fchdir": (81, 50), "fstat": (5, 80), "fstatfs": (138, 44),
    "fgetxattr": (193, 10), "flistxattr": (196, 13), "fsetxattr": (190, 7),
    "fremovexattr": (199, 16),
    # Files by name.
    "open": (2, None), "creat": (85, None), "openat": (257, 56), "openat2": (437, 437),
    "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291),
    "statfs": (137, 43), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, None), "readlinkat": (267, 78), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None), "linkat": (265, 37),
    "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33),
    "chmod": (90, None), "fchmodat": (268, 53), "chown": (92, None), "lchown": (94, None),
    "fchownat": (260, 54), "truncate": (76, 45), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "umask": (95, 166), "chdir": (80, 49),
    "getcwd": (79, 17), "getxattr": (191, 8), "lgetxattr": (192, 9), "listxattr": (194, 11),
    "llistxattr": (195, 12), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "removexattr": (197, 14), "lremovexattr": (198, 15),
    # Memory.
    "brk": (12, 214), "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216),
    "mprotect": (10, 226), "msync": (26, 227), "madvise": (28, 233), "membarrier": (324, 283),
    # Processes and threads.
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "execve": (59, 221),
    "execveat": (322, 281), "exit": (60, 93), "exit_group": (231, 94), "wait4": (61, 260),
    "waitid": (247, 95), "set_tid_address": (218, 96), "set_robust_list": (273, 99),
    "rseq": (334, 293), "arch_prctl": (158, None), "prctl": (157, 167),
    "personality": (135, 92), "futex": (202, 98), "futex_waitv": (449, 449),
    "pidfd_open": (434, 434), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178),
    "getpgrp": (111, None), "getpgid": (121, 155), "setpgid": (109, 154), "getsid": (124, 156),
    "setsid": (112, 157), "getpriority": (140, 141), "setpriority": (141, 140),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "sched_setaffinity": (203, 122),
    "sched_getscheduler": (145, 120), "sched_setscheduler": (144, 119),
    "sched_getparam": (143, 121), "sched_setparam": (142, 118), "sched_getattr": (315, 275),
    "sched_setattr": (314, 274), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "sched_rr_get_interval": (148, 127),
    "getcpu": (309, 168),
    # Users and limits.
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getgroups": (115, 158), "getresuid": (118, 148), "getresgid": (120, 150),
    "setuid": (105, 146), "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143),
    "setresuid": (117, 147), "setresgid": (119, 149), "capget": (125, 90),
    "getrlimit": (97, 163), "setrlimit": (160, 164), "prlimit64": (302, 261),
    "getrusage": (98, 165), "times": (100, 153), "sysinfo": (99, 179), "uname": (63, 160),
    "getrandom": (318, 278),
    # Signals.
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "pidfd_send_signal": (424, 424), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "rt_sigreturn": (15, 139), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "sigaltstack": (131, 132), "signalfd": (282, None), "signalfd4": (289, 74),
    "pause": (34, None), "restart_syscall": (219, 128), "alarm": (37, None),
    # Time.
    "time": (201, None), "gettimeofday": (96, 169), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "getitimer": (36, 102), "setitimer": (38, 103), "timer_create": (222, 107),
    "timer_settime": (223, 110), "timer_gettime": (224, 108), "timer_getoverrun": (225, 109),
    "timer_delete": (226, 111), "timerfd_create": (283, 85), "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87),
    # Waiting for descriptors.
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
    "epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_wait": (232, None), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441),
    "eventfd": (284, None), "eventfd2": (290, 19),
    # Socket pairs.
    "socketpair": (53, 199), "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211),
    "recvmsg": (47, 212), "sendmmsg": (307, 269), "recvmmsg": (299, 243), "shutdown": (48, 210),
    "getsockname": (51, 204), "getpeername": (52, 205), "setsockopt": (54, 208),
    "getsockopt": (55, 209),
    # Newer than most headers; the same everywhere.
    "fchmodat2": (452, 452), "mseal": (462, 462),
}
# fmt: on

# Calls that sandboxes with a network of their own allow beside these.
SOCKETS = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242),
}  # fmt: skip

# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
NEW_NAMESPACES = (
    0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
)
# Makes a process the caller's sibling; its parent would be the session.
CLONE_PARENT = 0x00008000
ITSELF = 0
PRIO_PROCESS = 0
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
CURRENT_PERSONALITY = 0xFFFFFFFF
# Typing into a terminal.
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
# Leases and notices on folders: they hold up others or use up kernel memory.
F_SETLEASE, F_NOTIFY = 1024, 1026

# Conditions on the arguments that a call of ALLOWED must meet to pass: (number of the argument,
# condition, value).
ARGUMENTS = {
    "clone": ((0, "no bit of", NEW_NAMESPACES | CLONE_PARENT),),
    "fcntl": ((1, "not", F_SETLEASE), (1, "not", F_NOTIFY)),
    "ioctl": ((1, "not", TIOCSTI), (1, "not", TIOCLINUX)),
    "personality": ((0, "is", CURRENT_PERSONALITY),),
    "prlimit64": ((0, "is", ITSELF),),
    "sched_setaffinity": ((0, "is", ITSELF),),
    "sched_setattr": ((0, "is", ITSELF),),
    "sched_setparam": ((0, "is", ITSELF),),
    "sched_setscheduler": ((0, "is", ITSELF),),
    "setpriority": ((0, "is", PRIO_PROCESS), (1, "is", ITSELF)),
    "socket": ((0, "one of", (AF_UNIX, AF_INET, AF_INET6)),),
    "socketpair": ((0, "is", AF_UNIX),),
}

# Refused as "no such call", so that the C library falls back to the older ``clone``, whose flags
# this filter can read; those of clone3 stand in memory.
CLONE3 = 435
# Calls above this number are newer than this filter. Programs try them and do without.
LAST_KNOWN = 450
# Numbers of the x32 architecture carry this bit.
X32 = 0x40000000

MACHINES = ("x86_64", "aarch64")
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Answers of the filter.
KILL_PROCESS = 0x80000000
ERRNO = 0x00050000
ALLOW = 0x7FFF0000

# Offsets in struct seccomp_data. An argument is 64 bits wide, little endian; its lower half is
# compared, since the kernel reads no more of the arguments named above.
NUMBER, ARCHITECTURE, ARGUMENT_0, ARGUMENT_BYTES = 0, 4, 16, 8

LOAD, JUMP_EQUAL, JUMP_GREATER, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 6


def number(name: str, machine: str) -> int | None:
    """The number of an allowed call; None where ``machine`` does not have it."""
    return {**ALLOWED, **SOCKETS}[name][MACHINES.index(machine)]


def program(machine: str, sockets: bool = False) -> bytes:
    """The filter for ``machine`` (as ``os.uname`` names it): instructions of 8 bytes each.

    sockets: true if those of ``SOCKETS`` are allowed.

    Raises:
      ValueError: no table for this machine.
    """
    if machine not in MACHINES:
        raise ValueError(f"no system call table for {machine=}; known: {', '.join(MACHINES)}")
    allow = _step(RETURN, ALLOW)
    kill = _step(RETURN, KILL_PROCESS)
    missing = _step(RETURN, ERRNO | errno.ENOSYS)
    refuse = _step(RETURN, ERRNO | errno.EPERM)
    lines = [_step(LOAD, ARCHITECTURE), _step(JUMP_EQUAL, AUDIT[machine], 1, 0), kill]
    lines += [_step(LOAD, NUMBER)]
    if machine == "x86_64":
        lines += [_step(JUMP_BITS, X32, 0, 1), kill]
    lines += [_step(JUMP_EQUAL, CLONE3, 0, 1), missing]
    for name, conditions in ARGUMENTS.items():
        if (call := number(name, machine)) is None or (name in SOCKETS and not sockets):
            continue
        block = [line for condition in conditions for line in _check(*condition, refuse)]
        lines += [_step(JUMP_EQUAL, call, 0, len(block) + 1), *block, allow]
    for first, last in _ranges(machine, sockets):
        lines += [_step(JUMP_AT_LEAST, first, 0, 2), _step(JUMP_GREATER, last, 1, 0), allow]
    lines += [_step(JUMP_GREATER, LAST_KNOWN, 0, 1), missing, refuse]
    return b"".join(lines)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction; the jumps say how many instructions to skip."""
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _check(argument: int, condition: str, value: Any, refuse: bytes) -> list[bytes]:
    """Instructions that refuse the call unless its argument meets the condition."""
    load = _step(LOAD, ARGUMENT_0 + ARGUMENT_BYTES * argument)
    if condition == "one of":  # each that is met skips the other ones, and the refusal
        count = len(value)
        tests = [_step(JUMP_EQUAL, one, count - at, 0) for at, one in enumerate(value)]
        return [load, *tests, refuse]
    test = {
        "is": _step(JUMP_EQUAL, value, 1, 0),
        "not": _step(JUMP_EQUAL, value, 0, 1),
        "no bit of": _step(JUMP_BITS, value, 0, 1),
    }[condition]
    return [load, test, refuse]


def _ranges(machine: str, sockets: bool) -> list[tuple[int, int]]:
    """The allowed numbers whose arguments do not matter, as ranges: first and last, both included.

    Ranges keep the program short, which matters on kernels that run it at every call.
    """
    names = ALLOWED.keys() | (SOCKETS.keys() if sockets else set())
    known = (number(name, machine) for name in names - ARGUMENTS.keys())
    found: list[tuple[int, int]] = []
    for call in sorted(call for call in known if call is not None):
        if found and call == found[-1][1] + 1:
            found[-1] = (found[-1][0], call)
        else:
            found.append((call, call))
    return found


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38


def apply(libc: ctypes.CDLL, instructions: bytes) -> None:
    """Binds this process and all it will start to the filter, for good.

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
