"""The endpoint: an HTTP server that hands requests to what answers them, in OpenAI's forms and in
Anthropic's.

    GET  /v1/models, /v1/models/<name>
    POST /v1/chat/completions
    POST /v1/responses
    POST /v1/messages, /v1/messages/count_tokens
    POST /v1/completions        with "suffix" for what stands between two texts
    POST /v1/execute            a command in a client's workspace, for agents that run beside it

Who asks is told by the API key, or by the base URL ``/clients/<key>/v1``, for programs to which
only a URL can be given. The header X-Session tells sessions of one key apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import uvicorn
from absl import logging
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from models.marks import encodable_all
from rl_code.harness.endpoint import fields, requests
from rl_code.harness.endpoint.answers import Accepted, Mailbox, Pending
from rl_code.harness.endpoint.bodies import stream, whole_body
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.harness.endpoint.completions import read_completion
from rl_code.harness.endpoint.connections import Bodies, Connection, key_of
from rl_code.harness.endpoint.fields import ApiError, show
from rl_code.harness.endpoint.messages import error_body, read_messages
from rl_code.harness.endpoint.messages_bodies import stream_message, whole_message
from rl_code.harness.endpoint.responses import read_responses
from rl_code.harness.endpoint.responses_bodies import stream_response, whole_response

# Writers of whole answers and of streams, by the API that was asked.
FORMS = {
    "chat": (whole_body, stream),
    "responses": (whole_response, stream_response),
    "messages": (whole_message, stream_message),
}
# Seconds that the server takes to start and to end, at most.
_START_S = 60.0
_END_S = 10.0
# Connections, above which requests are refused with 503.
_CONNECTIONS = 4096
# Threads in which requests are read and tokenised, and the bytes of one that is read at once
# instead: handing it to a thread takes longer.
_READERS = 4
_SMALL = 4096
# The longest name of a session.
_SESSION_NAME = 200


class Client(Protocol):
    """The side that answers the requests with one key. Its methods may be called from any thread.

    The attribute ``text`` puts its conversations into words.
    """

    text: ChatText

    def models(self) -> Sequence[str]:
        """The names of the models that it may ask."""
        ...

    def ask(self, pending: Pending, session: str) -> Accepted:
        """Takes a request; its answers, or its failure, come through ``pending``. It may take the
        time to tokenise the request, not that to answer it. Raises ApiError.

        session: the name that the request gives it; "" for none.
        """
        ...

    def execute(self, command: str, timeout_s: float | None) -> dict[str, Any]:
        """Runs a command in the client's workspace, and waits for it. Raises ApiError."""
        ...


class Endpoint:
    """The server, in a thread of its own. A context manager, which ends it.

    find: the client of a key; None for a key that is not known. host: the address that it listens
    on; port: 0 for any that is free. routes: what else it serves. on_error: called with the status
    of each error that it answers with.
    """

    def __init__(
        self,
        find: Callable[[str], Client | None],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        routes: Sequence[BaseRoute] = (),
        on_error: Callable[[int], None] = lambda status: None,
    ):
        self._find = find
        self._on_error = on_error
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="reader")
        try:
            self._socket = socket.create_server((host, port))
        except OSError as error:
            raise OSError(f"no server can listen on {host}:{port}: {error}") from error
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        own: list[BaseRoute] = list(routes)
        for prefix in ("/v1", "/clients/{key}/v1"):
            own += [
                Route(f"{prefix}/models", self._models, methods=["GET"]),
                Route(f"{prefix}/models/{{name}}", self._models, methods=["GET"]),
                Route(f"{prefix}/chat/completions", self._chat, methods=["POST"]),
                Route(f"{prefix}/completions", self._complete, methods=["POST"]),
                Route(f"{prefix}/responses", self._respond, methods=["POST"]),
                Route(f"{prefix}/messages", self._message, methods=["POST"]),
                Route(f"{prefix}/messages/count_tokens", self._count, methods=["POST"]),
                Route(f"{prefix}/execute", self._execute, methods=["POST"]),
            ]
        handlers: dict[Any, Any] = {
            ApiError: self._answer_error,
            ClientDisconnect: self._answer_left,
            404: self._answer_status,
            405: self._answer_status,
            Exception: self._answer_bug,
        }
        app = Starlette(routes=own, exception_handlers=handlers)
        self.bodies = Bodies(app)
        config = uvicorn.Config(
            self.bodies,
            http=Connection,
            loop="uvloop",
            ws="none",
            log_level="error",
            access_log=False,
            lifespan="off",
            proxy_headers=False,  # nothing here asks where a client is
            limit_concurrency=_CONNECTIONS,
        )
        self._server = uvicorn.Server(config)
        self._server.config.timeout_graceful_shutdown = 1
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="endpoint", daemon=True
        )
        self._thread.start()
        self._wait_started()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server. Requests that wait for an answer are cut off."""
        self._server.should_exit = True
        self._thread.join(_END_S)
        self._readers.shutdown(wait=False)
        self._socket.close()

    def url_of(self, key: str) -> str:
        """The base URL for the client of a key, without an API key."""
        return f"{self.url}/clients/{key}/v1"

    def _wait_started(self) -> None:
        """Connections are taken by the listening socket from the start; this waits for the loop."""
        for _ in range(int(_START_S / 0.01)):
            if self._server.started:
                return
            if not self._thread.is_alive():
                break
            self._thread.join(0.01)
        raise OSError(f"the server on {self.url} did not start within {_START_S:g} s")

    def _client(self, request: Request) -> Client:
        """Whom a request belongs to. Raises ApiError."""
        client = self._find(key_of(request.scope))
        if client is None:
            raise ApiError(
                "the API key is not known here, or what it belonged to is over",
                status=401,
                code="invalid_api_key",
            )
        return client

    async def _models(self, request: Request) -> Response:
        names = self._client(request).models()
        listed = [
            {"id": name, "object": "model", "created": 0, "owned_by": "rl_code"} for name in names
        ]
        asked = request.path_params.get("name")
        if asked is None:
            return JSONResponse({"object": "list", "data": listed})
        if asked not in names:
            raise fields.unknown_model(asked, names)
        return JSONResponse(listed[names.index(asked)])

    async def _chat(self, request: Request) -> Response:
        return await self._ask(request, requests.read_request)

    async def _complete(self, request: Request) -> Response:
        return await self._ask(request, read_completion)

    async def _respond(self, request: Request) -> Response:
        return await self._ask(request, read_responses)

    async def _message(self, request: Request) -> Response:
        return await self._ask(request, read_messages)

    async def _count(self, request: Request) -> Response:
        text = self._client(request).text
        body = await request.body()

        def count() -> int:
            asked = read_messages(body, counts=True)
            return len(text.begin(asked.messages, asked.tools).tokens)

        loop = asyncio.get_running_loop()
        return JSONResponse({"input_tokens": await loop.run_in_executor(self._readers, count)})

    async def _ask(self, request: Request, read: Callable[[bytes], fields.Request]) -> Response:
        client = self._client(request)
        session = request.headers.get("x-session", "")
        if len(session) > _SESSION_NAME or not session.isprintable():
            why = f"X-Session must be at most {_SESSION_NAME} printable characters"
            raise ApiError(why, code="invalid_value", param="X-Session")
        mailbox = self._mailbox

        def take(body: bytes) -> tuple[Pending, Accepted]:
            pending = Pending(read(body), mailbox)
            return pending, client.ask(pending, session)

        body = await request.body()
        if len(body) <= _SMALL:
            pending, accepted = take(body)
        else:  # ``execute``, which may take long, has other threads
            loop = asyncio.get_running_loop()
            pending, accepted = await loop.run_in_executor(self._readers, take, body)
        del body  # which may be long, and the answer may take long
        mailbox.read()  # a request that was refused at once has failed already
        try:
            pending.check()
            write, write_stream = FORMS[pending.request.form]
            hints = pending.request.unheeded
            headers = {"X-Unheeded": ", ".join(hints)} if hints else {}
            if pending.request.stream:
                events = write_stream(pending, client.text, accepted)
                return _Stream(events, pending, accepted.leave, headers, self._on_error)
            async with _watching(request.receive, pending):
                whole = await write(pending, client.text, accepted)
                return JSONResponse(whole, headers=headers)
        except BaseException:  # a client that left cancels this: no Exception
            accepted.leave()
            raise

    @functools.cached_property
    def _mailbox(self) -> Mailbox:
        return Mailbox()  # must be made in the event loop

    async def _execute(self, request: Request) -> Response:
        client = self._client(request)
        try:
            given = encodable_all(json.loads(await request.body()))
            command, timeout_s = given["command"], given.get("timeout_s")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ApiError(f'the request must be {{"command": ...}}: {error!r}') from error
        if not isinstance(command, str) or type(timeout_s) not in (int, float, type(None)):
            raise ApiError("command must be a text, and timeout_s a number or null")
        done = await run_in_threadpool(client.execute, command, timeout_s)
        return JSONResponse(done)

    async def _answer_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self._on_error(error.status)
        body = error_of(request.scope, error)
        return JSONResponse(body, status_code=error.status, headers=error.headers)

    async def _answer_left(self, request: Request, error: Exception) -> Response:
        return await self._answer_error(request, ApiError("the client left"))

    async def _answer_status(self, request: Request, error: Any) -> Response:
        self._on_error(error.status_code)
        message = f"{request.method} {show(request.url.path)}: {error.detail}"
        body = error_of(request.scope, ApiError(message, status=error.status_code))
        return JSONResponse(body, status_code=error.status_code)

    async def _answer_bug(self, request: Request, error: Exception) -> Response:
        self._on_error(500)
        logging.error("%s %s", request.method, request.url.path, exc_info=error)
        why = f"the server failed: {type(error).__name__}"
        failed = ApiError(why, status=500, kind="server_error")
        return JSONResponse(error_of(request.scope, failed), status_code=500)


def error_of(scope: Scope, error: ApiError) -> dict[str, Any]:
    """An error in the form of the API whose path was asked."""
    if "/v1/messages" in scope["path"]:
        return error_body(error)
    return error.body


class _Stream(StreamingResponse):
    """Server-sent events; says when the client has them all, or has left. Its head goes out with
    the first of them.
    """

    def __init__(
        self,
        events: AsyncIterator[str],
        pending: Pending,
        leave: Callable[[], None],
        headers: Mapping[str, str],
        on_error: Callable[[int], None],
    ):
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._pending, self._leave, self._on_error = pending, leave, on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with _watching(receive, self._pending):
                await self.stream_response(send)
        except ApiError as error:  # nothing was sent yet
            self._on_error(error.status)
            body = error_of(scope, error)
            refusal = JSONResponse(body, status_code=error.status, headers=error.headers)
            await refusal(scope, receive, send)
        finally:
            self._leave()

    async def stream_response(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        started = False
        async for text in self.body_iterator:
            if not started:
                await send({"type": "http.response.start", **head})
                started = True
            part = {"body": text.encode(), "more_body": True}
            await send({"type": "http.response.body", **part})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.asynccontextmanager
async def _watching(receive: Receive, pending: Pending) -> AsyncIterator[None]:
    """Has a request fail when its client closes the connection meanwhile."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        pending.fail(ApiError("the client left", status=499))

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
