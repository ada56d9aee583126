"""Messages of JSON-RPC over the standard input and output of a program that is not trusted.

Messages are bounded in bytes, and every wait has a deadline on the clock of time.monotonic.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any, Literal

from models.marks import encodable_all

# Bytes of the longest message that is read, of the head of one, and of all lines together that are
# no messages.
MESSAGE_BYTES = 4 << 20
_HEAD_BYTES = 4096
_SKIPPED_BYTES = 4 << 20
ENDED = "it has ended"


class StreamEnded(OSError):
    """The program ended, or wrote what is no message, or did not read or answer in time."""


class Stream:
    """Messages in both directions.

    form: "headers" as language servers write messages (``Content-Length: n``), "lines" as MCP
    servers do. Among lines, those that are no messages are passed over: programs print there what
    belongs to their standard error.
    """

    def __init__(self, channel: socket.socket, form: Literal["headers", "lines"]):
        self._channel = channel
        self._form = form
        self._read = b""
        self._number = 0
        # Number of lines that were passed over, their bytes, and the beginning of the first.
        self.skipped = 0
        self._skipped_bytes = 0
        self._first_skipped = ""

    def request(self, method: str, params: Any, deadline: float | None = None) -> int:
        """Writes a request; the number that its answer will have. Raises StreamEnded."""
        self._number += 1
        message = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}
        self.write(message, deadline)
        return self._number

    def notify(self, method: str, params: Any = None, deadline: float | None = None) -> None:
        """Writes a notification. params: None for none. Raises StreamEnded."""
        given = {} if params is None else {"params": params}
        self.write({"jsonrpc": "2.0", "method": method, **given}, deadline)

    def reply(self, message: dict[str, Any], answer: dict[str, Any], deadline: float) -> None:
        """Answers a request of the program's. answer: its result or error. Raises StreamEnded."""
        self.write({"jsonrpc": "2.0", "id": message["id"], **answer}, deadline)

    def write(self, message: dict[str, Any], deadline: float | None = None) -> None:
        """Writes a message. Raises StreamEnded."""
        data = json.dumps(message).encode()
        if self._form == "headers":
            data = b"Content-Length: %d\r\n\r\n%b" % (len(data), data)
        else:
            data += b"\n"
        left = 10.0 if deadline is None else _left(deadline)
        try:
            self._channel.settimeout(left)
            self._channel.sendall(data)
        except TimeoutError as error:
            raise StreamEnded("it did not read in time") from error
        except OSError as error:
            raise StreamEnded(ENDED) from error

    def read(self, deadline: float) -> dict[str, Any]:
        """The next message. Raises StreamEnded."""
        if self._form == "lines":
            return self._next_line(deadline)
        head = self._until(b"\r\n\r\n", _HEAD_BYTES, deadline)
        text = self._exactly(_length(head), deadline)
        message = _message(text)
        if message is None:
            raise StreamEnded(f"it wrote what is no message (no JSON object): {text[:80]!r}")
        return message

    @property
    def told_skipped(self) -> str:
        """Number of lines that were passed over, in words; "" for none."""
        if not self.skipped:
            return ""
        return (
            f"{self.skipped} lines of its standard output are no messages, the first: "
            f"{self._first_skipped}"
        )

    def _next_line(self, deadline: float) -> dict[str, Any]:
        """The message of the next line that is one."""
        while True:
            text = self._until(b"\n", MESSAGE_BYTES, deadline).strip()
            message = _message(text) if text.startswith(b"{") else None
            if message is not None:
                return message
            if not text:
                continue
            self._first_skipped = self._first_skipped or repr(text[:80])
            self.skipped += 1
            self._skipped_bytes += len(text)
            if self._skipped_bytes > _SKIPPED_BYTES:
                raise StreamEnded(f"it writes too much else; {self.told_skipped}")

    def close(self) -> None:
        """Closes the program's standard input and output."""
        self._channel.close()

    def _until(self, end: bytes, most: int, deadline: float) -> bytes:
        """The bytes before ``end``, which is taken too."""
        searched = 0
        while (found := self._read.find(end, searched)) < 0:
            if len(self._read) > most:
                raise StreamEnded(f"it wrote more than {most} bytes without an end")
            searched = max(0, len(self._read) - len(end))
            self._more(deadline)
        taken = self._read[:found]
        self._read = self._read[found + len(end) :]
        return taken

    def _exactly(self, size: int, deadline: float) -> bytes:
        while len(self._read) < size:
            self._more(deadline)
        taken = self._read[:size]
        self._read = self._read[size:]
        return taken

    def _more(self, deadline: float) -> None:
        """Waits for further bytes."""
        left = _left(deadline)
        try:
            self._channel.settimeout(left)
            data = self._channel.recv(1 << 18)
        except TimeoutError as error:
            raise StreamEnded("it did not answer in time") from error
        except OSError as error:
            raise StreamEnded(ENDED) from error
        if not data:
            raise StreamEnded(ENDED)
        self._read += data


def _message(text: bytes) -> dict[str, Any] | None:
    """The message that a text is; None where it is none."""
    try:
        message = encodable_all(json.loads(text))
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise StreamEnded("it did not answer in time")
    return left


def _length(head: bytes) -> int:
    """The length that a message's headers give."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        text = value.strip()
        if name.strip().lower() == b"content-length" and text.isdigit() and len(text) < 12:
            size = int(text)
            if size <= MESSAGE_BYTES:
                return size
    raise StreamEnded(f"it wrote what is no head of a message: {head[:80]!r}")
