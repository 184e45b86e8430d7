"""Prometheus metrics: the one file that knows the library. Logic counts plain numbers; shells show them here."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

__all__ = ["CONTENT_TYPE", "Counter", "Gauge", "Histogram", "MetricsRegistry", "catch_up", "page"]

MetricsRegistry = CollectorRegistry
CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()


def page(registry: CollectorRegistry) -> bytes:
    """The text that a scrape gets."""
    return generate_latest(registry)


def catch_up(counter: Counter, total: float) -> None:
    """Bring a counter up to a total that is counted elsewhere."""
    behind = total - counter._value.get()
    if behind > 0:
        counter.inc(behind)
