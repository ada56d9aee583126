"""Commands, each a module that runs as ``python -m launch.<name>``.

A command imports for seconds before it reads its command line. Ctrl-C meanwhile ends it at once,
with one line and the exit code of a command that was asked to stop.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def leave_quietly(number: int, frame: Any) -> None:
    """Ends the process, in which nothing has begun yet."""
    sys.stderr.write("stopped before it began\n")
    sys.stderr.flush()
    os._exit(130)


def hear_interrupts() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt from now on: the command has begun."""
    if signal.getsignal(signal.SIGINT) is leave_quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# While Python looks for the module of ``-m``, this word stands for it. Nothing else is a command.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, leave_quietly)
