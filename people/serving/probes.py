"""Endpoints for those who watch over the server: alive, ready for requests, counts.

GET /healthz    200 while its process works
GET /readyz     200 while it takes requests, 503 with the reason otherwise
GET /metrics    counts, as Prometheus reads them
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from people.serving.fleet import Fleet
from people.serving.metrics import MEDIA_TYPE


def probes(fleet: Fleet) -> list[Route]:
    """The routes. They need no key, and name no user."""

    async def alive(request: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def ready(request: Request) -> Response:
        why = fleet.not_ready
        return PlainTextResponse(f"{why or 'ready'}\n", status_code=503 if why else 200)

    async def metrics(request: Request) -> Response:
        return Response(fleet.metrics.text(), media_type=MEDIA_TYPE)

    return [
        Route("/healthz", alive, methods=["GET"]),
        Route("/readyz", ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
