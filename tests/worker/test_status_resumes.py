"""What became of resumed streams, as a scrape of the status page shows it."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from holdfast.core.address import TcpAddress
from holdfast.failover.lifecycle import Lifecycle
from holdfast.kv.resumes import Resumes
from holdfast.spec.launch import WorkerLaunch
from holdfast.testing.place import fetch
from holdfast.wire.http.server import HttpServer
from holdfast.wire.net import SocketNetwork
from holdfast.worker.status import StatusPage

PLAIN: dict[str, Any] = {"status": "ready"} | dict.fromkeys(
    ("streams", "running", "waiting", "step_ms_p99", "steps_total", "tokens_total", "requests_total"), 0
)


def scraped(port: int) -> dict[str, float]:
    families = text_string_to_metric_families(fetch(f"127.0.0.1:{port}", "/metrics")[1].decode())
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


async def test_every_count_is_a_metric_and_may_fall_with_the_next_wake() -> None:
    """A worker without a group shows 0; one with a group what its engine counted since it woke, each under its name."""
    facts = PLAIN
    life, at_0 = Lifecycle(shadow=True, wake_s=30.0), lambda: 0.0
    page = StatusPage(lambda: facts, lambda: life, at_0, at_0, WorkerLaunch(), {})
    server = HttpServer(page.handle, SocketNetwork())
    address = await server.start(TcpAddress("127.0.0.1", 0))
    assert isinstance(address, TcpAddress)
    try:
        for told in (Resumes(), Resumes(9, 6, 2, 1, 500, 104, 15), Resumes(1, 1, 0, 0, 3, 3, 3)):
            facts = PLAIN | (asdict(told) if told.resumed_total else {})
            shown = await asyncio.to_thread(scraped, address.port)
            assert shown["holdfast_worker_resumed"] == told.resumed_total
            assert shown["holdfast_worker_resumed_resident"] == told.resumed_resident_total
            assert shown["holdfast_worker_resumed_evicted"] == told.resumed_evicted_total
            assert shown["holdfast_worker_resumed_missing"] == told.resumed_missing_total
            assert shown["holdfast_worker_recomputed_tokens_max"] == told.recomputed_tokens_max
            assert shown["holdfast_worker_recomputed_tokens_resident_max"] == told.recomputed_tokens_resident_max
    finally:
        server.close()
