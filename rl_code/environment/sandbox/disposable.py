"""Calls a function of this project in a process that may be lost at any time.

What an agent, a task file or a server wrote may cost whoever parses, compiles or compares it
seconds, gigabytes or the process. So the training process does none of that where the cost is not
bounded by the code itself: it calls ``bounded`` with a function of a module that imports the
standard library alone. The function runs in a process with a limit of memory (kept.py) and of CPU
time, and its answer is limited in bytes. The process is kept for the next call.

``docs/environment.md`` lists every place where such bytes are read, with its bound.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_code.environment.sandbox.inside import meter, wire

if TYPE_CHECKING:
    from rl_code.environment.sandbox.kept import KeptProcesses

ASKED_BYTES = 64 << 20
"""The longest arguments of a call, as JSON, and the longest answer."""
# A process that holds more memory than this makes room for a fresh one.
_RETIRE_BYTES = 200 << 20
# The first letter of an answer.
_RETIRES, _STAYS = "r", "s"
# Wall-clock seconds of a call, beside its CPU seconds times this. No honest call needs them, even
# on a machine that has ten times as much to do as it can.
_SPARE_S = 20.0
_BUSY = 20


class OutOfBounds(Exception):
    """The call exceeded its bounds, or the function raised; the message says which."""


def bounded[**P, R](
    function: Callable[P, R], cpu_s: float, *arguments: P.args, **keywords: P.kwargs
) -> R:
    """Return what a function of a module of this project returns in a disposable process.

    Arguments and result are what JSON can say: tuples arrive as lists. cpu_s: CPU seconds of the
    call.

    Raises OutOfBounds, and SandboxFault where no process can be started.
    """
    place = function.__module__, function.__qualname__  # ty: ignore[missing-attribute]
    asked = json.dumps([*place, cpu_s, arguments, keywords])
    if len(asked) > ASKED_BYTES:
        raise OutOfBounds(f"{len(asked)} bytes to read; at most {ASKED_BYTES} are taken")
    with _turns():
        for last in (False, True):
            answer, code = _ask(asked, cpu_s)
            # the machine may end any process when its memory is used up, so one try more
            if answer is not None or code != -signal.SIGKILL or last:
                break
    match answer:
        case ["value", value]:
            return value
        case ["raised", str(said)]:
            raise OutOfBounds(said)
        case _:
            why = (
                f"more than {cpu_s:g} CPU seconds"
                if code == -signal.SIGPROF
                else f"it ended: {code}"
            )
            raise OutOfBounds(why)


def _ask(asked: str, cpu_s: float) -> tuple[Any, int]:
    """The answer of a process, or None and its exit code. Raises OutOfBounds for one that takes too
    long or says what is no answer, and SandboxFault.
    """
    processes = _processes()
    process = processes.take()
    try:
        process.control.settimeout(_SPARE_S + _BUSY * cpu_s)
        wire.write_frame(process.control, asked)
        frame = wire.read_frame(process.control, ASKED_BYTES)
        answer = None if frame is None else json.loads(frame[1:])
    except TimeoutError as error:
        process.close()
        raise OutOfBounds("it took too long") from error
    except (ValueError, RecursionError) as error:  # WireError is a ValueError
        process.close()
        raise OutOfBounds(f"it said what is no answer: {error}") from error
    except OSError:
        return None, process.close()
    except BaseException:
        process.close()
        raise
    if frame is None:
        return None, process.close()
    if frame.startswith(_RETIRES):
        process.close()
    else:
        processes.give_back(process)
    return answer, 0


@functools.cache
def _processes() -> KeptProcesses:
    """The processes of this one, which end with it."""
    # The processes themselves, which import this module, never start others.
    from rl_code.environment.sandbox.kept import KeptProcesses

    return KeptProcesses(__name__)


@functools.cache
def _turns() -> threading.BoundedSemaphore:
    """Bounds how many processes work at once, and with it the memory of all together."""
    return threading.BoundedSemaphore(max(2, os.cpu_count() or 1))


def main(control: socket.socket) -> None:
    """Answers calls until the other side closes."""
    warnings.simplefilter("ignore")  # of the parser, about texts
    # Output would fill a pipe that nobody reads.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    while (frame := wire.read_frame(control, ASKED_BYTES)) is not None:
        module, name, cpu_s, arguments, keywords = json.loads(frame)
        found = getattr(importlib.import_module(module), name)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process
        try:
            said = json.dumps(["value", found(*arguments, **keywords)])
        except Exception as error:  # whatever the text provoked is an outcome
            said = json.dumps(["raised", f"{type(error).__name__}: {error}"[:500]])
        signal.setitimer(signal.ITIMER_PROF, 0)
        retires = meter.resident(os.getpid()) > _RETIRE_BYTES
        wire.write_frame(control, f"{_RETIRES if retires else _STAYS}{said}")
