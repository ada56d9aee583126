"""HTTP routes for what people did: events are reported, and a person's data is deleted.

    POST   /v1/feedback     {"events": [{"key", "answer", "kind", "at", "value", ...}]}
    DELETE /v1/users/me     removes everything of the person whose API key it is
    DELETE /v1/users/USER   removes everything of a user, for an admin's key: that of a person whose
                            own key is withdrawn. USER is as records name it

A reply with status 200 means that it is on the disk. After any other one, or none, the client sends
the same events with the same keys again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

from absl import logging
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from people.feedback.checks import check_event
from people.feedback.records import Event
from people.feedback.store import FeedbackStore
from rl_code.harness.endpoint.connections import bearer_key

# Most bytes and most events of a request.
MOST_BYTES = 1 << 20
MOST_EVENTS = 1_000
# The most bytes of requests that wait for the database at once; while it does not answer they would
# pile up. What is made of a request takes several times its bytes.
MOST_WAITING = 16 << 20
# Seconds after which a client asks again when the database does not answer.
_RETRY_S = 2
# Keys of an event, and which of them must be there.
_KEYS = tuple(field.name for field in dataclasses.fields(Event))
_NEEDED = ("key", "answer", "kind", "at")


class _Refused(Exception):
    """A request that is answered with an error in the shape of OpenAI's API."""

    def __init__(
        self, status: int, message: str, code: str | None = None, retry_s: float | None = None
    ):
        """retry_s: seconds after which the same request may succeed."""
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
        self.headers = {} if retry_s is None else {"Retry-After": str(max(1, math.ceil(retry_s)))}


def routes(
    store: FeedbackStore,
    find_user: Callable[[str], str | None],
    *,
    take_events: Callable[[str, int], float] = lambda api_key, count: 0.0,
    is_admin: Callable[[str], bool] = lambda api_key: False,
    forget: Callable[[str], None] = lambda user: None,
) -> list[Route]:
    """Routes for a Starlette application.

    find_user: the user (``identity.user_key``) of an API key; None for a key that is not known.
    take_events: takes so many events from what an API key may send (``serving.access``); 0, or the
    seconds until there are so many, and then none are taken. is_admin: whether an API key may
    delete what belongs to others. forget: forgets what a server keeps of a user in its memory.
    """
    waiting = 0  # bytes of requests that wait for the database

    async def feedback(request: Request) -> Response:
        nonlocal waiting
        api_key, user = _user(request, find_user)
        body = await _body(request)
        length = len(body)
        if waiting + length > MOST_WAITING:
            message = "many events wait to be recorded; send the same again soon"
            raise _Refused(503, message, "unavailable", _RETRY_S)
        waiting += length
        try:
            events = read_events(body)
            if again_s := take_events(api_key, len(events)):
                message = "this key has sent as many events as it may; send the same again later"
                raise _Refused(429, message, "rate_limit_exceeded", again_s)
            results = await asyncio.wrap_future(store.submit_events(events, user))
        finally:
            waiting -= length
        return JSONResponse({"results": [dataclasses.asdict(result) for result in results]})

    async def delete(user: str) -> Response:
        forget(user)
        deleted = await run_in_threadpool(store.delete_user, user)
        return JSONResponse({"deleted": dataclasses.asdict(deleted)})

    async def delete_own(request: Request) -> Response:
        api_key, user = _user(request, find_user)
        if not api_key:
            # all who send no key are one user, and none of them may delete what others did
            message = "without an API key nobody can tell which data is yours"
            raise _Refused(403, message, "no_api_key")
        return await delete(user)

    async def delete_other(request: Request) -> Response:
        api_key, _ = _user(request, find_user)
        if not is_admin(api_key):
            raise _Refused(403, "only the key of an admin deletes others' data", "not_an_admin")
        return await delete(request.path_params["user"])

    return [
        Route("/v1/feedback", _answering_errors(feedback), methods=["POST"]),
        Route("/v1/users/me", _answering_errors(delete_own), methods=["DELETE"]),
        Route("/v1/users/{user}", _answering_errors(delete_other), methods=["DELETE"]),
    ]


def read_events(body: bytes) -> list[Event]:
    """The events of a request. Raises an error that says which one is wrong, and how."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _Refused(400, f"the request is no JSON: {error}", "invalid_json") from error
    if not isinstance(asked, dict) or set(asked) != {"events"}:
        raise _Refused(400, 'the request must be {"events": [...]} and nothing else')
    sent = asked["events"]
    if not isinstance(sent, list) or not 1 <= len(sent) <= MOST_EVENTS:
        raise _Refused(400, f"events must be a list of 1 to {MOST_EVENTS}")
    events = []
    for number, fields in enumerate(sent):
        try:
            events.append(_read_event(fields))
        except ValueError as error:
            raise _Refused(400, f"events[{number}]: {error}", "invalid_event") from error
    return events


def _read_event(fields: Any) -> Event:
    """Raises ValueError."""
    if not isinstance(fields, dict):
        raise ValueError("expected an object")
    if unknown := sorted(set(fields) - set(_KEYS)):
        raise ValueError(f"no such key: {unknown[0]!r}; there are {', '.join(_KEYS)}")
    if missing := [key for key in _NEEDED if key not in fields]:
        raise ValueError(f"{missing[0]!r} is missing")
    if fields.get("extra") is None:
        fields = {**fields, "extra": {}}
    event = Event(**fields)
    if not isinstance(event.kind, str):
        raise ValueError(f"kind={event.kind!r}: expected a text")
    check_event(event)
    numbers = {
        name: None if getattr(event, name) is None else float(getattr(event, name))
        for name in ("at", "value", "horizon_s")
    }
    return dataclasses.replace(event, **numbers)


def _user(request: Request, find_user: Callable[[str], str | None]) -> tuple[str, str]:
    """The API key of a request, and whose it is."""
    key = bearer_key(request.headers.get("authorization", ""))
    user = None if key is None else find_user(key)
    if key is None or user is None:
        raise _Refused(
            401, "send a known API key as the header Authorization: Bearer KEY", "invalid_api_key"
        )
    return key, user


async def _body(request: Request) -> bytes:
    """The body of a request. One that is too long is not read to its end."""
    parts = []
    length = 0
    try:
        async for part in request.stream():
            length += len(part)
            if length > MOST_BYTES:
                message = f"the request has more than {MOST_BYTES} bytes; send fewer events at once"
                raise _Refused(413, message, "request_too_large")
            parts.append(part)
    except ClientDisconnect as error:
        raise _Refused(400, "the client left") from error
    return b"".join(parts)


def _answering_errors(handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """A handler whose errors are answers; the server goes on after each."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except _Refused as error:
            return JSONResponse(error.body, error.status, error.headers)
        except (OperationalError, PoolTimeout) as error:
            logging.error("the database of feedback does not answer: %s", error)
            message = "nothing was recorded; send the same again soon"
            later = _Refused(503, message, "unavailable", _RETRY_S)
            return JSONResponse(later.body, later.status, later.headers)

    return answer
