"""The worker's status page over HTTP: `/live`, `/health`, `/metrics`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.wire import metrics
from holdfast.wire.http import HttpConnection, HttpRequest


class StatusPage:
    """Answers probes from facts asked for at that moment."""

    def __init__(self, facts: Callable[[], dict[str, Any]]) -> None:
        self._facts = facts
        self._registry = metrics.MetricsRegistry()
        self._status = metrics.Gauge(
            "dynamo_worker_status", "1 for the worker's state", ("status",), registry=self._registry
        )
        self._gauges = {
            name: metrics.Gauge(f"holdfast_worker_{name}", text, registry=self._registry)
            for name, text in (
                ("streams", "streams on this worker"),
                ("running", "streams the engine advances now"),
                ("waiting", "streams admitted and not yet running"),
                ("step_ms_p99", "recent engine steps, 99th percentile, milliseconds"),
            )
        }
        self._counters = {
            f"{name}_total": metrics.Counter(f"holdfast_worker_{name}", text, registry=self._registry)
            for name, text in (
                ("steps", "engine steps since the start"),
                ("tokens", "tokens made since the start"),
                ("requests", "requests taken since the start"),
            )
        }

    def handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        if request.path not in ("/live", "/health", "/metrics"):
            connection.respond(404, _error(f"unknown path {request.path[:200]!r}; try /live, /health or /metrics"))
        elif request.method not in ("GET", "HEAD"):
            connection.respond(405, _error("only GET is allowed here"), headers=((b"allow", b"GET, HEAD"),))
        elif request.path == "/live":
            connection.respond(200, b'{"status":"live"}')
        elif request.path == "/health":
            facts = self._facts()
            connection.respond(200 if facts["status"] == "ready" else 503, msgspec.json.encode(facts))
        else:
            connection.respond(200, self._metrics(), metrics.CONTENT_TYPE)

    def _metrics(self) -> bytes:
        facts = self._facts()
        self._status.clear()
        self._status.labels(facts["status"]).set(1)
        for name, gauge in self._gauges.items():
            gauge.set(facts[name])
        for name, counter in self._counters.items():
            metrics.catch_up(counter, facts[name])
        return metrics.page(self._registry)


def _error(message: str) -> bytes:
    """In the shape the frontend's errors have."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return msgspec.json.encode({"error": error})
