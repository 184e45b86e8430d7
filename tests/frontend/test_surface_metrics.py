"""The frontend's metrics page: it parses, and its numbers follow what clients did."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from holdfast.streams.stats import GAP_BOUNDS_S
from holdfast.testing.deployment import Deployment
from tests.rigs.frontend.raw_http import Raw, chat

CHAT = "/v1/chat/completions"
Samples = dict[tuple[str, tuple[str, ...]], float]


def scrape(deployment: Deployment) -> Samples:
    with Raw(deployment.port) as raw:
        reply = raw.get("/metrics").reply()
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain")
    found: Samples = {}
    for family in text_string_to_metric_families(reply.body.decode()):
        for sample in family.samples:
            assert sample.labels.pop("frontend") == "frontend", "every number says whose it is"
            found[sample.name, tuple(sorted(sample.labels.values()))] = sample.value
    return found


def moved(before: Samples, after: Samples, name: str, *labels: str) -> float:
    key = (name, tuple(sorted(labels)))
    return after[key] - before.get(key, 0.0)


def test_counts_follow_what_clients_did(deployment: Deployment) -> None:
    """Answers by kind and outcome, tokens, times, and clients that left."""
    deployment.wait_until(lambda: deployment.health()["streams"] == 0, "whoever left before to be noticed")
    before = scrape(deployment)
    with Raw(deployment.port) as raw:
        for stream in (True, False):
            assert raw.post(CHAT, chat(stream=stream, max_tokens=10, ignore_eos=True)).reply().status == 200
        assert (
            raw.post("/v1/completions", {"model": "holdfast-sim", "prompt": "x", "max_tokens": 3}).reply().status == 200
        )
        assert raw.post(CHAT, chat(model="made-up")).reply().status == 404
        assert raw.post(CHAT, {"model": 5}).reply().status == 400
    with Raw(deployment.port) as leaver:
        leaver.post(CHAT, chat(stream=True, max_tokens=20_000, ignore_eos=True)).until(b"data: ")
    deployment.wait_until(lambda: deployment.health()["streams"] == 0, "the leaver to be noticed")
    after = scrape(deployment)
    requests, model = "dynamo_frontend_requests_total", "holdfast-sim"
    assert moved(before, after, requests, model, "chat", "stream", "success") == 1
    assert moved(before, after, requests, model, "chat", "unary", "success") == 1
    assert moved(before, after, requests, model, "completions", "unary", "success") == 1
    assert moved(before, after, requests, model, "chat", "stream", "cancelled") == 1
    assert moved(before, after, requests, "unknown", "chat", "unary", "error") == 1
    assert moved(before, after, requests, "unknown", "chat", "unknown", "error") == 1
    assert not any("made-up" in labels for _, labels in after)
    assert moved(before, after, "dynamo_frontend_disconnected_clients_total") == 1
    assert moved(before, after, "dynamo_frontend_output_tokens_total", model) >= 23
    for histogram in ("time_to_first_token_seconds", "request_duration_seconds", "input_sequence_tokens"):
        assert moved(before, after, f"dynamo_frontend_{histogram}_count", model) == 4
    assert moved(before, after, "holdfast_frontend_queue_seconds_count", model) == 4
    assert moved(before, after, "holdfast_frontend_dispatched_total", model) == 4
    assert after["dynamo_frontend_inflight_requests", (model,)] == 0
    alive = ("holdfast_workers", ("alive",))
    deployment.wait_until(lambda: scrape(deployment).get(alive) == 1, "the worker to be well")


def test_every_gap_between_tokens_is_on_the_page(deployment: Deployment) -> None:
    """A stream's tokens less one are counted, by how long each was waited for: what the client saw, not a mean."""
    before = scrape(deployment)
    name = "dynamo_frontend_inter_token_latency_seconds"
    with Raw(deployment.port) as raw:
        assert raw.post(CHAT, chat(stream=True, max_tokens=30, ignore_eos=True)).reply().status == 200
    after = scrape(deployment)
    assert moved(before, after, f"{name}_count", "holdfast-sim") == 29
    assert moved(before, after, f"{name}_bucket", "holdfast-sim", "+Inf") == 29
    assert moved(before, after, f"{name}_sum", "holdfast-sim") > 0
    below = [moved(before, after, f"{name}_bucket", "holdfast-sim", str(bound)) for bound in GAP_BOUNDS_S]
    assert below == sorted(below)
