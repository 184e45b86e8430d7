"""Serves a process's status page over HTTP: `/live`, `/health`, `/metrics`.

Always true: a page shows the state at that moment and never waits; no request changes anything.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.wire import metrics
from holdfast.wire.http.connection import HttpConnection
from holdfast.wire.http.request import HttpRequest
from holdfast.wire.http.response import refusal

PAGES = ("/live", "/health", "/metrics")


class StatusPage:
    """The handler of a status page; it reads facts and metrics at each request."""

    def __init__(self, facts: Callable[[], object], scrape: Callable[[], bytes]) -> None:
        self._facts = facts
        self._scrape = scrape

    def handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        if request.path not in PAGES:
            connection.respond(404, refusal(404, f"unknown path {request.path[:200]!r}; there are {', '.join(PAGES)}"))
        elif request.method not in ("GET", "HEAD"):
            connection.respond(405, refusal(405, "only GET is allowed here"), headers=((b"allow", b"GET, HEAD"),))
        elif request.path == "/live":
            connection.respond(200, b'{"status":"live"}')
        elif request.path == "/health":
            connection.respond(200, msgspec.json.encode(self._facts()))
        else:
            connection.respond(200, self._scrape(), metrics.CONTENT_TYPE)
