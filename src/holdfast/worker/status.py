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
                ("steps_total", "engine steps since the start"),
                ("tokens_total", "tokens made since the start"),
                ("requests_total", "requests taken since the start"),
                ("step_ms_p99", "recent engine steps, 99th percentile, milliseconds"),
            )
        }

    def handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        if request.method not in ("GET", "HEAD"):
            connection.respond(405, b'{"error":"only GET"}', headers=((b"allow", b"GET, HEAD"),))
        elif request.path == "/live":
            connection.respond(200, b'{"status":"live"}')
        elif request.path == "/health":
            facts = self._facts()
            connection.respond(200 if facts["status"] == "ready" else 503, msgspec.json.encode(facts))
        elif request.path == "/metrics":
            connection.respond(200, self._metrics(), metrics.CONTENT_TYPE)
        else:
            connection.respond(404, b'{"error":"try /live, /health or /metrics"}')

    def _metrics(self) -> bytes:
        facts = self._facts()
        self._status.clear()
        self._status.labels(facts["status"]).set(1)
        for name, gauge in self._gauges.items():
            gauge.set(facts[name])
        return metrics.page(self._registry)
