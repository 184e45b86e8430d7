"""A vault's status page over HTTP: `/live`, `/health`, `/metrics`. Loaded only by a vault that is given an address.

Always true: a page is made from the facts of that moment; who asks here can change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.core.address import parse_address
from holdfast.wire import metrics
from holdfast.wire.http.server import HttpServer
from holdfast.wire.http.status_page import StatusPage
from holdfast.wire.net import SocketNetwork

GAUGES = (
    ("weights_bytes", "bytes of weights kept on the device, uncommitted ones too"),
    ("pool_bytes", "bytes of the KV pool and its index"),
    ("device_bytes", "bytes kept on the device, all that the budget counts"),
    ("host_bytes", "bytes of host memory taken for weights that are not on the device"),
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
    "demotions": ("FreeDevice", "moves of the weights to host memory"),
    "promotions": ("Record", "moves of the weights back to the device"),
    "timeouts": ("TimedOut", "waits that ended without a grant"),
    "refusals": ("Refuse", "wishes refused"),
}


class VaultMetrics:
    """What is measured of a vault, from `facts`, asked for at that moment."""

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
    page = StatusPage(facts, VaultMetrics(device, facts).page)
    server = HttpServer(page.handle, SocketNetwork())
    return str(await server.start(parse_address(address)))
