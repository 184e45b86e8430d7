"""Prometheus metrics: the one file that knows the library. Logic counts plain numbers; shells show them here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from holdfast.core.unwritten import UNWRITTEN

__all__ = ["CONTENT_TYPE", "Counted", "Counter", "Gauge", "Histogram", "MetricsRegistry", "catch_up", "page"]

MetricsRegistry = CollectorRegistry
CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()

_PROCESS = CollectorRegistry()  # what every page of this process shows besides its own
_unwritten = Counter(
    "holdfast_unwritten",
    "Writes of this process's own log, record or journal that failed (a full disk)",
    ["what"],
    registry=_PROCESS,
)


def page(registry: CollectorRegistry) -> bytes:
    """The text that a scrape gets."""
    for kind, total in UNWRITTEN.totals.items():
        catch_up(_unwritten.labels(kind), total)
    return generate_latest(registry) + generate_latest(_PROCESS)


def catch_up(counter: Counter, total: float) -> None:
    """Bring a counter up to a total that is counted elsewhere."""
    behind = total - counter._value.get()
    if behind > 0:
        counter.inc(behind)


class Counted:
    """A histogram by one label whose buckets are counted elsewhere: `read` gives label, count per bucket, and sum."""

    def __init__(
        self,
        name: str,
        text: str,
        label: str,
        bounds: Sequence[float],
        read: Callable[[], Iterable[tuple[str, Sequence[int], float]]],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._label = name, text, label
        self._bounds = [*map(str, bounds), "+Inf"]
        self._read = read
        registry.register(self)

    def describe(self) -> list[HistogramMetricFamily]:
        return [HistogramMetricFamily(self._name, self._text, labels=(self._label,))]

    def collect(self) -> list[HistogramMetricFamily]:
        """Asked by a scrape."""
        (family,) = self.describe()
        for label, counts, total in self._read():
            below = list(itertools.accumulate(counts))
            family.add_metric((label,), list(zip(self._bounds, map(float, below), strict=True)), total)
        return [family]
