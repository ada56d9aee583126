"""The page of the cycle: Starlette routes for a server that is there already.

    GET  /dashboard              the page, one file without a build step
    GET  /dashboard/state.json   what it shows
    POST /dashboard/acknowledge  {"cycle": 3, "monitor": "edits"}: lets the cycle go on
    POST /dashboard/roll_back    {"cycle": 3}: ends the test of a candidate now

Where the server has keys, reading ``state.json`` needs one of an admin, or the admin key of the
page; without keys whoever can reach the server may read (docs/realtime.md says what). The page
itself says nothing. Users are keyed hashes, and texts of sessions are not shown. What was read is
kept for as long as the page waits between two requests, so that many open pages cost the server as
much as one.

The two that change something need ``Authorization: Bearer <admin key>``; without an admin key there
is nobody who may. Texts reach the page as JSON and its document as text only.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Row
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from models.marks import encodable_all
from people.feedback.tables import SUSPECTS, TRAINING_SETS
from people.realtime.cycle import STATES, CycleConfig
from people.realtime.ledger import Ledger
from people.realtime.parts import Overtaken, Sessions, Store
from people.realtime.satisfaction import Curve
from people.realtime.tables import ALARMS, CYCLES, EDGES, VERSIONS
from people.realtime.watching import finite
from rl_code.config.read_config import ConfigError
from rl_code.harness.endpoint.connections import bearer_key

PAGE = Path(__file__).with_name("dashboard.html")
# How much of the past the page shows.
LAST = {"cycles": 12, "edges": 40, "versions": 12, "alarms": 20, "sessions": 12, "suspects": 40}
# Seconds between two requests of one page, which are those of its script.
EVERY_S = 5.0
# To read thousands of sessions takes a processor from those who are being served. So what was read
# is kept for so many times as long as reading took, if that is longer.
_REST = 4.0
# Bytes of a request to change something; more is no such request.
_LONGEST = 4_096


class Dashboard:
    """Contents of the dashboard's page, and the two actions that an admin may take."""

    def __init__(
        self,
        ledger: Ledger,
        store: Store,
        config: CycleConfig,
        admin_key: str | None = None,
        clock: Callable[[], float] = time.time,
        *,
        may_read: Callable[[str], bool] | None = None,
        truth: Curve | None = None,
    ):
        """admin_key: of at least 16 characters; None for a page that nobody can change anything
        through. may_read: whether a key may read what the page shows; None where everybody may.
        truth: how far the reward follows the satisfaction of simulated people; None for people
        whose satisfaction nobody knows.
        Raises ConfigError for a shorter admin key.
        """
        if admin_key is not None and len(admin_key) < 16:
            raise ConfigError(
                f"the admin key has {len(admin_key)} characters, which can be guessed; take at "
                "least 16 (RL_CODE_ADMIN_KEY)"
            )
        self._ledger = ledger
        self._store = store
        self._config = config
        self._admin_key = admin_key
        self._clock = clock
        self._may_read = may_read
        self._truth = truth
        # What the page shows, until when (``time.monotonic``); whoever reads anew holds the lock.
        self._shown: dict[str, Any] | None = None
        self._shown_until = 0.0
        self._reading = threading.Lock()
        self._page = PAGE.read_text(encoding="utf-8")
        self._headers = {
            "Content-Security-Policy": _policy(self._page),
            "Cache-Control": "no-store",
        }

    def routes(self) -> list[Route]:
        """Routes of the page, for ``Starlette(routes=...)``."""
        return [
            Route("/dashboard", self._show),
            Route("/dashboard/state.json", self._state),
            Route("/dashboard/acknowledge", self._acknowledge, methods=["POST"]),
            Route("/dashboard/roll_back", self._roll_back, methods=["POST"]),
        ]

    def state(self) -> dict[str, Any]:
        """Contents of the page, as plain JSON values; not older than ``EVERY_S``, or than some
        times as long as reading it takes.
        """
        shown = self._shown
        # While somebody reads anew, the others get what there is: threads that wait are missed by
        # other requests.
        if not self._reading.acquire(blocking=shown is None):
            return shown
        try:
            begin = time.monotonic()
            if self._shown is None or begin >= self._shown_until:
                self._shown = self._read()
                end = time.monotonic()
                self._shown_until = end + max(EVERY_S, _REST * (end - begin))
            return self._shown
        finally:
            self._reading.release()

    def _read(self) -> dict[str, Any]:
        if not self._ledger.exists():
            return {"now": self._clock(), "cycle": None}
        row = self._ledger.current()
        versions = [one for one in (row.base, row.candidate) if one is not None]
        sessions = self._store.sessions(versions, row.began_at)
        read = self._ledger.rows
        cycles = read(CYCLES, LAST["cycles"])
        shown = {
            "now": self._clock(),
            "admin": self._admin_key is not None,
            "states": STATES,
            "metric": self._config.watch.metric,
            "margin": self._config.watch.margin,
            "share": self._config.watch.share,
            "cycle": _plain(row),
            "cycles": [_plain(one) for one in cycles],
            "edges": [_plain(one) for one in read(EDGES, LAST["edges"])],
            "versions": [_plain(one) for one in read(VERSIONS, LAST["versions"])],
            "alarms": [_plain(one) for one in read(ALARMS, LAST["alarms"])],
            "training_sets": [_plain(one) for one in read(TRAINING_SETS, LAST["cycles"])],
            "suspects": [_plain(one) for one in read(SUSPECTS, LAST["suspects"])],
            "sessions": _samples(sessions, LAST["sessions"]),
            "truth": None if self._truth is None else self._truth.read(cycles),
        }
        return finite(shown)

    async def _show(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=self._headers)

    async def _state(self, request: Request) -> Response:
        if self._may_read is not None:
            key = _key(request)
            if not self._is_admin(key) and not await run_in_threadpool(self._may_read, key):
                return _refuse(401, "needs the key of an admin, as Authorization: Bearer <key>")
        state = await run_in_threadpool(self.state)
        return JSONResponse(state, headers={"Cache-Control": "no-store"})

    async def _acknowledge(self, request: Request) -> Response:
        def act(cycle: int, body: dict[str, Any]) -> Response:
            monitor = body.get("monitor")
            if not isinstance(monitor, str):
                return _refuse(400, f"monitor = {monitor!r}: expected the name of a monitor")
            if not self._ledger.acknowledge(cycle, monitor, self._clock()):
                return _refuse(404, f"cycle {cycle} has no alarm {monitor!r}")
            return JSONResponse({"acknowledged": monitor})

        return await self._change(request, act)

    async def _roll_back(self, request: Request) -> Response:
        def act(cycle: int, body: dict[str, Any]) -> Response:
            row = self._ledger.current()
            if row.number != cycle or row.state != "watch":
                return _refuse(
                    409,
                    f"cycle {row.number} is in {row.state!r}; only a watched one is rolled back",
                )
            try:
                self._ledger.edge(row, "roll_back", self._clock(), "rolled back by hand")
            except Overtaken as error:
                return _refuse(409, str(error))
            return JSONResponse({"rolled_back": row.candidate})

        return await self._change(request, act)

    def _is_admin(self, key: str) -> bool:
        expected = (self._admin_key or "").encode()
        return bool(expected) and hmac.compare_digest(key.encode(), expected)

    async def _change(
        self, request: Request, act: Callable[[int, dict[str, Any]], Response]
    ) -> Response:
        """Checks who asks and for which cycle, and does it in a thread."""
        if not self._is_admin(_key(request)):
            return _refuse(401, "this needs the admin key, as Authorization: Bearer <key>")
        text = bytearray()
        async for piece in request.stream():
            text += piece
            if len(text) > _LONGEST:
                return _refuse(413, f"expected a body of at most {_LONGEST} bytes")
        try:
            body = encodable_all(json.loads(bytes(text)))
        except (ValueError, RecursionError) as error:
            return _refuse(400, f"the body is no JSON: {error}")
        cycle = body.get("cycle") if isinstance(body, dict) else None
        if type(cycle) is not int:
            return _refuse(400, f"cycle = {cycle!r}: expected the number of a cycle")

        def act_and_show() -> Response:
            answer = act(cycle, body)
            with self._reading:
                self._shown = None  # who changed something sees it at once
            return answer

        return await run_in_threadpool(act_and_show)


def _samples(sessions: Sessions, count: int) -> list[dict[str, Any]]:
    """The last sessions, with everything that is known of each."""
    begin = max(0, len(sessions.session) - count)
    return [
        {
            "session": str(sessions.session[i]),
            "user": str(sessions.user[i]),
            "version": int(sessions.version[i]),
            "at": float(sessions.at[i]),
            "values": {
                name: float(values[i])
                for name, values in sessions.values.items()
                if not math.isnan(values[i])
            },
        }
        for i in range(len(sessions.session) - 1, begin - 1, -1)
    ]


def _key(request: Request) -> str:
    """The key of a request; "" for none."""
    return bearer_key(request.headers.get("authorization", "")) or ""


def _plain(row: Row) -> dict[str, Any]:
    return dict(row._mapping)


def _refuse(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status_code=status)


def _policy(page: str) -> str:
    """Content security policy of a page: own script, style and icon; requests to this server."""
    found = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode() if found else ""
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
