"""A vault's status page over HTTP: `/live`, `/health`, `/metrics`. Loaded only by a vault that is given an address.

Always true: a page is made from the facts of that moment; who asks here can change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.core.address import parse_address
from holdfast.wire import metrics
from holdfast.wire.http.connection import HttpConnection
from holdfast.wire.http.request import HttpRequest
from holdfast.wire.http.server import HttpServer
from holdfast.wire.net import SocketNetwork

GAUGES = (
    ("weights_bytes", "bytes of weights kept, uncommitted ones too"),
    ("pool_bytes", "bytes of the KV pool and its index"),
    ("readers", "sessions that hold the weights"),
    ("waiting", "sessions that wait for weights or pool"),
    ("pool_epoch", "the epoch the pool was last granted to"),
)
# What the machines' effects are counted as.
COUNTERS = {
    "grants_read": ("GrantRead", "weights granted to a reader"),
    "grants_write": ("GrantWrite", "write locks granted"),
    "commits": ("Committed", "weights committed"),
    "aborts": ("Aborted", "writers that ended before their commit"),
    "pool_grants": ("GrantPool", "grants of the pool"),
    "cpu_fences": ("CpuFence", "CPU fences passed"),
    "gpu_fences": ("GpuFence", "GPU fences passed"),
    "timeouts": ("TimedOut", "waits that ended without a grant"),
    "refusals": ("Refuse", "wishes refused"),
}


class StatusPage:
    """Answers from `facts`, asked for at that moment."""

    def __init__(self, device: str, facts: Callable[[], dict[str, Any]]) -> None:
        self._device = device
        self._facts = facts
        self._registry = metrics.MetricsRegistry()
        self._gauges = {
            name: metrics.Gauge(f"holdfast_vault_{name}", text, ("device",), registry=self._registry)
            for name, text in GAUGES
        }
        self._state = metrics.Gauge(
            "holdfast_vault_state", "1 for the state of a tag", ("device", "tag", "state"), registry=self._registry
        )
        self._counters = {
            name: metrics.Counter(f"holdfast_vault_{name}", text, ("device",), registry=self._registry)
            for name, (_, text) in COUNTERS.items()
        }

    def handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        if request.path not in ("/live", "/health", "/metrics"):
            connection.respond(404, _error(f"unknown path {request.path[:200]!r}; try /live, /health or /metrics"))
        elif request.method not in ("GET", "HEAD"):
            connection.respond(405, _error("only GET is allowed here"), headers=((b"allow", b"GET, HEAD"),))
        elif request.path == "/live":
            connection.respond(200, b'{"status":"live"}')
        elif request.path == "/health":
            connection.respond(200, msgspec.json.encode(self._facts()))
        else:
            connection.respond(200, self.page(), metrics.CONTENT_TYPE)

    def page(self) -> bytes:
        facts = self._facts()
        for name, gauge in self._gauges.items():
            gauge.labels(self._device).set(facts[name])
        self._state.clear()
        for tag, state in (("weights", facts["weights"]), ("kv_cache", facts["pool"].partition("(")[0])):
            self._state.labels(self._device, tag, state).set(1)
        for name, (effect, _) in COUNTERS.items():
            metrics.catch_up(self._counters[name].labels(self._device), facts["counts"].get(effect, 0))
        return metrics.page(self._registry)


async def serve_status(address: str, device: str, facts: Callable[[], dict[str, Any]]) -> str:
    """Listen until the loop ends; the address really bound. Raises OSError or ValueError for one that cannot be."""
    server = HttpServer(StatusPage(device, facts).handle, SocketNetwork())
    return str(await server.start(parse_address(address)))


def _error(message: str) -> bytes:
    """In the shape the frontend's errors have."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return msgspec.json.encode({"error": error})
