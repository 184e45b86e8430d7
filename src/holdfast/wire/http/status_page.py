"""A process's status page over HTTP: `/live`, `/health`, `/metrics`.

Always true: a page is made from what is known at that moment and never waits; who asks here can change nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.wire import metrics
from holdfast.wire.http.connection import HttpConnection
from holdfast.wire.http.request import HttpRequest

PAGES = ("/live", "/health", "/metrics")


class StatusPage:
    """Answers from facts and metrics asked for at that moment."""

    def __init__(self, facts: Callable[[], object], scrape: Callable[[], bytes]) -> None:
        self._facts = facts
        self._scrape = scrape

    def handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        if request.path not in PAGES:
            connection.respond(404, error_body(f"unknown path {request.path[:200]!r}; there are {', '.join(PAGES)}"))
        elif request.method not in ("GET", "HEAD"):
            connection.respond(405, error_body("only GET is allowed here"), headers=((b"allow", b"GET, HEAD"),))
        elif request.path == "/live":
            connection.respond(200, b'{"status":"live"}')
        elif request.path == "/health":
            connection.respond(200, msgspec.json.encode(self._facts()))
        else:
            connection.respond(200, self._scrape(), metrics.CONTENT_TYPE)


def error_body(message: str) -> bytes:
    """In the shape the frontend's errors have."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return msgspec.json.encode({"error": error})
