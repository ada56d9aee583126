"""Connections: what clients send slowly or never, and what is sent to them."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rl_code.harness.endpoint.fields import MOST_BYTES, ApiError, too_large

# Seconds that the head and the body of a request may take.
HEAD_S = 20.0
BODY_S = 60.0
# Seconds after which a connection is closed whose request is not whole then, so that the client can
# be told first why.
GRACE_S = 2.0
# The longest head, in bytes.
_MOST_HEAD = 1 << 16
# The most bytes of bodies that are read at once: all together, and of one key. A key of which
# little is read now is not refused, so that those who send much do not make the others wait.
_MOST_READ = 8 * MOST_BYTES
_MOST_OF_KEY = 2 * MOST_BYTES
_LITTLE = 1 << 16


class Connection(HttpToolsProtocol):
    """A connection that is closed when the head of a request does not come whole in time, be it the
    first one or a later one, and refused when it is too long. It is closed as well when a body does
    not come whole in time, also one that no route reads. What is sent within one turn of the event
    loop goes out as one.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _body_timer: asyncio.TimerHandle | None = None
    # True if a head has begun and not ended, and the number of its bytes that have come.
    _in_head = True
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Joining(transport, self.loop))
        self._head_timer = self.loop.call_later(HEAD_S, transport.close)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._wait_for_body()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_body_timer()
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head:
            self._stop_timer()
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self.transport.close)
        if self._head_bytes > _MOST_HEAD and not self.transport.is_closing():
            self.send_400_response(f"The head of a request has at most {_MOST_HEAD} bytes.")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_body_timer()
        super().connection_lost(exc)

    def _wait_for_body(self) -> None:
        self._stop_body_timer()
        self._body_timer = self.loop.call_later(BODY_S + GRACE_S, self._close_unless_queued)

    def _close_unless_queued(self) -> None:
        # Nothing is read of a request that waits for the answer to the one before it.
        if self.pipeline:
            self._wait_for_body()
        else:
            self.transport.close()

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Joining:
    """A transport that joins what is written within one turn of the event loop. Each write wakes
    the client, which costs more than making what is sent: a head, a chunk and the chunk that ends
    the answer come one by one.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop):
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))


class Bodies:
    """An application whose routes get bodies of requests in time, or not at all: an ASGI wrapper
    that limits the seconds and the bytes of each body, and the bytes that are being read of those
    with one key and of all.

    It stands in front of every route, so that none can forget it. For one event loop.
    """

    def __init__(self, app: ASGIApp):
        self._app = app
        self._read = 0
        # The same by key; keys of which nothing is being read are left out.
        self._read_of: dict[str, int] = {}

    @property
    def being_read(self) -> int:
        """Bytes of bodies that have begun and are not whole yet."""
        return self._read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + BODY_S
        length = 0
        whole = False
        key = key_of(scope)

        async def limited() -> Message:
            """The next part of the body. Raises ApiError where it has too many bytes or does not
            come in time, and where there is no room now; nothing more is read then.
            """
            nonlocal length, whole
            if whole:  # what is waited for from now on is that the client leaves
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                why = f"the request did not come whole within {BODY_S:g} s"
                raise ApiError(why, status=408, code="request_timeout") from None
            count = len(message.get("body", b""))
            length += count
            self._count(key, count)
            if length > MOST_BYTES:
                raise too_large()
            of_key = self._read_of.get(key, 0)
            if of_key > _MOST_OF_KEY or (self._read > _MOST_READ and of_key > _LITTLE):
                raise ApiError(
                    "many long requests come at once; ask again later",
                    status=429,
                    kind="rate_limit_error",
                    code="server_busy",
                    retry_after_s=1.0,
                )
            if not message.get("more_body", False):
                whole = True
                self._count(key, -length)
                length = 0
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._count(key, -length)

    def _count(self, key: str, change: int) -> None:
        self._read += change
        left = self._read_of.get(key, 0) + change
        if left:
            self._read_of[key] = left
        else:
            self._read_of.pop(key, None)


def key_of(scope: Scope) -> str:
    """The key that a request comes with, be it known or not; "" for none.

    It is that of the path where the path has one, else the bearer's, however its header is written,
    and else that of the header x-api-key, as Anthropic's clients send it. So nobody has several
    shares with one key.
    """
    path = scope["path"]
    if path.startswith("/clients/"):
        return path.split("/")[2]
    headers = Headers(scope=scope)
    return bearer_key(headers.get("authorization", "")) or headers.get("x-api-key", "").strip()


def bearer_key(authorization: str) -> str | None:
    """API key in the value of a header ``Authorization``; None where it holds none."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None
