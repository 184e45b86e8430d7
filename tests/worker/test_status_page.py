"""A real worker's status page: probes, facts that move with the work, metrics that parse."""

from __future__ import annotations

import http.client
import json

from prometheus_client.parser import text_string_to_metric_families

from holdfast.bench.clients import ask, chat_body
from holdfast.bench.deployment import Deployment


def get(deployment: Deployment, path: str, method: str = "GET") -> tuple[int, bytes, http.client.HTTPMessage]:
    record = json.loads((deployment.folder / "run" / "worker-0.json").read_bytes())
    connection = http.client.HTTPConnection(record["status"].removeprefix("tcp://"), timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read(), response.headers
    finally:
        connection.close()


def samples(page: bytes) -> dict[str, float]:
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_probes(deployment: Deployment) -> None:
    """Live, healthy, and everything else refused by name."""
    assert get(deployment, "/live")[:2] == (200, b'{"status":"live"}')
    status, body, _ = get(deployment, "/health")
    facts = json.loads(body)
    assert (status, facts["status"], facts["role"], facts["model"]) == (200, "ready", "worker", "holdfast-sim")
    status, body, _ = get(deployment, "/other")
    assert status == 404
    assert "/health" in json.loads(body)["error"]["message"]
    status, body, headers = get(deployment, "/health", "POST")
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert json.loads(body)["error"]["message"]


async def test_metrics_move_with_the_work(deployment: Deployment) -> None:
    """Requests and tokens are counted, and every line parses."""
    status, page, headers = get(deployment, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    before = samples(page)
    assert before["dynamo_worker_status[ready]"] == 1
    received = await ask(deployment.port, "/v1/chat/completions", chat_body("count", 25))
    assert received.status == 200
    after = samples(get(deployment, "/metrics")[1])
    assert after["holdfast_worker_requests_total"] == before["holdfast_worker_requests_total"] + 1
    assert after["holdfast_worker_tokens_total"] == before["holdfast_worker_tokens_total"] + 25
    assert after["holdfast_worker_steps_total"] > before["holdfast_worker_steps_total"]
    assert after["holdfast_worker_running"] == after["holdfast_worker_waiting"] == 0


def test_what_only_grows_is_a_counter(deployment: Deployment) -> None:
    """So that a scraper takes its rate, and knows a restart from a fall."""
    kinds = {
        family.name: family.type for family in text_string_to_metric_families(get(deployment, "/metrics")[1].decode())
    }
    counters = {"holdfast_worker_steps", "holdfast_worker_tokens", "holdfast_worker_requests"}
    assert {name for name, kind in kinds.items() if kind == "counter"} == counters
