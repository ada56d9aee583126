"""The OpenAI-compatible endpoint: an HTTP server that hands requests to what answers them.

    GET  /v1/models
    POST /v1/chat/completions
    POST /v1/execute            a command in a client's workspace, for agents that run beside it

Who asks is told by the API key, or by the base URL ``/clients/<key>/v1``, for programs to which
only a URL can be given.
"""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections.abc import Callable
from typing import Any, Protocol

import uvicorn
from absl import logging
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rl_code.serving.answers import Answer, Pending, stream, whole_body
from rl_code.serving.chat_text import ChatText
from rl_code.serving.requests import MOST_BYTES, ApiError, read_request

# Seconds that the server takes to start and to end, at most.
_START_S = 60.0
_END_S = 10.0


class Client(Protocol):
    """What answers the requests that come with one key. Its methods may be called from any thread.

    The attribute ``text`` puts its conversations into words, ``model`` is the model's name.
    """

    text: ChatText
    model: str

    def ask(self, pending: Pending, id: str) -> None:
        """Takes a request; its answer, or its failure, comes through ``pending``. Returns at
        once. id: of the answer. Raises ApiError.
        """

    def execute(self, command: str, timeout_s: float | None) -> dict[str, Any]:
        """Runs a command in the client's workspace, and waits for it. Raises ApiError."""


class Endpoint:
    """The server, in a thread of its own. A context manager, which ends it.

    find: the client of a key; None for a key that is not known. host: the address that it listens
    on; port: 0 for any that is free.
    """

    def __init__(
        self,
        find: Callable[[str], Client | None],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
    ):
        self._find = find
        try:
            self._socket = socket.create_server((host, port))
        except OSError as error:
            raise OSError(f"no server can listen on {host}:{port}: {error}") from error
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        routes = []
        for prefix in ("/v1", "/clients/{key}/v1"):
            routes += [
                Route(f"{prefix}/models", self._models, methods=["GET"]),
                Route(f"{prefix}/chat/completions", self._chat, methods=["POST"]),
                Route(f"{prefix}/execute", self._execute, methods=["POST"]),
            ]
        handlers: dict[Any, Any] = {
            ApiError: _answer_error,
            404: _answer_status,
            405: _answer_status,
            Exception: _answer_bug,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off")
        self._server = uvicorn.Server(config)
        self._server.config.timeout_graceful_shutdown = 1
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
        self._started = threading.Event()
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
        self._socket.close()

    def url_of(self, key: str) -> str:
        """The base URL for the client of a key, without an API key."""
        return f"{self.url}/clients/{key}/v1"

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def _wait_started(self) -> None:
        """Connections are taken by the listening socket from the start; this waits for the loop."""
        for _ in range(int(_START_S / 0.01)):
            if self._server.started:
                return
            if not self._thread.is_alive():
                break
            self._started.wait(0.01)
        raise OSError(f"the server on {self.url} did not start within {_START_S:g} s")

    def _client(self, request: Request) -> Client:
        """Whom a request belongs to. Raises ApiError."""
        key = request.path_params.get("key")
        if key is None:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            key = key.strip() if scheme.lower() == "bearer" else ""
        client = self._find(key)
        if client is None:
            raise ApiError(
                "the API key is not known here, or what it belonged to is over",
                status=401,
                code="invalid_api_key",
            )
        return client

    async def _models(self, request: Request) -> Response:
        client = self._client(request)
        model = {"id": client.model, "object": "model", "created": 0, "owned_by": "rl_code"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        client = self._client(request)
        asked = read_request(await _body(request))
        if asked.model not in ("", client.model):
            raise ApiError(
                f"the model {asked.model!r} does not exist; there is {client.model!r}",
                status=404,
                code="model_not_found",
                param="model",
            )
        pending = Pending(asked)
        id = f"chatcmpl-{uuid.uuid4().hex}"
        client.ask(pending, id)
        if asked.stream:
            events = stream(pending, client.text, id, client.model)
            return StreamingResponse(events, media_type="text/event-stream")
        async for event in pending.events():
            if isinstance(event, Answer):
                return JSONResponse(whole_body(event, client.text, asked.logprobs))
        raise AssertionError("a request ends with an answer or an error")

    async def _execute(self, request: Request) -> Response:
        client = self._client(request)
        try:
            fields = json.loads(await _body(request))
            command, timeout_s = fields["command"], fields.get("timeout_s")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ApiError(f'the request must be {{"command": ...}}: {error!r}') from error
        if not isinstance(command, str) or type(timeout_s) not in (int, float, type(None)):
            raise ApiError("command must be a text, and timeout_s a number or null")
        done = await run_in_threadpool(client.execute, command, timeout_s)
        return JSONResponse(done)


async def _body(request: Request) -> bytes:
    """The body of a request. One that is too long is not read to its end."""
    parts = []
    length = 0
    try:
        async for part in request.stream():
            length += len(part)
            if length > MOST_BYTES:
                raise ApiError(
                    f"the request has more than {MOST_BYTES} bytes",
                    status=413,
                    code="request_too_large",
                )
            parts.append(part)
    except ClientDisconnect as error:
        raise ApiError("the client left") from error
    return b"".join(parts)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, status_code=error.status)


async def _answer_status(request: Request, error: Any) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(ApiError(message).body, status_code=error.status_code)


async def _answer_bug(request: Request, error: Exception) -> Response:
    logging.error("%s %s", request.method, request.url.path, exc_info=error)
    failed = ApiError(f"the server failed: {type(error).__name__}", kind="server_error")
    return JSONResponse(failed.body, status_code=500)
