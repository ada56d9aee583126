"""An HTTP client of the served model: asks for suggestions, reports what became of them.

It uses the public API alone: ``POST /v1/completions`` with ``suffix``, ``POST
/v1/chat/completions`` with tools of the client, ``GET /v1/models``, and ``POST /v1/feedback``.
Editors (``people.editor``) and simulated programmers use the same one.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import math
import random
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from people.feedback.records import EVENTS, Event

# Seconds between two tries: doubled each time, up to the longest, with jitter so that clients that
# failed together do not come back together.
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 5.0
_AGAIN = (408, 425, 429, 500, 502, 503, 504)


class ServerRefused(Exception):
    """An answer that asking again would not change, or no answer in time."""


class NoAnswer(ServerRefused):
    """No answer in time; asking again later may come to one."""


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """One suggestion of the server."""

    # Id of the answer, which its events name; made by the server.
    id: str
    text: str
    finish_reason: str
    # Log-probability of each token; empty if the server sent none.
    logprobs: tuple[float, ...]
    # Seconds from the request to the whole answer.
    seconds: float

    @property
    def confidence(self) -> float | None:
        """Geometric mean of the chances of the tokens."""
        if not self.logprobs:
            return None
        return math.exp(min(0.0, sum(self.logprobs) / len(self.logprobs)))


@dataclasses.dataclass(frozen=True)
class Said:
    """One message of an agent."""

    # Id of the answer, which its events name; made by the server.
    id: str
    # The message as the API writes it, to be sent back with the next request.
    message: Mapping[str, Any]
    # Name and arguments of its calls, in order.
    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    # Seconds from the request to the whole answer.
    seconds: float
    # Number of tokens by the server's count; 0 where it does not say.
    tokens: int = 0

    @property
    def text(self) -> str:
        """Text that the person gets to read."""
        return self.message.get("content") or ""


class Client:
    """One person's connection, for one thread at a time. It keeps one connection open, and opens
    another when that is lost.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        session: str = "",
        timeout_s: float = 60.0,
        patience_s: float = 300.0,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """url: such as http://127.0.0.1:8000/v1. key: the person's API key. session: what its
        answers belong to; "" for the server's default. timeout_s: of one try. patience_s: how long
        one call is tried again before NoAnswer. Raises ValueError for a wrong url.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={url!r} must be like http://127.0.0.1:8000/v1")
        self._make = (
            http.client.HTTPConnection if parts.scheme == "http" else http.client.HTTPSConnection
        )
        self._address = (parts.hostname, parts.port)
        self._path = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        if session:
            self._headers["X-Session"] = session
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._sleep = sleep
        self._connection: http.client.HTTPConnection | None = None

    def suggest(
        self, prefix: str, suffix: str, model: str = "auto", *, session: str = "", **fields: Any
    ) -> Suggestion:
        """Ask the server for the text between two texts. session: the session that the answer
        belongs to; "" for the one of all answers of this client. fields: other fields of the
        request, such as max_tokens.

        Raises ServerRefused.
        """
        body = {"model": model, "prompt": prefix, "suffix": suffix, "logprobs": 1, **fields}
        start = time.monotonic()
        answer = self._call("/completions", body, {"X-Session": session} if session else {})
        try:
            choice = answer["choices"][0]
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
            return Suggestion(
                id=answer["id"],
                text=choice["text"],
                finish_reason=choice["finish_reason"],
                logprobs=tuple(float(x) for x in logprobs if x is not None),
                seconds=time.monotonic() - start,
            )
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerRefused(f"no answer of completions: {error!r}: {answer!r:.200}") from error

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        model: str = "auto",
        **fields: Any,
    ) -> Said:
        """Ask the agent for its next message in a conversation. tools: schemas of functions, which
        the client carries out. fields: other fields of the request, such as max_tokens.

        Raises ServerRefused.
        """
        body = {"model": model, "messages": list(messages), **fields}
        if tools:
            body["tools"] = [{"type": "function", "function": schema} for schema in tools]
        start = time.monotonic()
        answer = self._call("/chat/completions", body)
        try:
            message = answer["choices"][0]["message"]
            called = [one["function"] for one in message.get("tool_calls") or ()]
            return Said(
                id=answer["id"],
                message=message,
                calls=tuple((one["name"], json.loads(one["arguments"])) for one in called),
                seconds=time.monotonic() - start,
                tokens=int((answer.get("usage") or {}).get("completion_tokens", 0)),
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ServerRefused(f"no answer of a chat: {error!r}: {answer!r:.200}") from error

    def models(self) -> list[str]:
        """Names of the models that may be asked for. Raises ServerRefused."""
        answer = self._call("/models", None)
        try:
            return [one["id"] for one in answer["data"]]
        except (KeyError, TypeError) as error:
            raise ServerRefused(f"no list of models: {answer!r:.200}") from error

    def report(self, events: Sequence[Event]) -> dict[str, str]:
        """Reports events until the server has made each durable, or refuses it. It sends the same
        events with the same keys each time, so that one that arrived twice counts once.

        An event whose answer the server does not know yet ("waiting") is durable there, too.
        Returns key -> why, of those that it refused. Raises ServerRefused, ValueError for a kind
        that is not in EVENTS.
        """
        for event in events:
            if event.kind not in EVENTS:
                raise ValueError(
                    f"event {event.key}: kind={event.kind!r} is none of {list(EVENTS)}"
                )
        left = {event.key: dataclasses.asdict(event) for event in events}
        refused: dict[str, str] = {}
        deadline = time.monotonic() + self._patience_s
        wait_s = _FIRST_WAIT_S
        while left:
            answer = self._call("/feedback", {"events": list(left.values())})
            try:
                for result in answer["results"]:
                    if result["status"] == "refused":
                        refused[result["key"]] = result.get("why", "")
                    if result["status"] in ("recorded", "repeated", "waiting", "refused"):
                        left.pop(result["key"], None)
            except (KeyError, TypeError, AttributeError) as error:
                raise ServerRefused(f"no answer of feedback: {answer!r:.200}") from error
            if left:
                wait_s = self._wait(wait_s, deadline, f"{len(left)} events not acknowledged", None)
        return refused

    def close(self) -> None:
        """Closes the connection; the next call opens another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _call(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Any:
        """The JSON of an answer of status 200, tried until there is one. body: None to GET it."""
        data = None if body is None else json.dumps(body).encode()
        deadline = time.monotonic() + self._patience_s
        wait_s = _FIRST_WAIT_S
        while True:
            after: str | None = None
            try:
                status, after, content = self._once(path, data, headers)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                why = f"{type(error).__name__}: {error}"
            else:
                if status == 200:
                    try:
                        return json.loads(content)
                    except ValueError as error:
                        raise ServerRefused(f"{path}: no JSON: {content[:200]!r}") from error
                why = f"status {status}: {content[:300].decode(errors='replace')}"
                if status not in _AGAIN:
                    raise ServerRefused(f"{path}: {why}")
            wait_s = self._wait(wait_s, deadline, f"{path}: {why}", after)

    def _once(
        self, path: str, data: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, str | None, bytes]:
        if self._connection is None:
            self._connection = self._make(*self._address, timeout=self._timeout_s)
        method = "GET" if data is None else "POST"
        self._connection.request(method, self._path + path, data, {**self._headers, **headers})
        response = self._connection.getresponse()
        return response.status, response.getheader("Retry-After"), response.read()

    def _wait(self, wait_s: float, deadline: float, why: str, after: str | None) -> float:
        """Waits before another try; the next wait. after: what the header Retry-After says."""
        if time.monotonic() + wait_s > deadline:
            raise NoAnswer(f"gave up after {self._patience_s:g} s: {why}")
        told = float(after) if after and after.replace(".", "", 1).isdigit() else 0.0
        # an unlucky or wrong header must not keep a client away for hours
        self._sleep(max(min(told, 10 * _LONGEST_WAIT_S), wait_s * random.uniform(0.5, 1.0)))
        return min(2 * wait_s, _LONGEST_WAIT_S)
