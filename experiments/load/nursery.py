"""Starts a program again and again by forks of a process that has imported it already.

Importing takes longer than everything else until a program answers, and a run with many kills would
spend its time on that. A fork begins behind the imports; all that the program does itself, it does
anew. The nursery is itself a fork, made before its parent has any threads.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Main = Callable[[], Any]


class NurseryGone(RuntimeError):
    """The nursery was killed; what it started may run on."""


class Nursery:
    """The process. Made before any thread is started or device used.

    main: what each process runs, with its command line in ``sys.argv``.
    """

    def __init__(self, main: Main):
        self._socket, other = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._socket.close()
                # The parent still needs this process to end programs. It ends when the parent
                # closes the connection.
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
                _serve(other, main)
            finally:
                os._exit(0)
        other.close()
        self._file = self._socket.makefile("rw")

    def start(self, argv: Sequence[str], log: Path) -> int:
        """Begins a process in a session of its own; its id. log: takes all that it prints."""
        return self._ask("start", list(argv), str(log))

    def ended(self, pid: int) -> int | None:
        """The exit code of a process, negative for a signal; None while it runs."""
        return self._ask("ended", pid, False)

    def wait(self, pid: int) -> int:
        """The same once it has ended."""
        return self._ask("ended", pid, True)

    def _ask(self, *words: Any) -> Any:
        try:
            self._file.write(json.dumps(words) + "\n")
            self._file.flush()
            line = self._file.readline()
        except OSError:
            line = ""
        if not line:
            raise NurseryGone("the process that starts programs was killed")
        return json.loads(line)

    def close(self) -> None:
        """Ends the nursery, not what it has started."""
        self._file.close()
        self._socket.close()
        os.waitpid(self._pid, 0)


def _serve(connection: socket.socket, main: Main) -> None:
    codes: dict[int, int] = {}
    with connection.makefile("rw") as file:
        for line in file:
            match json.loads(line):
                case ["start", argv, log]:
                    answer = _fork(connection, main, argv, log)
                case ["ended", pid, wait]:
                    if pid not in codes:
                        found, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
                        if found:
                            codes[pid] = os.waitstatus_to_exitcode(status)
                    answer = codes.get(pid)
            file.write(json.dumps(answer) + "\n")
            file.flush()


def _fork(connection: socket.socket, main: Main, argv: list[str], log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        # ``close`` leaves the descriptor open while its file exists. This child would then hold
        # the nursery's end of the connection, and who asks a killed nursery would wait for ever.
        for old, new in ((nothing, 0), (out, 1), (out, 2), (nothing, connection.fileno())):
            os.dup2(old, new)
        sys.argv = argv
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
