"""Commands, each a module that runs as ``python -m launch.<name>``.

A command imports for seconds before it reads its command line. One that works for long says at once
that it starts. Ctrl-C meanwhile ends it, with one line and the exit code of a command that was
asked to stop.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from launch import unloaded
from rl_code.host.stop import INTERRUPTED

# Commands that work for minutes or longer.
LONG = (
    *("aot", "bench", "bisect", "evaluate", "export", "faults", "fork", "make_tasks"),
    *("on_device", "plan", "realtime", "redteam", "replay", "serve", "sft", "sweep", "train"),
    *("tune", "validate"),
)


def asks_for_help(words: Iterable[str]) -> bool:
    """True if a command line asks what the command does."""
    return bool({"-h", "-help", "--help"} & {*words})


def first_line(words: Sequence[str]) -> str | None:
    """First line of a command before it imports anything; None for one that is soon done, and for
    help.

    words: Python's own command line, with ``-m``.
    """
    if "-m" not in words:
        return None
    at = list(words).index("-m") + 1
    folder, _, name = "".join(words[at : at + 1]).partition(".")
    if folder != "launch" or name not in LONG or asks_for_help(words[at:]):
        return None
    return f"{folder}.{name} starts"


def leave_quietly(number: int, frame: Any) -> None:
    """Ends the process, in which nothing has begun yet."""
    sys.stderr.write("stopped before it began\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def hear_interrupts() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt from now on: the command has begun."""
    if signal.getsignal(signal.SIGINT) is leave_quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def begin(words: Sequence[str]) -> None:
    """First work of a command, before its imports. words: as of ``first_line``."""
    if asks_for_help(words):
        unloaded.leave_unloaded()
    if line := first_line(words):
        print(line, file=sys.stderr, flush=True)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_quietly)


# While Python looks for the module of ``-m``, this word stands for it. Nothing else is a command.
if sys.argv[:1] == ["-m"]:
    begin(sys.orig_argv)
