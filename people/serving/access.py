"""API keys, and the limits on how much each key may ask.

Keys stand in a TOML file as SHA-256 of the key, which cannot be turned back since a key is random:

    [[keys]]
    sha256 = "..."            # printf %s "$KEY" | sha256sum
    requests_per_minute = 60
    tokens_per_minute = 100000
    concurrent = 8
    organisation = "acme"     # whom the key was issued to, with others perhaps
    events_per_minute = 600

A limit that is left out does not apply. With ``admin = true`` a key may delete the data of others
(``feedback.http``) and read the page of the cycle (``realtime.dashboard``). The file is read again
whenever it changes, so that a key can be added or withdrawn while the server runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from absl import logging
from starlette.routing import Route

from people.feedback import http
from people.feedback.store import FeedbackStore
from people.serving.fleet import Fleet
from people.serving.running import Running
from rl_code.config.read_config import ConfigError, build
from rl_code.harness.endpoint.answers import Accepted, Pending
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.harness.endpoint.fields import ApiError

# Seconds after which it is looked whether the file has changed, at the earliest.
_LOOK_S = 1.0
_MINUTE_S = 60.0


@dataclasses.dataclass(frozen=True)
class Key:
    """A key and its limits; None for none."""

    sha256: str
    requests_per_minute: float | None = None
    # Those that are read and those that are sampled.
    tokens_per_minute: float | None = None
    # Requests that wait or are answered at once.
    concurrent: int | None = None
    # Whom the key was issued to: all keys of one together have a bounded influence on what is
    # learned (``feedback.poisoning``). "" for a key that stands alone.
    organisation: str = ""
    # Events of feedback.
    events_per_minute: float | None = None
    # True if the key may see and delete data of others.
    admin: bool = False

    def __post_init__(self):
        digits = set(self.sha256) - set("0123456789abcdef")
        if len(self.sha256) != 64 or digits:
            raise ValueError(f"sha256={self.sha256!r} must be 64 hex digits in small letters")
        for name in (
            "requests_per_minute",
            "tokens_per_minute",
            "concurrent",
            "events_per_minute",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be positive")


class Budget:
    """Something that refills evenly, up to what a minute gives (a token bucket)."""

    def __init__(self, per_minute: float, clock: Callable[[], float]):
        self._per_minute, self._clock = per_minute, clock
        self._left = per_minute
        self._at = clock()

    def wait_s(self, amount: float) -> float:
        """Seconds until there is as much as this, or all that there ever is."""
        now = self._clock()
        gained = (now - self._at) * self._per_minute / _MINUTE_S
        self._left = min(self._per_minute, self._left + gained)
        self._at = now
        lacks = min(amount, self._per_minute) - self._left
        return max(0.0, lacks * _MINUTE_S / self._per_minute)

    def take(self, amount: float) -> None:
        """Takes so much; what is not there is owed."""
        self._left -= amount


class Limiter:
    """The part of a key's limits that is still left."""

    def __init__(self, key: Key, clock: Callable[[], float] = time.monotonic):
        self.key = key
        self._lock = threading.Lock()
        self._running = 0
        requests, tokens = key.requests_per_minute, key.tokens_per_minute
        self._requests = None if requests is None else Budget(requests, clock)
        self._tokens = None if tokens is None else Budget(tokens, clock)
        events = key.events_per_minute
        self._events = None if events is None else Budget(events, clock)

    def enter(self, choices: int) -> None:
        """A request for so many answers begins. Raises ApiError where a limit does not allow it.

        What a request takes of the tokens is known when it ends. So one is let in while any are
        left, and the next one waits until what was taken too much has come back.
        """
        with self._lock:
            most = self.key.concurrent
            if most is not None and self._running >= most:
                raise _limited(f"{self._running} requests of this key are answered now", 1.0)
            if self._tokens is not None and (wait_s := self._tokens.wait_s(1)):
                limit = f"this key has {self.key.tokens_per_minute:g} tokens per minute"
                raise _limited(limit, wait_s)
            if self._requests is not None:
                if wait_s := self._requests.wait_s(choices):
                    limit = f"this key has {self.key.requests_per_minute:g} answers per minute"
                    raise _limited(limit, wait_s)
                self._requests.take(choices)
            self._running += 1

    def leave(self, tokens: int) -> None:
        """A request has ended, which read and sampled so many tokens."""
        with self._lock:
            self._running -= 1
            if self._tokens is not None:
                self._tokens.take(tokens)

    def take_events(self, count: int) -> float:
        """Takes so many events, and returns 0; or the seconds until there are so many, or all that
        there ever are, and takes none.
        """
        if self._events is None:
            return 0.0
        with self._lock:
            wait_s = self._events.wait_s(count)
            if not wait_s:
                self._events.take(count)
            return wait_s


class KeyFile:
    """The keys of a file, by their hashes. Raises ConfigError for a file that is wrong."""

    def __init__(self, path: str | os.PathLike, clock: Callable[[], float] = time.monotonic):
        self._path = Path(path)
        self._clock = clock
        self._lock = threading.Lock()
        self._looked = clock()
        self._limiters: dict[str, Limiter] = {}
        self._stamp = self._stamped()
        self._read()

    def find(self, api_key: str) -> Limiter | None:
        """The limits of a key; None for one that is not there."""
        with self._lock:
            if self._clock() - self._looked >= _LOOK_S:
                self._looked = self._clock()
                self._read_again()
            # Equal hashes are found by the hash of the hash, whose time tells nothing of the key.
            return self._limiters.get(
                hashlib.sha256(api_key.encode("utf-8", "replace")).hexdigest()
            )

    def is_admin(self, api_key: str) -> bool:
        """True if the file has this key and lets it see and delete data of others."""
        limiter = self.find(api_key)
        return limiter is not None and limiter.key.admin

    def _stamped(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat()
        except OSError as error:
            raise ConfigError(f"{self._path}: {error}") from error
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read_again(self) -> None:
        """Reads the file if it has changed. One that is wrong leaves the keys as they are."""
        try:
            stamp = self._stamped()
            if stamp != self._stamp:
                self._stamp = stamp
                self._read()
        except ConfigError as error:
            logging.error("the keys stay as they are: %s", error)

    def _read(self) -> None:
        try:
            fields = tomllib.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._path}: {error}") from error
        listed: Any = fields.get("keys", [])
        if fields.keys() - {"keys"} or not isinstance(listed, list):
            raise ConfigError(f"{self._path}: there must be [[keys]] and nothing else")
        keys: dict[str, Key] = {}
        for number, each in enumerate(listed):
            path = f"{self._path}: keys[{number}]"
            if not isinstance(each, Mapping):
                raise ConfigError(f"{path} must be a table")
            key = build(Key, each, path)
            if key.sha256 in keys:
                raise ConfigError(f"{path}: sha256={key.sha256!r} stands there twice")
            keys[key.sha256] = key
        # A key whose limits did not change keeps what it has left of them.
        before = self._limiters
        self._limiters = {
            hash: before[hash]
            if hash in before and before[hash].key == key
            else Limiter(key, self._clock)
            for hash, key in keys.items()
        }


class Access:
    """Lets the holders of keys ask a fleet.

    keys: None where everybody may ask, without limits.
    """

    def __init__(self, fleet: Fleet, keys: KeyFile | None = None):
        self._fleet, self._keys = fleet, keys

    def find(self, api_key: str) -> FleetClient | None:
        """The client of an API key; None for one that is not known."""
        limiter = None
        if self._keys is not None:
            limiter = self._keys.find(api_key)
            if limiter is None:
                return None
        return FleetClient(self._fleet, api_key, limiter)

    def feedback_routes(self, store: FeedbackStore) -> list[Route]:
        """Routes by which the holders of keys report what became of answers, and delete."""
        return http.routes(
            store,
            self.find_user,
            take_events=self.take_events,
            is_admin=self.is_admin,
            forget=self._fleet.forget,
        )

    def find_user(self, api_key: str) -> str | None:
        """The user of an API key, for ``feedback.http.routes``; None for one that is not known."""
        client = self.find(api_key)
        return None if client is None else client.user

    def is_admin(self, api_key: str) -> bool:
        """True if a key may see and delete data of others; no key may without a file of keys."""
        return self._keys is not None and self._keys.is_admin(api_key)

    def take_events(self, api_key: str, count: int) -> float:
        """As of ``feedback.http.routes``, for a key that is known."""
        limiter = None if self._keys is None else self._keys.find(api_key)
        return 0.0 if limiter is None else limiter.take_events(count)


class FleetClient:
    """The endpoint's side of one API key (``endpoint.Client``)."""

    def __init__(self, fleet: Fleet, api_key: str, limiter: Limiter | None):
        self._fleet, self._limiter = fleet, limiter
        self._named = bool(api_key)
        self.user = fleet.user_of(api_key)
        organisation = "" if limiter is None else limiter.key.organisation
        self._origin = fleet.origin_of(organisation)
        self.text: ChatText = fleet.text

    def models(self) -> list[str]:
        """As ``endpoint.Client``."""
        return self._fleet.models.names()

    def ask(self, pending: Pending, session: str) -> Accepted:
        """As ``endpoint.Client``."""
        if not session and self._named:
            session = self._fleet.session_of(self.user, pending.request)
        limiter = self._limiter
        if limiter is None:
            return self._fleet.ask(self.user, session, pending, origin=self._origin)

        def end(running: Running) -> None:
            limiter.leave(running.tokens)

        limiter.enter(pending.request.n)
        try:
            return self._fleet.ask(self.user, session, pending, end, origin=self._origin)
        except BaseException:
            limiter.leave(0)
            raise

    def enter(self, choices: int) -> Callable[[int], None]:
        """Begins a request of another API for so many answers; returns what takes the tokens that
        it read and sampled when it ends. Raises ApiError where the key is over a limit.
        """
        if self._limiter is None:
            return lambda tokens: None
        self._limiter.enter(choices)
        return self._limiter.leave

    def execute(self, command: str, timeout_s: float | None) -> dict[str, Any]:
        """There is no workspace here."""
        raise ApiError("no workspace belongs to this API key", status=404)


def _limited(why: str, retry_after_s: float) -> ApiError:
    code = dict(status=429, kind="rate_limit_error", code="rate_limit_exceeded")
    return ApiError(f"{why}; ask again later", retry_after_s=retry_after_s, **code)
