"""The host's end of an agent's program that runs inside of a sandbox (``inside/runner.py``).

It carries what the program says to its endpoint and back. Nothing else of this machine can be
reached from there. The bytes come from code that nobody has read: the endpoint takes them as those
of any client.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from absl import logging

from rl_code.environment.sandbox.bubblewrap import interpreter
from rl_code.environment.sandbox.errors import SandboxFault
from rl_code.environment.sandbox.pool import Program, Sandbox
from rl_code.harness.agent import Ending

_RUNNER = Path(__file__).with_name("inside") / "runner.py"
# The descriptor that the runner finds its end of the socket at.
_DESCRIPTOR = 3
_HEAD = struct.Struct("<II")
_PIECE = 1 << 16
# The most connections at once; agents have one or two.
_MOST = 32
# Seconds that a program may live. The episode's limits end it before.
_LIFETIME_S = 7 * 86400.0
# The most of a program's last words that an error shows, in characters.
_LAST_WORDS = 2000
# Seconds in which the threads of a program end.
_END_S = 60.0


class Carrier:
    """A program in a sandbox, from its start to its end.

    job: as ``inside/runner.py`` reads it, but for the port. url: of the endpoint. handed_in: the
    exit codes by which it hands its work in. on_end: called once, when it has ended by itself.
    Raises SandboxFault.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        job: Mapping[str, Any],
        url: str,
        handed_in: tuple[int, ...],
        on_end: Callable[[Ending], None],
    ):
        address = urlsplit(url)
        self._address = (address.hostname or "127.0.0.1", address.port or 80)
        self._handed_in, self._on_end = handed_in, on_end
        self._stopped = False
        self._sending = threading.Lock()
        self._open: dict[int, socket.socket] = {}
        program, _ = interpreter()
        line = [program, "-I", "-S", "-B", "-c", _RUNNER.read_text(), str(_DESCRIPTOR)]
        given = json.dumps({**job, "port": self._address[1]})
        self._program: Program = sandbox.start(
            line, stdin=given, channel=_DESCRIPTOR, timeout_s=_LIFETIME_S
        )
        self._thread = threading.Thread(target=self._run, name="agent program", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the program, if it has not ended, and waits for its end. May be called twice."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._program.channel.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_S)

    def _run(self) -> None:
        """Carries until the program ends, then says how."""
        try:
            self._carry()
        except OSError as error:
            logging.debug("the program's socket: %s", error)
        finally:
            for connection in list(self._open.values()):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        ending = self._ending()
        if not self._stopped:
            self._on_end(ending)

    def _carry(self) -> None:
        stream = self._program.channel.makefile("rb")
        while len(head := stream.read(_HEAD.size)) == _HEAD.size:
            number, length = _HEAD.unpack(head)
            if length > _PIECE:
                return  # no runner of ours
            data = stream.read(length)
            connection = self._open.get(number)
            if connection is None:
                if not data or len(self._open) >= _MOST:
                    continue
                connection = socket.create_connection(self._address)
                self._open[number] = connection
                threading.Thread(
                    target=self._read, args=(number, connection), name="agent", daemon=True
                ).start()
            with contextlib.suppress(OSError):  # the endpoint has closed it
                if data:
                    connection.sendall(data)
                else:
                    connection.shutdown(socket.SHUT_WR)

    def _read(self, number: int, connection: socket.socket) -> None:
        """Sends what the endpoint says on a connection, until it ends."""
        data = b"start"
        with connection:
            while data:
                try:
                    data = connection.recv(_PIECE)
                except OSError:
                    data = b""
                with self._sending, contextlib.suppress(OSError):
                    self._program.channel.sendall(_HEAD.pack(number, len(data)) + data)
        self._open.pop(number, None)

    def _ending(self) -> Ending:
        try:
            code, words = self._program.ended()
        except SandboxFault as fault:
            return Ending(False, str(fault), fault=True)
        finally:
            self._program.close()
        if code in self._handed_in:
            return Ending(True)
        return Ending(False, f"exit code {code}: {words[-_LAST_WORDS:].strip()}")
