"""Free ports of this machine."""

from __future__ import annotations

import contextlib
import socket


def free_port() -> int:
    """One that nobody listens at."""
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
