"""Keeps the processes behind sandboxes: bubblewrap workers, and slots that hold one session at a
time.
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
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from absl import logging

from rl_code.environment.sandbox import cgroups
from rl_code.environment.sandbox.config import SPARE_MB, SandboxConfig
from rl_code.environment.sandbox.errors import SandboxFault, SandboxUnavailable
from rl_code.environment.sandbox.inside import session, wire
from rl_code.environment.sandbox.inside.meter import LOOK_S
from rl_code.environment.sandbox.worker import (
    HOW_TO_GET_ONE,
    Mode,
    Worker,
    end_worker,
    hello,
    modes,
    start_worker,
)

START_S = 30.0
# Room for a listing of the workspace, and for all that is shorter.
LISTING_BYTES = 32 << 20
# A request that every mode must be able to carry out.
_PROBE = {"op": "run", "argv": ["true"], "stdin": "", "timeout": START_S}


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
    # True if a session has run whose end has not been read yet.
    used: bool = False


class Sandboxes:
    """The workers and slots of a pool. Thread-safe."""

    def __init__(self, config: SandboxConfig, ways: Sequence[Mode] = ()):
        self._config = config
        self._lock = threading.Lock()
        self._idle: collections.deque[Slot] = collections.deque()
        self._slots: dict[int, Slot] = {}
        self._workers: list[Worker] = []
        self._turns = itertools.count()
        self._closed = False
        # Bubblewrap's --die-with-parent means the thread that started it, not the process. This
        # thread lives as long as the pool.
        self._starter = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="sandbox-starter"
        )
        self._cgroups = cgroups.Cgroups(
            {
                "memory": (config.memory_mb + 2 * config.workspace_mb + SPARE_MB) << 20,
                "pids": config.processes + 4,
                "cpu": round(config.cpus * cgroups.PERIOD_US),
            }
        )
        failures = []
        for self._mode in ways or modes(bool(config.layers)):
            failure = self._probe()
            if not failure:
                self._say_what_is_weak()
                return
            failures.append(f"{self._mode}: {failure}")
        if not failures:
            failures.append("this process is root, and there is no other user it could give way to")
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
    def frame_bytes(self) -> int:
        """The longest answer of a session that is read: a snapshot in base64, or a listing."""
        return 2 * (self._config.snapshot_mb << 20) + 8 * self._config.output_bytes + LISTING_BYTES

    @property
    def closed(self) -> bool:
        """True if the pool was closed by its owner."""
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
            end_worker(worker)
        for slot in idle:
            self.discard(slot)
        for slot in in_use:
            self._cgroups.release(slot.folders)
        self._starter.shutdown()

    def _probe(self) -> str:
        """Starts a worker, a session and a command in the current mode; returns an error or ""."""
        try:
            slot = self.take()
        except SandboxFault as fault:
            return str(fault)
        try:
            slot.channel.settimeout(START_S)
            wire.write_frame(slot.channel, json.dumps(_PROBE))
            answer = wire.read_json(slot.channel, session.FRAME_BYTES)
            answer = {"fault": "it ended at once"} if answer is None else answer
        except (OSError, wire.WireError) as error:
            answer = {"fault": str(error)}
        match answer:
            case {"ok": {"status": 0}}:
                self.give_back(slot)
                return ""
        self.discard(slot)
        for worker in self._workers:
            end_worker(worker)
        self._workers.clear()
        return str(answer)

    def _settled(self, slot: Slot) -> bool:
        """True if the slot's last session has ended in good order."""
        if not slot.used:
            return True
        try:
            slot.channel.settimeout(START_S)
            closed = wire.read_json(slot.channel, session.FRAME_BYTES) == {"closed": 0}
        except (OSError, wire.WireError):
            return False
        slot.used = False
        return closed

    def _new_slot(self) -> Slot:
        """A new keeper, enclosed in its cgroups. Raises SandboxFault."""
        try:
            channel, remote = socket.socketpair()
        except OSError as error:
            raise SandboxFault(f"no socket for a sandbox: {error}") from error
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
        pid = hello(channel, worker.process)
        slot = Slot(worker, channel, os.pidfd_open(pid), [])
        with self._lock:
            self._slots[id(slot)] = slot
            late = self._closed
        try:
            if not late:
                slot.folders += self._cgroups.enclose(pid)
                self._pass_meter(slot)
        except OSError:
            self.discard(slot)
            raise
        if late:
            self.discard(slot)
            raise SandboxFault("the pool is closed")
        return slot

    def _pass_meter(self, slot: Slot) -> None:
        """Lets the keeper go on, with the file in which its cgroup counts CPU time if there is one.
        Raises OSError.
        """
        path = self._cgroups.meter(slot.folders)
        if path is None:
            slot.channel.send(b"m")
            return
        with open(path, "rb") as file:
            socket.send_fds(slot.channel, [b"m"], [file.fileno()])

    def _say_what_is_weak(self) -> None:
        """Logs which limits of a sandbox as a whole no cgroup holds here."""
        held = self._cgroups.controllers
        if "memory" not in held:
            logging.warning(
                "no cgroup can be made here for memory: the sandbox itself adds up the memory of "
                "its processes %d times a second, and can exceed sandbox.memory_mb in between",
                round(1 / LOOK_S),
            )
        if "cpu" not in held:
            logging.warning(
                "no cgroup can be made here for processors: sandbox.cpu_s ends a command that uses "
                "several of them, but until then it slows other sandboxes"
            )

    def _worker(self) -> Worker:
        """The worker whose turn it is, started anew if it has died."""
        with self._lock:
            if self._closed:
                raise SandboxFault("the pool is closed")
            number = next(self._turns) % self._config.workers
            if number < len(self._workers) and self._workers[number].process.poll() is None:
                return self._workers[number]
            for dead in self._workers[number : number + 1]:
                end_worker(dead)
            control, remote = socket.socketpair()
            control.settimeout(START_S)
            with remote:
                worker = Worker(self._starter.submit(self._start, remote).result(), control)
            self._workers[number : number + 1] = [worker]
            return worker

    def _start(self, remote: socket.socket) -> subprocess.Popen[bytes]:
        """Starts a worker whose zygote has ``remote`` as its control socket. Raises OSError."""
        return start_worker(self._config, self._mode, self._cgroups.controllers, remote)


def _kill(slot: Slot) -> None:
    """Ends a slot's processes; its socket and its handle stay open."""
    with contextlib.suppress(OSError):  # not connected any more
        slot.channel.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(slot.handle, signal.SIGKILL)
