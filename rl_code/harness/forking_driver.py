"""Runs agents of a package in a Python that has it (see ``forking``). It is a program of its own,
and uses nothing but the standard library.

Its argument is a file with a class ``Package``, which imports the package. It reads lines of JSON
from standard input, ``{"start": n, ...}`` or ``{"kill": n}``, and writes ``{"ended": n, ...}``. The
rest of that line is what the agent returned (``Package.prepare``), or ``{"status": ..., "error":
...}`` with the type of an error and its words. Each agent is a child of this process, which has
imported the package already.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import selectors
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

_LONGEST_ERROR = 2000


def main() -> None:
    """Starts and ends agents until standard input is closed."""
    channel = os.dup(1)
    os.dup2(2, 1)  # what a package prints is no line for the host

    def say(line: dict[str, Any]) -> None:
        os.write(channel, (json.dumps(line) + "\n").encode())

    gc.disable()  # nothing of an import is garbage, and looking for it takes a fifth of its time
    package = runpy.run_path(sys.argv[1])["Package"]()
    gc.freeze()  # nor do children look through what they share with this process
    gc.enable()
    say({"ready": True})
    children: dict[int, int] = {}  # number -> process
    pipes: dict[int, tuple[int, bytes]] = {}  # what a child writes to -> (number, so far)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    waiting = b""
    while True:
        for key, _ in selector.select():
            data = os.read(key.fd, 65536)
            if key.fd == 0:
                if not data:
                    for process in children.values():
                        os.kill(process, signal.SIGKILL)
                    return
                *lines, waiting = (waiting + data).split(b"\n")
                for line in map(json.loads, lines):
                    if "kill" in line:
                        process = children.get(line["kill"])
                        if process is not None:
                            os.kill(process, signal.SIGKILL)
                        continue
                    number = line["start"]
                    play = outcome_of(lambda job=line: package.prepare(job))
                    if isinstance(play, dict):
                        say({"ended": number} | play)
                        continue
                    children[number], pipe = fork(play)
                    pipes[pipe] = (number, b"")
                    selector.register(pipe, selectors.EVENT_READ)
            elif data:
                number, before = pipes[key.fd]
                pipes[key.fd] = (number, before + data)
            else:
                number, said = pipes.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                os.waitpid(children.pop(number), 0)
                outcome = json.loads(said) if said else {"status": "killed", "error": ""}
                say({"ended": number} | outcome)


def outcome_of(work: Callable[[], Any]) -> Any:
    """Result of the work; a dict with its error if it raises."""
    try:
        return work()
    # Whatever it is, an exit included: the code is of others, and the host has to hear of it. A
    # killed process says nothing, which is an outcome as well.
    except BaseException as error:
        traceback.print_exc()
        return {"status": type(error).__name__, "error": str(error)[:_LONGEST_ERROR]}


def fork(play: Callable[[], dict[str, Any]]) -> tuple[int, int]:
    """A child that plays an episode: (process, pipe from which its outcome is read)."""
    read, write = os.pipe()
    process = os.fork()
    if process:
        os.close(write)
        return process, read
    os.close(read)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    outcome = outcome_of(lambda: json.dumps(play()))
    said = outcome if isinstance(outcome, str) else json.dumps(outcome)
    data = said.encode()
    while data:
        data = data[os.write(write, data) :]
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
