"""How full the KV pool is and how many prefix tokens were found, on the page of the worker that owns it."""

from __future__ import annotations

from dataclasses import asdict

from prometheus_client.parser import text_string_to_metric_families

from holdfast.kv.usage import KvUse
from holdfast.wire import metrics
from holdfast.worker.kv_metrics import PREFIX, KvMetrics


def lines(page: str) -> dict[str, float]:
    families = text_string_to_metric_families(page)
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_counters_go_on_where_a_pool_was_taken_anew() -> None:
    """The owner's counts begin at 0 with every wake; a counter that fell would be read as a burst."""
    registry = metrics.MetricsRegistry()
    shown = KvMetrics(registry)
    for use in (KvUse(100, 25, 10, 640, 320), KvUse(100, 50, 10, 960, 480), KvUse(), KvUse(100, 1, 60, 160, 160)):
        shown.show(asdict(use))
    found = lines(metrics.page(registry).decode())
    assert found["holdfast_worker_prefix_tokens_total"] == 960 + 160
    assert found["holdfast_worker_prefix_hit_tokens_total"] == 480 + 160
    assert found[f"{PREFIX}_total_blocks"] == 100
    assert found[f"{PREFIX}_gpu_cache_usage_percent"] == 0.01
    assert found[f"{PREFIX}_gpu_prefix_cache_hit_rate"] == 1.0


def test_an_engine_without_a_pool_has_no_shares() -> None:
    """A standby: zeros, not a division by them."""
    registry = metrics.MetricsRegistry()
    KvMetrics(registry).show({})
    assert set(lines(metrics.page(registry).decode()).values()) >= {0.0}
